"""A failover by hand: the fence, what the log says, and another verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sdcpd.protocol.commit_log import FenceRecord, encode_record
from sdcpd.protocol.messages import Resume
from tests.kit.cluster import ROUTER
from tests.kit.verifier_wire import Wire

MakeWire = Callable[..., Wire]
GONE = f"{ROUTER}objects/x/gone"


def fence(wire: Wire, epoch: int) -> None:
    """As the router does before it opens the session elsewhere."""
    wire.mlc.append(wire.log_name, encode_record(FenceRecord(epoch=epoch)))


def resume_of(wire: Wire, **changes: object) -> Resume:
    """What the log says."""
    last = wire.commits()[-1]
    resume = Resume(
        round=last.round,
        committed=last.committed,
        digest=last.digest,
        committed_tokens=GONE,
    )
    return replace(resume, **changes)  # type: ignore[arg-type]


def second(make_wire: MakeWire, wire: Wire, **changes: Any) -> Wire:
    """Another verifier of the same model and MLC."""
    return make_wire(mlc=wire.mlc, base="https://v1.test/", **changes)
