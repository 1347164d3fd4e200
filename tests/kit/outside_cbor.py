"""A CBOR reader of the tests' own: keeps what others resolve or lose (tags, keys that come twice)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

_BREAK = object()
_FLOATS = {25: ">e", 26: ">f", 27: ">d"}


class NotCbor(Exception):
    """The octets are not one well-formed item."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A tag and what stands in it, whatever the tag means."""

    number: int
    value: Any


class Pairs(list[tuple[Any, Any]]):
    """A map as it was written."""


def read(octets: bytes) -> Any:
    """The one item that the octets are; raises NotCbor."""
    value, at = _item(octets, 0)
    if value is _BREAK or at != len(octets):
        raise NotCbor("something stands behind the item")
    return value


def _item(octets: bytes, at: int) -> tuple[Any, int]:
    if at >= len(octets):
        raise NotCbor("cut off")
    major, info, at = octets[at] >> 5, octets[at] & 31, at + 1
    if major == 7:
        return _simple(octets, info, at)
    if info == 31:
        return _unbounded(octets, major, at)
    argument, at = _argument(octets, info, at)
    match major:
        case 0:
            return argument, at
        case 1:
            return -1 - argument, at
        case 2:
            return _take(octets, at, argument), at + argument
        case 3:
            return _text(_take(octets, at, argument)), at + argument
        case 6:
            value, at = _inner(octets, at)
            return Tagged(argument, value), at
    items = []
    for _ in range(argument * (2 if major == 5 else 1)):
        item, at = _inner(octets, at)
        items.append(item)
    return _collected(major, items), at


def _inner(octets: bytes, at: int) -> tuple[Any, int]:
    value, at = _item(octets, at)
    if value is _BREAK:
        raise NotCbor("a break where an item should be")
    return value, at


def _unbounded(octets: bytes, major: int, at: int) -> tuple[Any, int]:
    if major not in (2, 3, 4, 5):
        raise NotCbor("this kind has a length")
    items = []
    while True:
        begun = octets[at : at + 1]
        item, at = _item(octets, at)
        if item is _BREAK:
            return _collected(major, items), at
        if major in (2, 3) and (begun[0] >> 5 != major or begun[0] & 31 == 31):
            raise NotCbor("a piece of another kind")
        items.append(item)


def _collected(major: int, items: list[Any]) -> Any:
    if major in (2, 3):
        return (b"" if major == 2 else "").join(items)
    if major == 4:
        return items
    if len(items) % 2:
        raise NotCbor("a key without a value")
    return Pairs(zip(items[::2], items[1::2], strict=True))


def _simple(octets: bytes, info: int, at: int) -> tuple[Any, int]:
    if info == 31:
        return _BREAK, at
    if info in _FLOATS:
        size = struct.calcsize(_FLOATS[info])
        return struct.unpack(_FLOATS[info], _take(octets, at, size))[0], at + size
    number, at = _argument(octets, info, at)
    if info == 24 and number < 32:
        raise NotCbor("a simple value in a longer form than there is")
    return {20: False, 21: True, 22: None}.get(number, Tagged(-1, number)), at


def _argument(octets: bytes, info: int, at: int) -> tuple[int, int]:
    if info < 24:
        return info, at
    if info > 27:
        raise NotCbor("a reserved length")
    size = 1 << (info - 24)
    return int.from_bytes(_take(octets, at, size), "big"), at + size


def _take(octets: bytes, at: int, size: int) -> bytes:
    if at + size > len(octets):
        raise NotCbor("cut off")
    return octets[at : at + size]


def _text(octets: bytes) -> str:
    try:
        return octets.decode()
    except UnicodeDecodeError as error:
        raise NotCbor("no UTF-8") from error
