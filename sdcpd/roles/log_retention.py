"""Deletes the commit logs of sessions that have ended, after their retention (D-M5, D-F5).

A log is deleted when no open session's record names it and its tag has been the same for the whole
retention, counted from when a router first saw it so and wrote that down.  Nothing else is asked,
so it is all the same whether its session ended in order, a router died meanwhile, or nobody knows
where the log comes from.  The record of a session is stored before its log can be made, and removed
at its end: so logs are listed first, then records are read, and what is then found without a record
will never have one again.

Whoever was fenced and makes such a log anew writes for nobody: ids of sessions are random and never
opened twice, the session's record is gone, and no router reads from its verifier.  Once it has
written, a verifier takes a log that is gone for a fence (`CommitLog.settle`).  What it leaves has
no record either, and goes the same way.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass

from tiers.api import LogError, LogStore, Mismatch, Records, TierError

log = logging.getLogger("sdcpd.router")
PAGE = 256  # logs that are listed, or notes that are written, at once
SWEEPS = 10  # in the time of a retention
SWEEP_S_MIN, SWEEP_S_MAX = 1.0, 600.0
DELETED_MAX = 4096  # logs remembered, so that one who looks for them is told

_SINCE = struct.Struct(">d")


def even_clock() -> Callable[[], float]:
    """Wall time in seconds as it was at the start, from then on without its jumps."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


@dataclass(frozen=True, slots=True)
class _Note:
    """That a log without a session has had this tag since a time, in seconds of wall time."""

    etag: str
    since_s: float

    def encode(self) -> bytes:
        return _SINCE.pack(self.since_s) + self.etag.encode()


class LogRetention:
    """One router's sweeps over one log store; several routers may sweep the same."""

    def __init__(
        self,
        logs: LogStore,
        notes: Records,
        *,
        open_logs: Callable[[], Awaitable[Set[str]]],
        retention_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`notes` by log id; `open_logs` names those of all sessions. Raises TierError."""
        self._logs, self._records = logs, notes
        self._open_logs = open_logs
        self.retention_s = retention_s
        self._clock = clock or even_clock()
        self._notes = _readable(notes.all())
        self._deleted: OrderedDict[str, float] = OrderedDict()

    async def run(self) -> None:
        """Sweep again and again; what fails is told and left to the next sweep."""
        interval_s = min(max(self.retention_s / SWEEPS, SWEEP_S_MIN), SWEEP_S_MAX)
        while True:
            try:
                await self.sweep()
            except (LogError, TierError) as error:
                log.warning("old commit logs are deleted later: %s", error)
            await asyncio.sleep(interval_s)  # a clock tick, not a wait for something

    async def sweep(self) -> int:
        """Delete what is due and return how many that were; raises LogError and TierError."""
        found = await self._listed()
        open_logs = await self._open_logs()
        idle = {log_id: tag for log_id, tag in found.items() if tag and log_id not in open_logs}
        now = self._clock()
        await self._forget([log_id for log_id in self._notes if log_id not in idle])
        await self._note({one: _Note(tag, now) for one, tag in idle.items() if self._new(one, tag)})
        due = [one for one in idle if now - self._notes[one].since_s >= self.retention_s]
        count = 0
        for log_id in due:  # one after the other, so that appends go on between
            count += await self._delete(log_id)
        if count:
            log.info("%d commit logs deleted: their sessions ended log_retention ago", count)
        return count

    def deleted_ago_s(self, log_id: str) -> float | None:
        """How long ago this process deleted a log, None if it did not, or does not remember."""
        then = self._deleted.get(log_id)
        return None if then is None else self._clock() - then

    async def _listed(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        after = ""
        while page := await self._logs.entries(after=after, count_max=PAGE):
            found |= {entry.log_id: entry.etag for entry in page}
            after = page[-1].log_id
        return found

    def _new(self, log_id: str, etag: str) -> bool:
        """Whether the log is to be kept for a whole retention from now on."""
        note = self._notes.get(log_id)
        # A note of the future was made before the wall clock was set back.
        return note is None or note.etag != etag or note.since_s > self._clock()

    async def _note(self, notes: dict[str, _Note]) -> None:
        items = list(notes.items())
        for start in range(0, len(items), PAGE):
            page = items[start : start + PAGE]
            await asyncio.gather(
                *(self._records.put(log_id.encode(), note.encode()) for log_id, note in page)
            )
            self._notes.update(page)

    async def _forget(self, log_ids: list[str]) -> None:
        for start in range(0, len(log_ids), PAGE):
            page = log_ids[start : start + PAGE]
            await asyncio.gather(*(self._records.delete(log_id.encode()) for log_id in page))
            for log_id in page:
                del self._notes[log_id]

    async def _delete(self, log_id: str) -> bool:
        try:
            await self._logs.delete(log_id, if_match=self._notes[log_id].etag)
        except Mismatch:
            return False  # somebody writes to it, or another router was here first
        self._deleted[log_id] = self._clock()
        if len(self._deleted) > DELETED_MAX:
            self._deleted.popitem(last=False)
        await self._forget([log_id])
        return True


def _readable(stored: Mapping[bytes, bytes]) -> dict[str, _Note]:
    """The notes that are notes; a log of which there is none is kept for a whole retention."""
    notes: dict[str, _Note] = {}
    for key, value in stored.items():
        try:
            (since_s,) = _SINCE.unpack_from(value)
            notes[key.decode()] = _Note(value[_SINCE.size :].decode(), since_s)
        except (struct.error, UnicodeDecodeError):
            log.warning("a note on an old commit log cannot be read and is left where it is")
    return notes
