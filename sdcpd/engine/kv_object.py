"""KV as an object of the cache, "sdcp-kv-1" (D-M4): pure functions between tensors and octets.

An object is a header map and one octet string with, for each layer, K then V as
[head][position][dim], little-endian.  The header also names what computed it (`engine`): on another
machine or with another torch the last bits may differ, and KV must never change output (D-O10).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sdcpd.engine.api import EngineInfo
from sdcpd.engine.device import to_host
from sdcpd.engine.kv_pool import KvPool
from sdcpd.protocol import cbor
from sdcpd.protocol.codec import encode_item
from sdcpd.protocol.digest import kv_prefix_hash

log = logging.getLogger("sdcpd.engine")
FORMAT = "sdcp-kv-1"
HEADER_OCTETS_MAX = 1024  # ours takes some 250; whatever is longer is not read
_OCTET_STRING = 2 << 5


@dataclass(frozen=True, slots=True)
class KvKind:
    """Which KV an engine can use: its own model's, computed as it would compute it itself."""

    model: bytes
    engine: str
    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, info: EngineInfo, pool: KvPool) -> KvKind:
        """The kind of an engine whose sessions' KV is in a pool."""
        shape = (pool.layers, pool.heads_stored, pool.head_dim)
        return cls(info.model, info.fingerprint, *shape, pool.dtype)

    def octets(self, tokens: int) -> int:
        """Octets of the KV of that many positions, without the header."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize * tokens

    def header(self, tokens: Sequence[int]) -> dict[str, object]:
        """The header of an object that covers exactly these tokens."""
        return {
            "format": FORMAT,
            "model": self.model,
            "engine": self.engine,
            "prefix": kv_prefix_hash(tokens),
            "tokens": len(tokens),
            "layers": self.layers,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True, slots=True)
class KvRows:
    """Keys and values [layers, heads, positions, head_dim] of a prefix's first positions."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def positions(self) -> int:
        """How many positions they cover."""
        return self.keys.shape[2]


class _Unusable(Exception):
    """The object can't be used here; the text says why."""


def encode_kv(kind: KvKind, tokens: Sequence[int], rows: KvRows) -> bytes:
    """The object for `tokens`, whose rows these are."""
    body = laid_out(kind, rows).tobytes()
    head = bytes([_OCTET_STRING | 27]) + len(body).to_bytes(8, "big")
    return b"".join((encode_item(kind.header(tokens)), head, body))


def decode_kv(octets: bytes, *, kind: KvKind, tokens: Sequence[int]) -> KvRows | None:
    """The rows of an object for the beginning of `tokens`; None, and a line in the log, if it is
    of another kind or for other tokens, or is not such an object at all.
    """
    try:
        positions, start = _checked(octets, kind, tokens)
    except _Unusable as e:
        log.info("a KV object is not used: %s", e)
        return None
    stored = np.frombuffer(octets, dtype=stored_as(kind.dtype), offset=start)
    shape = (kind.layers, 2, kind.heads, positions, kind.head_dim)
    # A copy of its own: what travelled lies at any offset, and can't be written to.
    own = torch.from_numpy(stored.astype(stored.dtype.newbyteorder("="))).view(kind.dtype)
    both = own.view(shape)
    return KvRows(both[:, 0], both[:, 1])


def _checked(octets: bytes, kind: KvKind, tokens: Sequence[int]) -> tuple[int, int]:
    """Positions covered, and where the rows begin; nothing of their size is allocated."""
    try:
        header, end = cbor.decode_next(octets[:HEADER_OCTETS_MAX], 0)
    except cbor.NotWellFormed as e:
        raise _Unusable(f"its header cannot be read: {e}") from e
    if not isinstance(header, dict) or cbor.holds_duplicates(header):
        raise _Unusable("it does not begin with a header")
    positions = header.get("tokens")
    if type(positions) is not int or not 0 < positions <= len(tokens):
        raise _Unusable(f"it covers {positions!r} tokens of {len(tokens)}")
    for name, wanted in kind.header(tokens[:positions]).items():
        found = header.get(name)
        if type(found) is not type(wanted) or found != wanted:
            raise _Unusable(f"its {name} is another one")
    start, size = _octet_string(octets, end)
    if size != kind.octets(positions) or len(octets) - start != size:
        raise _Unusable("its length is wrong")
    return positions, start


def _octet_string(octets: bytes, at: int) -> tuple[int, int]:
    """Where the content of the octet string at an offset begins, and its size as stated."""
    info = octets[at] ^ _OCTET_STRING if at < len(octets) else 0xFF
    if info < 24:
        return at + 1, info
    if info > 27:
        raise _Unusable("its header is not followed by an octet string")
    start = at + 1 + (1 << (info - 24))
    return start, int.from_bytes(octets[at + 1 : start], "big")


def laid_out(kind: KvKind, rows: KvRows) -> npt.NDArray[np.signedinteger]:
    """Rows as they are stored, [layers, 2, heads, positions, head_dim].

    By numpy: torch would set up a team of threads for the thread that calls it, and where there are
    more of them than cores, those of the passes no longer wait for each other but sleep.
    """
    halves = [to_host(part).view(bits_of(kind.dtype)).numpy() for part in (rows.keys, rows.values)]
    return np.stack(halves, axis=1).astype(stored_as(kind.dtype), copy=False)


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """An integer type of the same size, which numpy knows too."""
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def stored_as(dtype: torch.dtype) -> np.dtype[np.signedinteger]:
    return np.dtype(f"<i{dtype.itemsize}")
