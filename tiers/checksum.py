"""Checksums of objects: XXH3-128 of what is stored, which the tag of an object often is already."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import xxhash

from tiers.api import Entry, Octets

PIECE_BYTES = 8 << 20  # summed up in about a millisecond
_OWN_TAG = re.compile(r'"([0-9a-f]{32})-(\d+)"')


def dense_bytes(entry: Entry) -> int | None:
    """How many octets an object has when it is decoded, by its tag; None for other tags."""
    match = _OWN_TAG.fullmatch(entry.etag)
    return int(match[2]) if match else None


def told(entry: Entry) -> str | None:
    """The checksum in hexadecimal that a tag of `entry_of` is, of octets that are not coded.

    None for other tags. Who stores it finds out at the next read whether it is right.
    """
    match = None if entry.coding else _OWN_TAG.fullmatch(entry.etag)
    return match[1] if match and int(match[2]) == len(entry.data) else None


async def checksum(data: Octets) -> str:
    """XXH3-128 in hexadecimal; of many MiB piece by piece, so that others have their turn."""
    digest = xxhash.xxh3_128()
    for at, piece in pieces(data):
        if at:
            await asyncio.sleep(0)
        digest.update(piece)
    return digest.hexdigest()


def pieces(data: Octets) -> Iterator[tuple[int, Octets]]:
    """The octets with their places, as they are where that is no long work."""
    if len(data) <= PIECE_BYTES:
        yield 0, data
        return
    whole = memoryview(data)
    for at in range(0, len(data), PIECE_BYTES):
        yield at, whole[at : at + PIECE_BYTES]
