"""The committed-prefix digest chain d[0..n] (Section 4.2), and the prefix hash of KV objects."""

import struct
from collections.abc import Sequence
from hashlib import sha256

from sdcpd.protocol.limits import DIGEST_BYTES, TOKEN_MAX
from sdcpd.protocol.problems import Unprocessable

_DOMAIN = b"SDCP-PREFIX-1\x00"
_KV_DOMAIN = b"SDCP-KV-1\x00"


def prefix_digest0(contract_digest: bytes, prompt: Sequence[int]) -> bytes:
    """Return d[0], that of the prompt alone; raises Unprocessable for a token over 32 bits."""
    if prompt and max(prompt) > TOKEN_MAX:
        raise Unprocessable("prompt has a token of more than 32 bits")
    tokens = struct.pack(f">I{len(prompt)}I", len(prompt), *prompt)
    return sha256(_DOMAIN + contract_digest + tokens).digest()


def kv_prefix_hash(tokens: Sequence[int]) -> bytes:
    """Return the hash that names a KV object's tokens (D-M4); raises Unprocessable as above."""
    if tokens and max(tokens) > TOKEN_MAX:
        raise Unprocessable("prefix has a token of more than 32 bits")
    return sha256(_KV_DOMAIN + struct.pack(f">{len(tokens)}I", *tokens)).digest()


def extend(digest: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest after committing `tokens` in order; raises Unprocessable as above."""
    for token in tokens:
        digest = _next(digest, token)
    return digest


def _next(digest: bytes, token: int) -> bytes:
    if token > TOKEN_MAX:
        raise Unprocessable("output has a token of more than 32 bits")
    return sha256(digest + token.to_bytes(4, "big")).digest()


def output_digest(tokens: Sequence[int]) -> str:
    """SHA-256 over the output ids as uint32 big-endian, in hex: what two equal texts share."""
    return sha256(struct.pack(f">{len(tokens)}I", *tokens)).hexdigest()


class PrefixChain:
    """All digests of a session's committed prefix, so that any earlier base can be compared.

    Invariant: it holds d[0] to d[committed], 32 octets each.
    """

    def __init__(self, digest0: bytes, tokens: Sequence[int] = ()) -> None:
        assert len(digest0) == DIGEST_BYTES, "d[0] is a SHA-256"
        self._digests = bytearray(digest0)
        self._last = digest0
        self.append(tokens)

    @property
    def committed(self) -> int:
        """The number n of committed output tokens."""
        return len(self._digests) // DIGEST_BYTES - 1

    @property
    def digest(self) -> bytes:
        """d[n]."""
        return self._last

    def append(self, tokens: Sequence[int]) -> bytes:
        """Commit tokens and return the new d[n]; raises Unprocessable and then changes nothing."""
        digest, grown = self._last, bytearray()
        for token in tokens:
            digest = _next(digest, token)
            grown += digest
        self._digests += grown
        self._last = digest
        return digest

    def at(self, length: int) -> bytes | None:
        """Return d[length], or None if no prefix of that length has been committed."""
        if not 0 <= length <= self.committed:
            return None
        start = length * DIGEST_BYTES
        return bytes(self._digests[start : start + DIGEST_BYTES])
