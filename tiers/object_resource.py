"""Objects over HTTP: `objects/{scope}/{name}` (D-M1 to D-M4, D-M10)."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace

from sdcpd.protocol.problems import (
    InsufficientStorage,
    Malformed,
    NotFound,
    PreconditionFailed,
    TooLarge,
    UnsupportedMediaType,
)
from sdcpd.transport.http import Headers, Request, Response
from tiers.api import Entry, Key, Octets, Tier, TierFull, entry_of
from tiers.checksum import dense_bytes
from tiers.coding import CODINGS, WORTH, BadCoding, DecodedTooLarge, decoded
from tiers.http_fields import (
    AFTER,
    HOP,
    OCTET_STREAM,
    accepts,
    after,
    field,
    lease_s,
    media_type,
    tags,
)
from tiers.remote import asked_by_a_tier
from tiers.representation import representation
from tiers.stack import KeyLocks

IDENTITY = "identity"
TAKEN = (*CODINGS, IDENTITY)
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS")
DECODED_AT_ONCE = 2
RETRY_AFTER_S = 1.0  # leases of rows end with their round


class ObjectResource:
    """Serves one tier; the only one through which others write to it, so write-once holds."""

    def __init__(self, objects: Tier, *, base_path: str, bytes_max: int) -> None:
        """`bytes_max` bounds one object's octets."""
        self._objects = objects
        self._base_path = base_path
        self._bytes_max = bytes_max
        self._locks = KeyLocks()
        # A few octets may stand for very many: no more than so many objects are decoded at a time.
        self._reading = asyncio.Semaphore(DECODED_AT_ONCE)
        self._writing = asyncio.Semaphore(DECODED_AT_ONCE)

    async def handle(self, key: Key, request: Request) -> Response:
        """Answer a request that is authorized and of a known method; raises Problem."""
        if field(request, HOP) is None:
            return await self._handle(key, request)
        with asked_by_a_tier():
            return await self._handle(key, request)

    async def _handle(self, key: Key, request: Request) -> Response:
        match request.method:
            case "GET" | "HEAD":
                return await self._get(key, request)
            case "PUT":
                return await self._put(key, request)
            case "POST":
                return await self._lease(key, request)
            case _:
                return await self._delete(key, request)

    async def _get(self, key: Key, request: Request) -> Response:
        entry = await self._objects.get(key)
        if entry is None:
            raise NotFound("no such object, or it has gone")
        vary: Headers = (("vary", "accept-encoding"),)
        if entry.after:
            vary = ((AFTER, entry.after), *vary)
        # A range is one of the decoded octets, whatever the client can decode.
        if entry.coding and field(request, "range") is None and accepts(request, entry.coding):
            data, etag = entry.data, _tag_of_coded(entry)
            vary = (("content-encoding", entry.coding), *vary)
            return representation(
                request,
                data,
                etag=etag,
                media_type=entry.media_type,
                extra=vary,
                others=_tags_of(entry),
            )
        size_bytes = dense_bytes(entry) if request.method == "HEAD" else None
        known = size_bytes is not None or not entry.coding
        return representation(
            request,
            entry.data if known else await self._dense(entry),
            etag=entry.etag,
            media_type=entry.media_type,
            extra=vary,
            size_bytes=size_bytes,
            others=_tags_of(entry),
        )

    async def _put(self, key: Key, request: Request) -> Response:
        lease = self._checked(request)
        # To the end: what a few octets stand for is kept until it is stored or refused.
        async with self._writing if _coding(request) != IDENTITY else nullcontext():
            return await self._put_checked(key, request, lease)

    async def _put_checked(self, key: Key, request: Request, lease: float | None) -> Response:
        dense, entry = await self._entry(request)
        async with self._locks.of(key):
            present = await self._objects.get(key)
            _check_conditions(request, present)
            if present is None:
                await self._store(key, entry, lease or 0.0)
            elif await self._dense(present) != dense:
                raise PreconditionFailed(
                    "the object exists and is written only once", headers={"etag": present.etag}
                )
            elif lease is not None and not await self._objects.renew(key, lease):
                await self._store(key, present, lease)  # it has gone since it was read
        if present is not None:
            return Response(204, (("etag", present.etag),))
        location = f"{self._base_path}/objects/{key.scope}/{key.name}"
        return Response(201, (("etag", entry.etag), ("location", location)))

    async def _entry(self, request: Request) -> tuple[Octets, Entry]:
        """The object of a PUT, decoded, and as it is kept: coded where that is smaller."""
        kind = media_type(request) or OCTET_STREAM
        coding = _coding(request)
        if coding == IDENTITY:
            entry = entry_of(request.body, media_type=kind)
            return request.body, replace(entry, after=after(request))
        try:
            dense = await decoded(request.body, coding, bytes_max=self._bytes_max)
        except DecodedTooLarge as error:
            raise TooLarge(f"an object has at most {self._bytes_max} octets") from error
        except BadCoding as error:
            raise Malformed(str(error)) from error
        entry = replace(entry_of(dense, media_type=kind), after=after(request))
        if len(request.body) < WORTH * len(dense):
            entry = replace(entry, data=request.body, coding=coding)
        return dense, entry

    async def _dense(self, entry: Entry) -> bytes:
        if not entry.coding:
            return bytes(entry.data)
        try:
            async with self._reading:
                data = bytes(entry.data)
                return bytes(await decoded(data, entry.coding, bytes_max=self._bytes_max))
        except (BadCoding, DecodedTooLarge) as error:
            # It was decoded when it came, under a limit that may have been another then.
            raise NotFound(f"the object can no longer be decoded: {error}") from error

    async def _store(self, key: Key, entry: Entry, lease: float) -> None:
        try:
            await self._objects.put(key, entry, lease_s=lease)
        except TierFull as error:
            raise InsufficientStorage(
                "the cache has no room that is not leased", retry_after_s=RETRY_AFTER_S
            ) from error

    def _checked(self, request: Request) -> float | None:
        """Check all that does not depend on what is stored; returns the lease."""
        if _coding(request) not in TAKEN:
            raise UnsupportedMediaType(
                f"objects may come with the content codings {', '.join(TAKEN)}",
                headers={"accept-encoding": ", ".join(TAKEN)},
            )
        if len(request.body) > self._bytes_max:
            raise TooLarge(f"an object has at most {self._bytes_max} octets")
        if field(request, "content-range") is not None:
            raise Malformed("an object is written as a whole, without content-range")
        return lease_s(request)

    async def _lease(self, key: Key, request: Request) -> Response:
        lease = lease_s(request)
        if lease is None or request.body:
            raise Malformed("a lease is an empty POST with SDCP-Lease: milliseconds")
        if not await self._objects.renew(key, lease):
            raise NotFound("no such object, or it has gone")
        return Response(204)

    async def _delete(self, key: Key, request: Request) -> Response:
        async with self._locks.of(key):
            if tags(request, "if-match") is not None:
                _check_conditions(request, await self._objects.get(key))
            await self._objects.delete(key)
        return Response(204)


def _coding(request: Request) -> str:
    return (field(request, "content-encoding") or IDENTITY).lower()


def _tag_of_coded(entry: Entry) -> str:
    """Of another representation of the same object, so it is another tag (RFC 9110 8.8.1)."""
    return f'{entry.etag[:-1]}-{entry.coding}"'


def _tags_of(entry: Entry) -> tuple[str, ...]:
    """Those of all its representations, the one without a coding first."""
    return (entry.etag, _tag_of_coded(entry)) if entry.coding else (entry.etag,)


def _check_conditions(request: Request, present: Entry | None) -> None:
    etag = None if present is None else present.etag
    both = (None,) if present is None else _tags_of(present)
    if_match = tags(request, "if-match")
    if_none_match = tags(request, "if-none-match")
    if (if_match is not None and not any(map(if_match.match_strongly, both))) or (
        if_none_match is not None and any(map(if_none_match.match_weakly, both))
    ):
        raise PreconditionFailed(
            "the object exists" if etag else "no such object",
            headers={"etag": etag} if etag else {},
        )
