"""A strict CBOR decoder (RFC 8949) that tells apart what D-E2 and D-E3 need told apart.

Usual libraries turn bignums into integers, keep the last of two equal keys and let `True` pass as
1. Here: major types 0 and 1 become int, and nothing else does; a tag becomes `Tag`, also tag 2; a
map with a key that came twice becomes `DuplicateKeys`. Every well-formed encoding is read, the
preferred one or not; refused is what is not well-formed, text that is not UTF-8, and nesting
deeper than NESTING_DEPTH_MAX.

In a decoded map, keys that are text, octets or integers stand for themselves; any other key is
replaced by a tuple that identifies its value (True is not 1, a map is no order), so that equal
keys are found whatever their encoding.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from sdcpd.protocol.limits import NESTING_DEPTH_MAX

_BREAK = 0xFF
_TWICE = "key came twice"
_LEAVES = frozenset({int, str, bytes, float, bool, type(None)})


class NotWellFormed(ValueError):
    """The octets are not one well-formed, valid CBOR item; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tagged item; no tag has a meaning in SDCP."""

    number: int
    value: object


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple value other than false, true and null."""

    number: int


class DuplicateKeys(dict[object, object]):
    """A map in which a key came twice; which of the values it holds is not defined."""


def decode_one(data: bytes) -> object:
    """Decode octets that are exactly one item; raises NotWellFormed."""
    value, end = decode_next(data, 0)
    if end != len(data):
        raise NotWellFormed("octets after the item")
    return value


def decode_next(data: bytes, start: int) -> tuple[object, int]:
    """Decode the item at `start` and return it with the offset after it; raises NotWellFormed."""
    try:
        return _item(data, start, 0)
    except IndexError:
        # Every read beyond the end is an index error or checked by hand; one place says so.
        raise NotWellFormed("truncated") from None


def holds_duplicates(value: object) -> bool:
    """Tell whether a map anywhere in a decoded value, keys included, had a key twice."""
    kind = type(value)
    if kind in _LEAVES:
        return value is _TWICE
    if kind is dict:
        assert isinstance(value, dict)
        for key, member in value.items():
            if type(key) is not str and holds_duplicates(key):
                return True
            if type(member) not in _LEAVES and holds_duplicates(member):
                return True
        return False
    if kind is list:
        assert isinstance(value, list)
        # Tokens nearly always: their types are looked at all at once.
        inner = () if _LEAVES.issuperset(map(type, value)) else value
        return any(holds_duplicates(one) for one in inner)
    if isinstance(value, (tuple, frozenset)):
        return any(holds_duplicates(one) for one in value)
    return kind is DuplicateKeys or (isinstance(value, Tag) and holds_duplicates(value.value))


def _item(data: bytes, pos: int, depth: int) -> tuple[object, int]:
    head = data[pos]
    pos += 1
    info = head & 0x1F
    argument = info
    if info >= 24:
        if info > 27:
            return _indefinite(data, pos, depth, head=head)
        end = pos + (1 << (info - 24))
        argument = int.from_bytes(data[pos:end], "big")
        if end > len(data):
            raise IndexError
        pos = end
    major = head >> 5
    if major == 3:
        return _text(_string(data, pos, argument)), pos + argument
    if major == 0:
        return argument, pos
    if major == 2:
        return _string(data, pos, argument), pos + argument
    if major == 5:
        return _map(data, pos, depth, count=argument)
    if major == 4:
        return _array(data, pos, depth, count=argument)
    if major == 1:
        return -1 - argument, pos
    if major == 6:
        value, pos = _item(data, pos, _deeper(depth))
        return Tag(argument, value), pos
    return _simple(info, argument), pos


def _deeper(depth: int) -> int:
    if depth >= NESTING_DEPTH_MAX:
        raise NotWellFormed("nested too deeply")
    return depth + 1


def _string(data: bytes, pos: int, size: int) -> bytes:
    if size > len(data) - pos:
        raise IndexError
    return data[pos : pos + size]


def _text(octets: bytes) -> str:
    try:
        return str(octets, "utf-8")
    except UnicodeDecodeError:
        raise NotWellFormed("text is not UTF-8") from None


def _array(data: bytes, pos: int, depth: int, *, count: int) -> tuple[list[object], int]:
    items: list[object] = []
    if not count:
        return items, pos
    depth = _deeper(depth)
    append = items.append
    for _ in range(count):
        head = data[pos]
        # Arrays are tokens nearly always: the short heads of uint are read in place.
        if head < 0x18:
            append(head)
            pos += 1
        elif head == 0x19:
            append(data[pos + 1] << 8 | data[pos + 2])
            pos += 3
        elif head == 0x18:
            append(data[pos + 1])
            pos += 2
        else:
            value, pos = _item(data, pos, depth)
            append(value)
    return items, pos


def _map(data: bytes, pos: int, depth: int, *, count: int) -> tuple[dict[object, object], int]:
    members: dict[object, object] = {}
    if not count:
        return members, pos
    depth = _deeper(depth)
    for _ in range(count):
        key, pos = _item(data, pos, depth)
        value, pos = _item(data, pos, depth)
        members[key if type(key) is str else _identity(key)] = value
    return _checked(members, count), pos


def _checked(members: dict[object, object], count: int) -> dict[object, object]:
    return members if len(members) == count else DuplicateKeys(members)


def _indefinite(data: bytes, pos: int, depth: int, *, head: int) -> tuple[object, int]:
    major = head >> 5
    if head & 0x1F != 31 or major not in (2, 3, 4, 5):
        raise NotWellFormed("break outside an item" if head == _BREAK else "reserved head")
    if major in (2, 3):
        return _chunks(data, pos, major=major)
    items: list[object] = []
    while data[pos] != _BREAK:
        value, pos = _item(data, pos, _deeper(depth))
        items.append(value)
    if major == 4:
        return items, pos + 1
    if len(items) % 2:
        raise NotWellFormed("a key without a value")
    keys = (key if type(key) is str else _identity(key) for key in items[::2])
    return _checked(dict(zip(keys, items[1::2], strict=True)), len(items) // 2), pos + 1


def _chunks(data: bytes, pos: int, *, major: int) -> tuple[bytes | str, int]:
    chunks: list[bytes] = []
    while data[pos] != _BREAK:
        if data[pos] >> 5 != major or data[pos] & 0x1F == 31:
            raise NotWellFormed("chunk of another type")
        chunk, pos = _item(data, pos, 0)
        # Each chunk of text is text by itself (RFC 8949 Section 3.2.3), so it was decoded above.
        chunks.append(chunk.encode() if isinstance(chunk, str) else _octets(chunk))
    whole = b"".join(chunks)
    return (whole if major == 2 else whole.decode()), pos + 1


def _octets(chunk: object) -> bytes:
    assert isinstance(chunk, bytes), "a chunk of a byte string has major type 2"
    return chunk


def _simple(info: int, argument: int) -> object:
    match info:
        case 20:
            return False
        case 21:
            return True
        case 22:
            return None
        case 24 if argument < 32:
            raise NotWellFormed("simple value below 32 in two octets")
        case 25:
            return struct.unpack(">e", argument.to_bytes(2, "big"))[0]
        case 26:
            return struct.unpack(">f", argument.to_bytes(4, "big"))[0]
        case 27:
            return struct.unpack(">d", argument.to_bytes(8, "big"))[0]
        case _:
            return Simple(argument)


def _identity(value: object) -> object:
    """Return a hashable stand-in that is equal exactly for equal CBOR values."""
    if type(value) in (str, bytes, int):
        return value
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, list):
        return ("array", _identities(value))
    if isinstance(value, dict):
        pairs = frozenset((key, _identity(member)) for key, member in value.items())
        return ("map", pairs, _TWICE if isinstance(value, DuplicateKeys) else "")
    if isinstance(value, Tag):
        return ("tag", value.number, _identity(value.value))
    return ("simple", repr(value))


def _identities(values: Iterable[object]) -> tuple[object, ...]:
    return tuple(_identity(value) for value in values)
