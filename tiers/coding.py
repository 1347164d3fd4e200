"""Content codings of objects: zstd (RFC 8878, D-Z4), and one for sparse rows (sparse.py).

Rows of a truncated distribution are nearly all zeros, so an object of megabytes travels and rests
as kilobytes. The object is the decoded octets: its tag, its size and every limit are theirs.
"""

from __future__ import annotations

import asyncio

import zstandard

from sdcpd.protocol import sparse
from tiers.api import Octets

ZSTD = "zstd"
SPARSE = "sdcp-sparse-f32"
CODINGS = (SPARSE, ZSTD)
"""All that are decoded here, best first."""
LEVEL = 1
# What a frame may make its decoder keep; RFC 8878 section 3.1.1.1.2 recommends 8 MiB.
WINDOW_BYTES_MAX = 8 << 20
# On a fast network coding takes as long as what it saves, unless it saves much.
WORTH = 0.7
SAMPLE_BYTES = 64 << 10
# More takes longer than a hop to another thread and back.
INLINE_BYTES_MAX = 256 << 10
SPARSE_INLINE_BYTES_MAX = 8 << 20
SPARSE_CODED_INLINE_BYTES_MAX = 16 << 10
# 64 rows of the largest vocabularies: a few octets may stand for so many, and no more.
SPARSE_BYTES_MAX = 64 << 20


class BadCoding(Exception):
    """The octets are no zstd frame, or one that this decoder does not take."""


class DecodedTooLarge(Exception):
    """What was decoded so far is more than allowed; the rest was not looked at."""


def encode(data: bytes) -> bytes | None:
    """The octets as one zstd frame with its content size; None where it isn't worth it.

    Dense rows are not: a piece from the middle tells, for a hundredth of the time.
    """
    coder = zstandard.ZstdCompressor(level=LEVEL)
    if len(data) > 2 * SAMPLE_BYTES:
        middle = memoryview(data)[len(data) // 2 :][:SAMPLE_BYTES]
        if len(coder.compress(middle)) >= WORTH * SAMPLE_BYTES:
            return None
    coded = coder.compress(data)
    return coded if len(coded) < WORTH * len(data) else None


def decode(coded: bytes, *, bytes_max: int) -> bytes:
    """The octets of exactly one zstd frame, at most `bytes_max`; raises BadCoding.

    DecodedTooLarge where there are more: by what the frame announces, before anything is allocated,
    or by what comes out. Memory is touched only for octets that are really there.
    """
    decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    announced = -1
    try:
        announced = zstandard.frame_content_size(coded)
        if announced > bytes_max:
            raise DecodedTooLarge(f"the frame announces {announced} octets of at most {bytes_max}")
        return decoder.decompress(coded, max_output_size=bytes_max, allow_extra_data=False)
    except zstandard.ZstdError as error:
        if announced < 0 and _holds_more(decoder, coded, bytes_max):
            raise DecodedTooLarge(f"the frame holds more than {bytes_max} octets") from error
        raise BadCoding(f"the octets are not one zstd frame: {error}") from error


async def encoded(data: bytes) -> bytes | None:
    """As `encode`; what is large is coded beside the event loop."""
    return encode(data) if len(data) <= INLINE_BYTES_MAX else await asyncio.to_thread(encode, data)


async def decoded(coded: bytes, coding: str, *, bytes_max: int) -> Octets:
    """The octets of one of CODINGS; raises BadCoding or DecodedTooLarge.

    What may take long is decoded beside the event loop.
    """
    if coding == SPARSE:
        return await _decoded_sparse(coded, bytes_max=bytes_max)
    if bytes_max <= INLINE_BYTES_MAX:
        return decode(coded, bytes_max=bytes_max)
    return await asyncio.to_thread(decode, coded, bytes_max=bytes_max)


async def _decoded_sparse(coded: bytes, *, bytes_max: int) -> Octets:
    bytes_max = min(bytes_max, SPARSE_BYTES_MAX)
    try:
        light = sparse.decoded_bytes(coded) <= SPARSE_INLINE_BYTES_MAX
        if light and len(coded) <= SPARSE_CODED_INLINE_BYTES_MAX:
            return sparse.decode(coded, bytes_max=bytes_max)
        return await asyncio.to_thread(sparse.decode, coded, bytes_max=bytes_max)
    except sparse.SparseTooLarge as error:
        raise DecodedTooLarge(str(error)) from error
    except sparse.BadSparse as error:
        raise BadCoding(f"the octets are no sparse rows: {error}") from error


def _holds_more(decoder: zstandard.ZstdDecompressor, coded: bytes, bytes_max: int) -> bool:
    """Whether a frame that announces no size was refused for what comes out of it."""
    with decoder.stream_reader(coded) as reader:
        try:
            return len(reader.read(bytes_max + 1)) > bytes_max
        except zstandard.ZstdError:
            return False
