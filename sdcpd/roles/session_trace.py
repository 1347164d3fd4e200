"""The spans of one session, at its verifier and at its drafter; made only where it is traced."""

from __future__ import annotations

import time

from sdcpd.protocol.drafter_io import SendProposal
from sdcpd.protocol.messages import Assignment, SessionOpen, Verdict
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.round_times import Taken
from sdcpd.traces import HEADER, Attribute, Place, Tracer, place_of
from sdcpd.transport.http import Request

SHOWN = ("fetch_q", "score", "commit")  # stages that have a span; waits are told as numbers
WAITS = ("queue", "batch_wait")

Made = tuple[float, float, bool]
"""When drafting began and ended, and whether it was done ahead of the verdict that it needs."""


class SessionTrace:
    """Tells of the work for a session, below the span that the router named with it."""

    def __init__(self, tracer: Tracer, place: Place, *, session: bytes, epoch: int) -> None:
        self._tracer, self._place = tracer, place
        self._of_all: dict[str, Attribute] = {
            "sdcp.session": session_path_id(session),
            "sdcp.epoch": epoch,
        }
        self._alone_since: float | None = None
        self._alone_tokens = 0

    def round(
        self, verdict: Verdict, taken: Taken, *, rule: int, drafted: int, drafter: str | None
    ) -> None:
        """A round has its verdict."""
        attributes: dict[str, Attribute] = {
            **self._of_all,
            "sdcp.round": verdict.round,
            "sdcp.drafted": drafted,
            "sdcp.accepted": verdict.accepted,
            "sdcp.action": verdict.action.name.lower(),
            "sdcp.rule": int(rule),
        }
        if drafter is not None:
            attributes["sdcp.drafter"] = drafter
        for stage, seconds, _ in taken.stages:
            if stage in WAITS:
                attributes[f"sdcp.{stage}_seconds"] = seconds
        place = self._place.child()
        self._tracer.told(
            "sdcp.round", place, begin=taken.begin, end=taken.end, attributes=attributes
        )
        for stage, seconds, end in taken.stages:
            if stage in SHOWN:
                self._tracer.told(
                    f"sdcp.{stage}", place.child(), begin=end - seconds, end=end, attributes={}
                )

    def decodes_alone(self) -> None:
        """A token is computed without a drafter."""
        if self._alone_since is None:
            self._alone_since, self._alone_tokens = time.monotonic(), 0

    def decoded_alone(self) -> None:
        """It is committed."""
        self._alone_tokens += 1

    def period_over(self, why: str) -> None:
        """The drafter is back, or the session is over."""
        if self._alone_since is None:
            return
        begin, self._alone_since = self._alone_since, None
        self._tracer.told(
            "sdcp.self_decode",
            self._place.child(),
            begin=begin,
            end=time.monotonic(),
            attributes={**self._of_all, "sdcp.tokens": self._alone_tokens, "sdcp.end": why},
        )

    def proposes(self, proposal: SendProposal, made: Made) -> None:
        """A drafter has a proposal."""
        begin, end, ahead = made
        attributes: dict[str, Attribute] = {
            **self._of_all,
            "sdcp.round": proposal.round,
            "sdcp.drafted": len(proposal.tokens),
            "sdcp.prepared": ahead,
        }
        self._tracer.told(
            "sdcp.draft", self._place.child(), begin=begin, end=end, attributes=attributes
        )


def trace_of(
    tracer: Tracer | None, request: Request, asked: SessionOpen | Assignment
) -> SessionTrace | None:
    """What tells of a session that a router opens or assigns; None for one that nobody traces."""
    if tracer is None or (place := place_of(request.header(HEADER))) is None:
        return None
    return SessionTrace(tracer, place, session=asked.session, epoch=asked.epoch)
