"""The tier at another sdcpd: what is worth a request to it, over its HTTP resource (resource.py).

It takes KV, which many sessions use and any machine can compute: the room and its eviction are the
other's. Objects are immutable there too; what this process knows to be replaced is deleted before
it is read again. Nothing of it is an error: what fails is a miss, and a server that fails is left
alone for a while.

A cache that is asked by another one answers from what lies with it (`asked_by_a_tier`), so that two
that name each other do not ask in a circle.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from sdcpd.transport.http import Client, Headers, Response, TransportError
from tiers.api import Entry, Key, TierFull, TierStats, entry_of
from tiers.http_fields import AFTER, HOP
from tiers.meter import Metered
from tiers.pause import Pause

KINDS = ("target_kv.", "draft_kv.", "prompt_kv.")  # what the names of KV begin with
OBJECT_BYTES_MIN = 16 << 10
CALL_S = 2.0
TRANSFER_S = 10.0
GIVEN_UP_S = 0.2  # a caller that goes away later has waited for a server that does not answer
_TAGS_MAX = 16384  # keys of which it is remembered what they hold there
_asked_by_a_tier: ContextVar[bool] = ContextVar("asked_by_a_tier", default=False)


@contextmanager
def asked_by_a_tier() -> Iterator[None]:
    """Until it ends, no remote tier is asked in this task: another one has asked us."""
    token = _asked_by_a_tier.set(True)
    try:
        yield
    finally:
        _asked_by_a_tier.reset(token)


class RemoteTier(Metered):
    """Keeps KV below the base URI of another instance; the client belongs to its maker."""

    def __init__(
        self,
        client: Client,
        base: str,
        *,
        kinds: tuple[str, ...] = KINDS,
        object_bytes_min: int = OBJECT_BYTES_MIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kinds` are what the names of objects that are taken begin with."""
        super().__init__()
        self._client = client
        self._base = base.rstrip("/")
        self._kinds, self._object_bytes_min = kinds, object_bytes_min
        self._pause = Pause(f"the cache at {self._base}", clock)
        self._tags: OrderedDict[Key, str] = OrderedDict()
        self._corrupt = self._failures = 0

    def takes(self, key: Key, entry: Entry, *, lease_s: float) -> bool:
        """Whether a put of that kind is taken at all."""
        return (
            lease_s == 0
            and key.name.startswith(self._kinds)
            and len(entry.data) >= self._object_bytes_min
        )

    async def superseded(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        """Learn what the key holds from now on, which a tier above has taken."""
        if self._tags.get(key, entry.etag) != entry.etag:
            await self.delete(key)

    async def _get(self, key: Key) -> Entry | None:
        entry = None
        if key.name.startswith(self._kinds):
            answer = await self._call("GET", key, timeout_s=TRANSFER_S)
            if answer is not None and answer.status == 200:
                entry = self._checked(key, answer)
        if entry is None:
            return None
        self._remember(key, entry.etag)
        return entry

    async def _put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        if not self.takes(key, entry, lease_s=lease_s):
            raise TierFull("only KV without a lease is kept at another instance")
        await self.superseded(key, entry, lease_s=lease_s)
        headers: Headers = (("content-type", entry.media_type), ("if-none-match", "*"))
        if entry.coding:
            headers += (("content-encoding", entry.coding),)
        if entry.after:
            headers += ((AFTER, entry.after),)
        answer = await self._call(
            "PUT", key, headers=headers, body=bytes(entry.data), timeout_s=TRANSFER_S
        )
        if answer is None:
            raise TierFull(f"{self._base} does not answer, or is left alone for a while")
        if answer.status not in (201, 204):
            raise TierFull(f"{self._base} answered {answer.status} to an object")
        self._remember(key, entry.etag)

    async def delete(self, key: Key) -> None:
        self._tags.pop(key, None)
        if key.name.startswith(self._kinds):
            await self._call("DELETE", key)

    async def renew(self, key: Key, lease_s: float) -> bool:
        if not key.name.startswith(self._kinds):
            return False
        lease = (("sdcp-lease", str(round(1000 * lease_s))),)
        answer = await self._call("POST", key, headers=lease)
        return answer is not None and answer.status == 204

    async def holds(self, key: Key) -> bool:
        answer = await self._call("HEAD", key) if key.name.startswith(self._kinds) else None
        return answer is not None and answer.status == 200

    def stats(self) -> TierStats:
        """The room is the other's, and so is what is in it."""
        return TierStats(
            kind="remote",
            size_bytes=0,
            used_bytes=0,
            leased_bytes=0,
            objects=0,
            hits=self.meter.hits.total(),
            misses=self.meter.misses.total(),
            meter=self.meter,
            corrupt=self._corrupt,
            failures=self._failures,
        )

    async def aclose(self) -> None:
        """Nothing is left to do."""

    def check(self) -> None:
        """Assert that bounds hold."""
        assert len(self._tags) <= _TAGS_MAX

    def _checked(self, key: Key, answer: Response) -> Entry | None:
        """The object, if its octets are those that its tag is of."""
        media_type = answer.header("content-type") or "application/octet-stream"
        entry = entry_of(answer.body, media_type=media_type)
        if answer.header("etag") != entry.etag:
            self._corrupt += 1
            return None
        if self._tags.get(key, entry.etag) != entry.etag:
            return None
        return replace(entry, after=answer.header(AFTER) or "")

    async def _call(
        self,
        method: str,
        key: Key,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = CALL_S,
    ) -> Response | None:
        """The answer to a request; None where none came or none was asked for."""
        if _asked_by_a_tier.get() or not self._pause.enter():
            return None
        failed: bool | None = None
        begin = time.monotonic()
        uri = f"{self._base}/objects/{path_of(key)}"
        try:
            answer = await self._client.request(
                method, uri, headers=((HOP, "1"), *headers), body=body, timeout_s=timeout_s
            )
            failed = answer.status >= 500 and answer.status != 507
        except TransportError:
            failed = True
            return None
        finally:
            if failed is None and time.monotonic() - begin >= GIVEN_UP_S:
                failed = True  # whoever asked has given up waiting
            self._failures += bool(failed)
            self._pause.leave(failed=failed)
        return answer

    def _remember(self, key: Key, etag: str) -> None:
        self._tags[key] = etag
        self._tags.move_to_end(key)
        if len(self._tags) > _TAGS_MAX:
            self._tags.popitem(last=False)


def path_of(key: Key) -> str:
    """Where an object lies below `objects/`; scopes that no path can spell get one of their own.

    That of a session or tenant has 22 characters (16 octets, D-M3), which none of these has.
    """
    scope = key.scope
    if scope.startswith("."):
        scope = scope[1:].replace(".", "_")
    return f"{scope}/{key.name}"
