"""What continues what among a tier's objects: a suffix is worth nothing without its beginning.

The walk to the end of a chain is remembered, so that who evicts all of one goes each link once. The
walk to its beginning is bounded, and made only where there is no room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from tiers.api import Key

_PATHS_MAX = 32  # chains that are being evicted at a time
_REMEMBERED_MAX = 1 << 18  # links of all of them together
_BEGINNING_MAX = 4096  # links that stay for what continues them; 262,144 tokens of KV
_FOLLOWERS_MAX = 64  # that are looked at: all of them may be leased


@dataclass(frozen=True, slots=True)
class _Path:
    """The way from a key to the end of what continues it, without the key."""

    links: list[Key]
    seen: set[Key]


@dataclass(slots=True)
class _Link:
    before: Key | None
    """What it continues, whether that is here or not."""


@dataclass(slots=True)
class Chains:
    """Links by key; `is_idle` tells which objects may be evicted."""

    is_idle: Callable[[Key], bool]
    _links: dict[Key, _Link] = field(default_factory=dict)
    _followers: dict[Key, OrderedDict[Key, None]] = field(default_factory=dict)
    _paths: OrderedDict[Key, _Path] = field(default_factory=OrderedDict)

    def add(self, key: Key, before: Key | None) -> None:
        """Enter an object that continues another one, or none."""
        self._links[key] = _Link(before)
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

    def beginning(self, key: Key | None, but: Key) -> set[Key]:
        """An object and what it continues, all the way, as far as it is here.

        `but` ends it; so does its length, which is that of the longest texts that models take.
        """
        found: set[Key] = set()
        while key is not None and key != but and key not in found and len(found) < _BEGINNING_MAX:
            link = self._links.get(key)
            if link is None:
                break
            found.add(key)
            key = link.before
        return found

    def last(self, key: Key) -> Key:
        """The end of what continues an object and may go; the object itself if nothing does."""
        path = self._paths.pop(key, None) or _Path([], set())
        while path.links and not self.is_idle(path.links[-1]):  # it has gone, or is leased
            path.seen.discard(path.links.pop())
        end = path.links[-1] if path.links else key
        while (follower := self._idle_follower(end)) is not None:
            if follower == key or follower in path.seen:
                break  # a circle
            path.links.append(follower)
            path.seen.add(follower)
            end = follower
        if path.links:
            self._paths[key] = path
            while sum(len(one.links) for one in self._paths.values()) > _REMEMBERED_MAX:
                self._paths.popitem(last=False)
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
