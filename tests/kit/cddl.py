"""Every message that a role sends in any test is held to the draft's CDDL by pycddl.

The roles encode in three places: requests, answers and commit records.  `install` puts a check
there, in this process; for processes that tests start, `tests/kit/site` does it, and what they
find goes to the file that `SDCP_CDDL_REPORT` names.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import cbor2
from pycddl import Schema

REPORT = "SDCP_CDDL_REPORT"
_RULES = (Path(__file__).parents[1] / "sdcp.cddl").read_text()
_NAMES = {
    "SessionOpen": "session-open",
    "SessionState": "session-state",
    "Assignment": "assignment",
    "Proposal": "proposal",
    "Verdict": "verdict",
    "Policy": "policy",
    "Status": "status",
    "Event": "event",
    "Output": "output",
    "CommitRecord": "commit-record",
    "FenceRecord": "fence-record",
}
_RECORDS = """
commit-record = { epoch: uint, round: uint, emitted: [+ uint], committed: uint, digest: hash32 }
fence-record = { epoch: uint }
"""
# Keys of this project's own (D-Z5, D-Z6): a receiver ignores them, the CDDL's maps are closed.
_HINTS: dict[str, tuple[str, ...]] = {
    "session-open": ("self_decode_after_ms",),
    "assignment": ("vocab",),
    "status": ("engine", "model", "ready", "rules", "vocab", "dropped", "tokens_per_s"),
    "output": ("rounds", "drafted", "accepted", "self_decoded"),
}
WHERE = (
    ("sdcpd.roles.base", "encode"),
    ("sdcpd.roles.calls", "encode"),
    ("sdcpd.roles.commit_log", "encode_record"),
)


@lru_cache
def _schema(rule: str) -> Schema:
    return Schema(f"start = {rule}\n{_RULES}\n{_RECORDS}")


def validate(kind: str, octets: bytes) -> None:
    """Raise ValidationError if the octets are not a message of that class of ours."""
    rule = _NAMES[kind]
    content = cbor2.loads(octets)
    own = dict(content)
    _remove(own, _HINTS.get(rule, ()))
    if isinstance(own.get("status"), dict):
        own["status"] = dict(own["status"])
        _remove(own["status"], _HINTS["status"])
    _schema(rule).validate_cbor(octets if own == content else cbor2.dumps(own))


def _remove(content: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        content.pop(key, None)


def install(report: Callable[[str], None], seen: Callable[[str], None]) -> None:
    """Check what is encoded from now on: `seen` gets each kind, `report` each violation."""
    for module_name, function in WHERE:
        module = importlib.import_module(module_name)
        setattr(module, function, _checked(getattr(module, function), report, seen))


def _checked(
    inner: Callable[[Any], bytes], report: Callable[[str], None], seen: Callable[[str], None]
) -> Callable[[Any], bytes]:
    def encode_and_check(message: Any) -> bytes:
        octets = inner(message)
        kind = type(message).__name__
        seen(kind)
        try:
            validate(kind, octets)
        except Exception as e:  # whatever the validator says is a finding, not an end of the run
            report(f"{kind}: {e}: {octets.hex()}")
        return octets

    return encode_and_check


def install_in_child() -> None:
    """In a process that a test has started: append violations to the report file."""
    path = os.environ.get(REPORT)
    if not path:
        return

    def write(line: str) -> None:
        with open(path, "a") as file:
            file.write(line + "\n")

    install(lambda text: write(f"violation {text}"), lambda _: None)
