"""Which stores of commit logs take no records from a verifier now.

One log that is damaged stalls its session alone: what is noted here ends as soon as any session's
record is in the store, and that session does not note it again.
"""

from __future__ import annotations

from collections.abc import Hashable

from sdcpd.roles.health import Health, Level


class LogStalls:
    """Notes in the verifier's health what its sessions meet."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._stalled: dict[str, set[Hashable]] = {}

    def failed(self, uri: str, session: Hashable, why: str, *, first: bool) -> None:
        """A session's append to the log at `uri` stalls; `first` of this append."""
        store = _store(uri)
        if first:
            self._stalled.setdefault(store, set()).add(session)
        if store in self._stalled:
            text = f"the commit logs at {store} take no records: {why}"
            self._health.note(_name(store), Level.UNREADY, text)

    def worked(self, uri: str) -> None:
        """The store has answered what became of a record."""
        self._end(_store(uri))

    def over(self, uri: str, session: Hashable) -> None:
        """A session's append has ended, however it did."""
        store = _store(uri)
        stalled = self._stalled.get(store, set())
        stalled.discard(session)
        if not stalled:
            self._end(store)

    def _end(self, store: str) -> None:
        if self._stalled.pop(store, None) is not None:
            self._health.clear(_name(store))


def _store(uri: str) -> str:
    return uri.rpartition("/")[0]


def _name(store: str) -> str:
    return f"commit logs at {store}"
