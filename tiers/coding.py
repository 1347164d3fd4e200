"""`Content-Encoding: zstd` of objects (RFC 8878, D-Z4).

Rows of a truncated distribution are nearly all zeros, so an object of megabytes travels and rests
as kilobytes. The object is the decoded octets: its tag, its size and every limit are theirs.
"""

from __future__ import annotations

import asyncio

import zstandard

ZSTD = "zstd"
LEVEL = 1
# What a frame may make its decoder keep; RFC 8878 section 3.1.1.1.2 recommends 8 MiB.
WINDOW_BYTES_MAX = 8 << 20
# What is not smaller by a tenth at least is not worth decoding again.
WORTH = 0.9
SAMPLE_BYTES = 64 << 10
# More takes longer than a hop to another thread and back.
INLINE_BYTES_MAX = 256 << 10


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


async def decoded(coded: bytes, *, bytes_max: int) -> bytes:
    """As `decode`; what may be large is decoded beside the event loop."""
    if bytes_max <= INLINE_BYTES_MAX:
        return decode(coded, bytes_max=bytes_max)
    return await asyncio.to_thread(decode, coded, bytes_max=bytes_max)


def _holds_more(decoder: zstandard.ZstdDecompressor, coded: bytes, bytes_max: int) -> bool:
    """Whether a frame that announces no size was refused for what comes out of it."""
    with decoder.stream_reader(coded) as reader:
        try:
            return len(reader.read(bytes_max + 1)) > bytes_max
        except zstandard.ZstdError:
            return False
