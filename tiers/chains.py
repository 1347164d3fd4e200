"""What continues what among a tier's objects: a suffix is worth nothing without its beginning.

Every step here is of constant cost, but for a walk to the end of a chain that is remembered: who
evicts a whole chain, or adds to its end again and again, goes each link once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from tiers.api import Key

_PATHS_MAX = 8  # chains that are being evicted at a time
_FOLLOWERS_MAX = 64  # that are looked at: all of them may be leased
_Path = dict[Key, None]


@dataclass(slots=True)
class _Link:
    before: Key | None
    """What it continues, whether that is here or not."""
    chain_bytes: int
    """Of the object and all before it that were here when it came."""


@dataclass(slots=True)
class Chains:
    """Links by key; `is_idle` tells which objects may be evicted."""

    is_idle: Callable[[Key], bool]
    _links: dict[Key, _Link] = field(default_factory=dict)
    _followers: dict[Key, OrderedDict[Key, None]] = field(default_factory=dict)
    _paths: OrderedDict[Key, _Path] = field(default_factory=OrderedDict)

    def add(self, key: Key, before: Key | None, size_bytes: int) -> None:
        """Enter an object that continues another one, or none."""
        self._links[key] = _Link(before, size_bytes + self.chain_bytes(before))
        if before is not None:
            self._followers.setdefault(before, OrderedDict())[key] = None

    def remove(self, key: Key) -> None:
        """Take an object out; what continues it stays, and is found by its name again."""
        before = self._links.pop(key).before
        if before is None:
            return
        followers = self._followers[before]
        del followers[key]
        if not followers:
            del self._followers[before]

    def before(self, key: Key) -> Key | None:
        """What an object that is here continues, if that is here too."""
        link = self._links.get(key)
        return link.before if link is not None and link.before in self._links else None

    def chain_bytes(self, key: Key | None) -> int:
        """Of an object and all before it; 0 where there is no such object."""
        link = None if key is None else self._links.get(key)
        return 0 if link is None else link.chain_bytes

    def last(self, key: Key) -> Key:
        """The end of what continues an object and may go; the object itself if nothing does."""
        path = self._paths.pop(key, None) or {key: None}
        end = next(reversed(path))
        while end != key and not self.is_idle(end):  # it has gone, or is leased
            del path[end]
            end = next(reversed(path))
        while (follower := self._idle_follower(end)) is not None and follower not in path:
            path[follower] = None
            end = follower
        if end != key:
            self._paths[key] = path
            if len(self._paths) > _PATHS_MAX:
                self._paths.popitem(last=False)
        return end

    def _idle_follower(self, key: Key) -> Key | None:
        """One that continues a key and may go, the newest first."""
        followers = self._followers.get(key)
        if followers is None:
            return None
        newest = islice(reversed(followers), _FOLLOWERS_MAX)
        return next((one for one in newest if self.is_idle(one)), None)

    def check(self, keys: set[Key]) -> None:
        """Assert that this is about these objects."""
        assert set(self._links) == keys
        follows = {(link.before, key) for key, link in self._links.items() if link.before}
        assert follows == {(key, one) for key, some in self._followers.items() for one in some}
        assert len(self._paths) <= _PATHS_MAX
