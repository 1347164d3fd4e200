"""MLC objects as the roles use them: fetch what is trusted, write afresh, hold leases."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

from sdcpd.protocol.codec import decode_tokens, encode_tokens
from sdcpd.protocol.problems import Problem, Unavailable, Unprocessable
from sdcpd.protocol.sparse import SparseRows
from sdcpd.protocol.uris import cache_ref_trusted, join, session_path_id
from sdcpd.transport.http import Client, Headers, Response, TransportError
from tiers.api import Octets
from tiers.coding import (
    CODINGS,
    SPARSE,
    ZSTD,
    BadCoding,
    DecodedTooLarge,
    decoded,
    encoded,
)
from tiers.sizes import LEASE_S

log = logging.getLogger("sdcpd")
# Less is sent in a few packets, coded or not.
CODED_OCTETS_MIN = 16 << 10
FETCH_S = 5.0  # D-P12


class NotTrusted(Exception):
    """The reference points outside the caches trusted for the session; it was not contacted."""


class ObjectGone(Exception):
    """The cache answered, but not with the object."""


class ObjectTooLarge(ObjectGone):
    """The object is longer than anything that could be meant."""


class Objects:
    """Reads and writes MLC objects; `bases` are those trusted (D-M2), `own` the one written to."""

    def __init__(
        self,
        client: Client,
        *,
        bases: Sequence[str],
        own: str,
        is_near: Callable[[str], bool] = lambda _: False,
        scoped: Mapping[str, Collection[bytes]] | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        """`is_near` tells of caches to which nothing travels, in this process or on this host.

        `scoped` are base URIs of caches that are trusted for some scopes alone.
        """
        self.lease_ms = round(1000 * lease_s)
        self._scoped = dict(scoped or {})
        self._client = client
        self._bases = tuple(bases)
        self._own = own
        self._is_near = is_near
        self._taken: dict[str, frozenset[str]] = {}
        """The content codings that caches take, by origin (D-Z4)."""

    def trusted(self, reference: str, scope: bytes | None) -> bool:
        """Whether a reference may be fetched for a session of that scope."""
        return cache_ref_trusted(reference, self._bases, scope=scope, scoped=self._scoped)

    async def fetch(
        self, reference: str, *, scope: bytes | None, octets_max: int, timeout_s: float = FETCH_S
    ) -> Octets:
        """Get an object; raises NotTrusted, ObjectGone, ObjectTooLarge or TransportError."""
        if not self.trusted(reference, scope):
            raise NotTrusted(f"{reference} is not in a trusted cache of the session's scope")
        accept = (("accept-encoding", ", ".join(CODINGS)),)
        response = await self._client.request("GET", reference, headers=accept, timeout_s=timeout_s)
        if response.status == 503:  # the object may well be there: it is worth asking again
            raise TransportError("it answered 503: too much is asked of it")
        if response.status != 200:
            raise ObjectGone(f"the cache answered {response.status}")
        if len(response.body) > octets_max:
            raise ObjectTooLarge(f"the object is larger than {octets_max} octets")
        return await _plain(response, octets_max)

    async def fetch_tokens(
        self, reference: str, *, scope: bytes | None, octets_max: int = 16 << 20
    ) -> tuple[int, ...]:
        """Get a token array; raises Unprocessable or Unavailable as D-O8 asks."""
        try:
            octets = await self.fetch(reference, scope=scope, octets_max=octets_max)
            return decode_tokens(bytes(octets))
        except (NotTrusted, ObjectGone) as e:
            raise Unprocessable(f"a cache reference of the session cannot be used: {e}") from e
        except TransportError as e:
            raise Unavailable(f"the cache is not answering: {e}", retry_after_s=1) from e
        except Problem as e:
            raise Unprocessable("a token object is malformed") from e

    async def write(
        self,
        session: bytes,
        scope: bytes | None,
        kind: str,
        octets: bytes | SparseRows,
        *,
        base: str | None = None,
    ) -> str:
        """Write an object under a fresh name, leased; returns its reference.

        `base` is another role's cache (rows travel to the verifier's). Sparse rows stand for their
        octets. Raises ObjectGone or TransportError.
        """
        segment = session_path_id(scope or session)
        name = f"{kind}.{session_path_id(session)}.{secrets.token_urlsafe(9)}"
        reference = join(base or self._own, f"objects/{segment}/{name}")
        media_type = (
            "application/cbor" if kind in ("prompt", "tokens") else "application/octet-stream"
        )
        await self.put(reference, octets, media_type=media_type)
        return reference

    async def put(
        self,
        reference: str,
        octets: bytes | SparseRows,
        *,
        media_type: str = "application/octet-stream",
        leased: bool = True,
        timeout_s: float = FETCH_S,
    ) -> None:
        """Write an object that must not be there yet; raises ObjectGone or TransportError."""
        lease = (("sdcp-lease", str(self.lease_ms)),) if leased else ()
        body, coding = await self._coded(reference, octets)
        response = await self._client.request(
            "PUT",
            reference,
            headers=(("content-type", media_type), ("if-none-match", "*"), *coding, *lease),
            body=body,
            timeout_s=timeout_s,
        )
        if not 200 <= response.status < 300:
            raise ObjectGone(f"the cache answered {response.status} to a write")

    async def _coded(self, reference: str, octets: bytes | SparseRows) -> tuple[bytes, Headers]:
        """An object as it travels: coded where that is smaller and its cache takes it."""
        if isinstance(octets, SparseRows):
            if octets.is_small and SPARSE in await self._codings(reference):
                return octets.coded(), (("content-encoding", SPARSE),)
            octets = bytes(octets.dense())
        if len(octets) < CODED_OCTETS_MIN or self._is_near(reference):
            return octets, ()
        coded = await encoded(octets) if ZSTD in await self._codings(reference) else None
        return (octets, ()) if coded is None else (coded, (("content-encoding", ZSTD),))

    async def _codings(self, reference: str) -> frozenset[str]:
        """Those that a cache takes, by its answer to OPTIONS; raises TransportError."""
        origin = "/".join(reference.split("/", 3)[:3])
        if origin not in self._taken:
            answer = await self._client.request("OPTIONS", reference, timeout_s=FETCH_S)
            offered = (answer.header("accept-encoding") or "").lower().split(",")
            known = frozenset(one.strip() for one in offered)
            self._taken[origin] = known if 200 <= answer.status < 300 else frozenset()
        return self._taken[origin]

    async def exists(self, reference: str) -> bool:
        """Whether the cache has an object; raises TransportError."""
        response = await self._client.request("HEAD", reference, timeout_s=FETCH_S)
        return response.status == 200

    async def write_tokens(self, session: bytes, scope: bytes | None, tokens: Sequence[int]) -> str:
        """Write committed tokens as an object (D-N7)."""
        return await self.write(session, scope, "tokens", encode_tokens(tuple(tokens)))

    async def lease(self, reference: str, lease_ms: int) -> Response:
        """Renew a lease, or release it with 0; that a cache knows no leases is no error (D-M1)."""
        return await self._client.request(
            "POST", reference, headers=(("sdcp-lease", str(lease_ms)),), timeout_s=FETCH_S
        )

    async def release(self, reference: str) -> None:
        """Give a lease up, if its cache is there; otherwise it lapses."""
        try:
            await self.lease(reference, 0)
        except TransportError as e:
            log.debug("%s not released: %s", reference, e)


async def _plain(response: Response, octets_max: int) -> Octets:
    """The object of an answer, decoded; raises ObjectGone or ObjectTooLarge."""
    coding = (response.header("content-encoding") or "identity").lower()
    if coding == "identity":
        return response.body
    if coding not in CODINGS:
        raise ObjectGone(f'the cache sent the content coding "{coding[:40]}", which was not asked')
    try:
        return await decoded(response.body, coding, bytes_max=octets_max)
    except DecodedTooLarge as error:
        raise ObjectTooLarge(f"the object is larger than {octets_max} octets") from error
    except BadCoding as error:
        raise ObjectGone(f"the cache sent an object that cannot be decoded: {error}") from error
