"""`Content-Encoding: sdcp-sparse-f32`: rows of numbers that are nearly all zeros.

Private to this implementation, and used only where the other side names it (as D-Z4 does zstd). Of
N values of binary32, little-endian, it holds N as 8 octets, then the places of those that are not
zero in ascending order, 4 octets each, then those values, 4 octets each; all little-endian. Zero
is the one of all bits 0, so that every value comes back bit for bit.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass

_COUNT = struct.Struct("<Q")
_WORD = 4  # octets of a place and of a value; array's "I" and "f" on every platform that we run on


CODED_BYTES_MAX = 256 << 10
"""Longer ones are not taken: parsing takes the interpreter some milliseconds at this size."""


class BadSparse(Exception):
    """The octets are none of this coding; the text says why."""


class SparseTooLarge(Exception):
    """What they decode to is more than allowed; nothing was allocated."""


@dataclass(frozen=True, slots=True)
class SparseRows:
    """M rows of `width` values: the places of those that are not zero, counted over all rows."""

    width: int
    rows: int
    places: array[int]
    values: array[float]

    def first(self, rows: int) -> SparseRows:
        """Only so many of them."""
        end = rows * self.width
        count = sum(place < end for place in self.places)
        return SparseRows(self.width, rows, self.places[:count], self.values[:count])

    @property
    def is_small(self) -> bool:
        """Whether it is much shorter coded, and short enough; dense rows are neither."""
        coded_bytes = _COUNT.size + 2 * _WORD * len(self.places)
        return coded_bytes <= min(CODED_BYTES_MAX, 2 * self.width * self.rows)

    def dense(self) -> memoryview:
        """As they stand for."""
        return decode(self.coded(), bytes_max=_WORD * self.width * self.rows)

    def coded(self) -> bytes:
        """As they travel."""
        parts = _little(self.places), _little(self.values)
        return b"".join((_COUNT.pack(self.width * self.rows), *parts))


def decode(coded: bytes | memoryview, *, bytes_max: int) -> memoryview:
    """The values as they stand for, read-only; raises BadSparse or SparseTooLarge."""
    if decoded_bytes(coded) > bytes_max:
        raise SparseTooLarge(f"{decoded_bytes(coded)} octets of at most {bytes_max}")
    if len(coded) > CODED_BYTES_MAX:
        raise SparseTooLarge(f"{len(coded)} coded octets of at most {CODED_BYTES_MAX}")
    count, places, values = _parsed(coded)
    dense = memoryview(bytearray(_WORD * count))
    words = dense.cast("I")
    for place, value in zip(places, values, strict=True):
        words[place] = value
    return dense.toreadonly()


def decoded_bytes(coded: bytes | memoryview) -> int:
    """How many octets they decode to; raises BadSparse."""
    if len(coded) < _COUNT.size:
        raise BadSparse("shorter than a count")
    (count,) = _COUNT.unpack_from(coded)
    return _WORD * int(count)


def _parsed(coded: bytes | memoryview) -> tuple[int, array[int], array[int]]:
    count = decoded_bytes(coded) // _WORD
    pairs, rest = divmod(len(coded) - _COUNT.size, 2 * _WORD)
    if rest:
        raise BadSparse("not as many places as values")
    body = memoryview(coded)[_COUNT.size :]
    places, values = _words(body[: _WORD * pairs]), _words(body[_WORD * pairs :])
    if any(map(int.__ge__, places, places[1:])) or (pairs and places[-1] >= count):
        raise BadSparse("places that are not in ascending order, or beyond the count")
    if 0 in values:
        raise BadSparse("a zero among the values that are not zero")
    return count, places, values


def _words(octets: memoryview) -> array[int]:
    words = array("I", bytes(octets))
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _little(words: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()
