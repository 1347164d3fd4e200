"""Traces of requests and rounds: what the roles need to tell of them, without OpenTelemetry.

A trace begins with a client's request and nowhere else; verifiers and drafters are told by the
router under which span a session goes (W3C Trace Context), and tell nothing of the others.  Spans
are told when they are over, so that work in progress carries nothing but a `Place`.
`export.py` alone imports OpenTelemetry, and is imported only where traces are wanted.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

HEADER = "traceparent"
_BYTES_MAX = 256  # of the field; version 0 has 55, and what is not looked at costs nothing
_FIELD = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1

Attribute = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a span stands in its trace; `parent_id` is 0 for the first."""

    trace_id: int
    span_id: int
    parent_id: int = 0

    @property
    def traceparent(self) -> str:
        """As other processes are told of it; only what is sampled has a place."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    def child(self) -> Place:
        """A place below it."""
        return Place(self.trace_id, _new_id(64), self.span_id)


@dataclass(frozen=True, slots=True)
class Span:
    """A span that is over; times are in nanoseconds since the epoch."""

    name: str
    place: Place
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    serves: bool
    """Whether it is a request's that came from outside."""
    error: str


class Tracer:
    """Tells of spans that are over; everything it takes is a number or a name, never a text."""

    def __init__(self, emit: Callable[[Span], None], *, sample_percent: int = 100) -> None:
        """`sample_percent` of the requests that come without a trace of their own are told of."""
        self._emit, self._sample = emit, sample_percent / 100

    def begin(self, traceparent: str | None) -> Place | None:
        """The place of a client's request; None for one that is not to be told of."""
        given = read_traceparent(traceparent)
        if given is None:
            return Place(_new_id(128), _new_id(64)) if random.random() < self._sample else None
        place, sampled = given
        return place.child() if sampled else None

    def told(
        self,
        name: str,
        place: Place,
        *,
        begin: float,
        end: float,
        attributes: Mapping[str, Attribute],
        serves: bool = False,
        error: str = "",
    ) -> None:
        """Tell of a span that is over; `begin` and `end` are of the monotonic clock, in seconds."""
        now_ns, now = time.time_ns(), time.monotonic()
        begin_ns, end_ns = (now_ns - int((now - at) * 1e9) for at in (begin, end))
        self._emit(Span(name, place, begin_ns, end_ns, attributes, serves, error))


def place_of(traceparent: str | None) -> Place | None:
    """The span that a peer's work belongs to; None where it tells of none that is sampled."""
    given = read_traceparent(traceparent)
    return given[0] if given is not None and given[1] else None


def read_traceparent(text: str | None) -> tuple[Place, bool] | None:
    """A span, and whether its trace is sampled; None for what is no such field, never an error."""
    if text is None or len(text) > _BYTES_MAX or (match := _FIELD.fullmatch(text)) is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    # Later versions may add something, this one may not.
    if version == "ff" or (version == "00" and more):
        return None
    place = Place(int(trace_id, 16), int(span_id, 16))
    if not place.trace_id or not place.span_id:
        return None
    return place, bool(int(flags, 16) & _SAMPLED)


def _new_id(bits: int) -> int:
    return random.getrandbits(bits) or 1
