"""Header blocks that need no state: HPACK with the static table and plain literals (RFC 7541).

Once both sides have announced a dynamic table of no size, a block means the same wherever it
stands, and a field is a few octets that can be kept. What this does not read (Huffman codes,
dynamic entries, size updates) is hpack's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hpack.table import HeaderTable

from sdcpd.transport.h2_fields import FIELDS_KEPT, encoded_field

RawFields = list[tuple[bytes, bytes]]

_STATIC = HeaderTable.STATIC_TABLE
_INDEX_OF_FIELD = {field: index for index, field in enumerate(_STATIC, 1)}
_INDEX_OF_NAME = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC, 1)))}
_HUFFMAN = 0x80
FIELD_OVERHEAD_BYTES = 32
_LENGTH_OCTETS_MAX = 3  # of a continued integer; more than a block may hold


class NotPlain(Exception):
    """The block holds something that only hpack reads, or is none."""


@lru_cache(maxsize=FIELDS_KEPT)
def plain_field(name: str, value: str) -> bytes:
    """One field for a block; raises ValueError where it would break the peer's connection."""
    key, octets = encoded_field(name, value)
    index = _INDEX_OF_FIELD.get((key, octets))
    if index is not None:
        return bytes((0x80 | index,))
    index = _INDEX_OF_NAME.get(key)
    head = _integer(index, 4) if index else b"\x00" + _integer(len(key), 7) + key
    return head + _integer(len(octets), 7) + octets


def list_bytes(fields: Iterable[tuple[bytes, bytes]]) -> int:
    """The size of a header list (RFC 9113 section 6.5.2)."""
    return sum(len(name) + len(value) + FIELD_OVERHEAD_BYTES for name, value in fields)


def read_plain(block: bytes, *, list_bytes_max: int) -> RawFields:
    """The fields of a block; raises NotPlain, for too many of them as soon as they are."""
    fields: RawFields = []
    position, end = 0, len(block)
    fields_max = list_bytes_max // FIELD_OVERHEAD_BYTES
    try:
        while position < end:
            if len(fields) > fields_max:
                raise NotPlain("a list that is too large")
            first = block[position]
            if first & 0x80:
                fields.append(_static(first & 0x7F))
                position += 1
                continue
            # With a table of no size, "add to the table" and "do not" are the same.
            index, position = _read_integer(block, position, 6 if first & 0x40 else 4)
            if first & 0x60 == 0x20:
                raise NotPlain("a size update")
            if index:
                name = _static(index)[0]
            else:
                name, position = _read_string(block, position)
            value, position = _read_string(block, position)
            fields.append((name, value))
    except IndexError as error:
        raise NotPlain("it is cut short") from error
    if list_bytes(fields) > list_bytes_max:
        raise NotPlain("a list that is too large")
    return fields


def _static(index: int) -> tuple[bytes, bytes]:
    if not 0 < index <= len(_STATIC):
        raise NotPlain("a dynamic entry")
    return _STATIC[index - 1]


def _read_string(block: bytes, position: int) -> tuple[bytes, int]:
    if block[position] & _HUFFMAN:
        raise NotPlain("a Huffman code")
    size, position = _read_integer(block, position, 7)
    end = position + size
    if end > len(block):
        raise NotPlain("it is cut short")
    return block[position:end], end


def _read_integer(block: bytes, position: int, prefix_bits: int) -> tuple[int, int]:
    """RFC 7541 section 5.1: the value and the position after it."""
    full = (1 << prefix_bits) - 1
    value = block[position] & full
    position += 1
    if value < full:
        return value, position
    for shift in range(0, 7 * _LENGTH_OCTETS_MAX, 7):
        octet = block[position]
        position += 1
        value += (octet & 0x7F) << shift
        if not octet & 0x80:
            return value, position
    raise NotPlain("an integer without end")


def _integer(value: int, prefix_bits: int) -> bytes:
    full = (1 << prefix_bits) - 1
    if value < full:
        return bytes((value,))
    found = bytearray((full,))
    value -= full
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
