"""The body of `POST logs`: an array of {log, etag, record}, and its answer (D-Z3).

The record is kept as the octets that were sent, not encoded anew: its writer goes on from what it
believes to be the log's content, octet for octet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbor2 import dumps

from sdcpd.protocol import cbor
from sdcpd.protocol.problems import Malformed

MEDIA_TYPE = "application/cbor"
# The largest batch of a verifier has some hundred sessions.
ITEMS_MAX = 1024

_ARRAY, _MAP = 4, 5
_BREAK = 0xFF


@dataclass(frozen=True, slots=True)
class GroupItem:
    """One append: the log's id, its tag as last seen, and the octets of one record."""

    log: str
    etag: str
    record: bytes


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What became of one append, in HTTP's terms."""

    status: int
    etag: str | None = None


def parse_group(body: bytes) -> list[GroupItem]:
    """Decode a group; raises Malformed, also for a log that is named twice."""
    try:
        items, end = _items(body)
    except cbor.NotWellFormed as error:
        raise Malformed(f"the body is not CBOR: {error}") from None
    if end != len(body):
        raise Malformed("octets after the array")
    if len({item.log for item in items}) < len(items):
        raise Malformed("a log is named twice")
    return items


def encode_outcomes(outcomes: Sequence[GroupOutcome]) -> bytes:
    """Encode the answer, in the order of the group."""
    return dumps(
        [
            {"status": outcome.status} | ({"etag": outcome.etag} if outcome.etag else {})
            for outcome in outcomes
        ],
        canonical=True,
    )


def _items(body: bytes) -> tuple[list[GroupItem], int]:
    count, position = _head(body, 0, major=_ARRAY)
    items: list[GroupItem] = []
    while _more(body, position, left=count, done=len(items)):
        if len(items) == ITEMS_MAX:
            raise Malformed(f"a group has at most {ITEMS_MAX} appends")
        item, position = _item(body, position)
        items.append(item)
    return items, position + (count is None)


def _item(body: bytes, position: int) -> tuple[GroupItem, int]:
    count, position = _head(body, position, major=_MAP)
    members: dict[object, tuple[object, bytes]] = {}
    done = 0
    while _more(body, position, left=count, done=done):
        key, start = cbor.decode_next(body, position)
        value, position = cbor.decode_next(body, start)
        if not isinstance(key, str):
            key = f"other key {done}"  # unknown, so ignored (D-E3)
        elif key in members:
            raise Malformed("a key came twice")
        members[key] = (value, body[start:position])
        done += 1
    log, _ = members.get("log", (None, b""))
    etag, _ = members.get("etag", (None, b""))
    record, octets = members.get("record", (None, b""))
    if not (isinstance(log, str) and isinstance(etag, str) and isinstance(record, dict)):
        raise Malformed("an append is not {log: tstr, etag: tstr, record: map}")
    return GroupItem(log, etag, octets), position + (count is None)


def _head(body: bytes, position: int, *, major: int) -> tuple[int | None, int]:
    """Read the head of an array or map: the count, None for one that ends with a break."""
    if position >= len(body) or body[position] >> 5 != major:
        raise Malformed("the body is not an array of maps")
    info = body[position] & 0x1F
    position += 1
    if info < 24:
        return info, position
    if info == 31:
        return None, position
    size = 1 << (info - 24) if info <= 27 else 0
    if not size or position + size > len(body):
        raise Malformed("the body is not CBOR: truncated, or a reserved head")
    return int.from_bytes(body[position : position + size], "big"), position + size


def _more(body: bytes, position: int, *, left: int | None, done: int) -> bool:
    if left is not None:
        return done < left
    if position >= len(body):
        raise Malformed("the body is not CBOR: truncated")
    return body[position] != _BREAK
