"""How an object lies in a bucket: its path, and the octets with what is said of them before.

What is stored tells by itself what it is, so that a machine that never saw it put can trust it: a
head of fixed size, a JSON list (scope, name, tag, media type, coding), and the object's octets.
The checksum is over all three.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass

import xxhash

from tiers.api import Entry, Key

_FIXED = struct.Struct(">8sIQ16s")
_MAGIC = b"SDCPOBJ1"
TEXT_BYTES_MAX = 8192  # names, tag and media type are bounded where they come in; this is more
HEAD_BYTES_MAX = _FIXED.size + TEXT_BYTES_MAX
# Stores that keep objects as files have names of 255 octets.
_SEGMENT_CHARS_MAX = 200
_UNSAFE = re.compile(rb"[^A-Za-z0-9_.-]|^\.")


class Torn(Exception):
    """Octets that are not what was written, or not of this key."""


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before an object's octets."""

    key: Key
    etag: str
    media_type: str
    coding: str
    after: str
    offset: int
    size_bytes: int
    """Of the octets, which begin at `offset`."""
    checksum: bytes

    @property
    def stored_bytes(self) -> int:
        """The size of the whole in the bucket."""
        return self.offset + self.size_bytes


def path_of(prefix: str, key: Key) -> str:
    """Where an object lies: two keys have one path only by a hash, and then the head tells."""
    parts = (prefix.strip("/"), _quoted(key.scope), _quoted(key.name))
    return "/".join(part for part in parts if part)


def head_bytes(key: Key, entry: Entry) -> int:
    """The size of what is stored beside an object's octets."""
    return _FIXED.size + len(_text(key, entry))


def pack(key: Key, entry: Entry) -> bytes:
    """The octets to store."""
    text = _text(key, entry)
    assert len(text) <= TEXT_BYTES_MAX, "names and fields are bounded where they come in"
    fixed = _FIXED.pack(_MAGIC, len(text), len(entry.data), _checksum(text, entry.data))
    return b"".join((fixed, text, entry.data))


def unpack_head(stored: bytes | memoryview, *, key: Key, stored_bytes: int) -> Head:
    """What the first octets say, the whole being of `stored_bytes`; raises Torn."""
    if len(stored) < _FIXED.size:
        raise Torn("shorter than a head")
    magic, text_bytes, size_bytes, checksum = _FIXED.unpack_from(stored)
    offset = _FIXED.size + text_bytes
    if magic != _MAGIC or text_bytes > TEXT_BYTES_MAX or offset > len(stored):
        raise Torn("no head")
    if offset + size_bytes != stored_bytes:
        raise Torn("not as long as its head says")
    try:
        fields = json.loads(bytes(stored[_FIXED.size : offset]))
    except ValueError as error:
        raise Torn("no head") from error
    if not (isinstance(fields, list) and len(fields) == 6):
        raise Torn("no head")
    scope, name, etag, media_type, coding, after = map(str, fields)
    if Key(scope, name) != key:
        raise Torn("of another key")
    return Head(key, etag, media_type, coding, after, offset, size_bytes, checksum)


def unpack(stored: memoryview, *, key: Key) -> Entry:
    """The object in the octets stored, copied out; raises Torn."""
    head = unpack_head(stored, key=key, stored_bytes=len(stored))
    text, data = stored[_FIXED.size : head.offset], stored[head.offset :]
    if _checksum(text, data) != head.checksum:
        raise Torn("other octets than its checksum is of")
    return Entry(bytes(data), head.etag, head.media_type, head.coding, head.after)


def _text(key: Key, entry: Entry) -> bytes:
    fields = [key.scope, key.name, entry.etag, entry.media_type, entry.coding, entry.after]
    return json.dumps(fields).encode()


def _checksum(text: bytes | memoryview, data: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(struct.pack(">QQ", len(text), len(data)))
    digest.update(text)
    digest.update(data)
    return digest.digest()


def _quoted(text: str) -> str:
    """A path segment that every server takes as it is."""
    raw = text.encode()
    quoted = _UNSAFE.sub(lambda match: b"=%02X" % match[0][0], raw).decode()
    if len(quoted) <= _SEGMENT_CHARS_MAX:
        return quoted
    return f"=h{xxhash.xxh3_128_hexdigest(raw)}"
