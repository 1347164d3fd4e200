"""Checksums of objects: XXH3-128 of what is stored, which the tag of an object often is already."""

from __future__ import annotations

import re

from tiers.api import Entry

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
