"""Streaming clients in a process of their own, which does next to nothing a chunk.

    python -m tests.bench.front_end_client URL --streams 64 --seconds 120

Prints one JSON object.  No chunk is parsed but the last of a text: arrivals are timed, and events
counted by their beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

EVENT, DONE, USAGE = b"data: ", b"data: [DONE]", b'"completion_tokens":'
GAP_HISTOGRAM_MAX = 4_000_000  # gaps kept; more would be a run of hours
STARTS = ("The story of the number", "A letter about the year", "What happened on day")


@dataclass
class Seen:
    """What all streams have seen."""

    texts: int = 0
    tokens: int = 0
    chunks: int = 0
    errors: list[str] = field(default_factory=list)
    gaps_s: array[float] = field(default_factory=lambda: array("f"))
    """Between two arrivals of text within one stream."""
    first_s: array[float] = field(default_factory=lambda: array("f"))
    """From the request to its first text."""

    def report(self, seconds: float) -> dict[str, Any]:
        """For a parent process."""
        return {
            "seconds": seconds,
            "texts": self.texts,
            "tokens": self.tokens,
            "chunks": self.chunks,
            "errors": self.errors[:10],
            "error_count": len(self.errors),
            "tokens_per_s": self.tokens / seconds,
            "gap_ms": spread(self.gaps_s),
            "first_ms": spread(self.first_s),
        }


def spread(values_s: array[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in ms."""
    found = sorted(values_s) or [0.0]
    at = {"p50": len(found) // 2, "p99": len(found) * 99 // 100, "max": len(found) - 1}
    return {name: 1000 * found[index] for name, index in at.items()}


class Stream(asyncio.Protocol):
    """One connection that asks for one text after the other until it is told to stop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._asked_s = self._last_s = 0.0
        self._tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask at once."""
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Count and time; a comment is no chunk."""
        if events := data.count(EVENT):
            now, seen = time.perf_counter(), self._client.seen
            seen.chunks += events
            if not self._last_s:
                seen.first_s.append(now - self._asked_s)
            elif len(seen.gaps_s) < GAP_HISTOGRAM_MAX:
                seen.gaps_s.append(now - self._last_s)
            self._last_s = now
        self._tail = (self._tail + data)[-2000:]
        if self._tail.endswith(b"0\r\n\r\n") or b"\r\n\r\n{" in self._tail:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server must not close."""
        if not self.ended.done():
            self._client.seen.errors.append(f"the connection was lost: {exc}")
            self.ended.set_result(None)

    def _ask(self) -> None:
        assert self._transport is not None
        self._asked_s, self._last_s, self._tail = time.perf_counter(), 0.0, b""
        self._transport.write(self._client.next_request())

    def _end(self) -> None:
        seen, tail = self._client.seen, self._tail
        if DONE in tail:
            seen.texts += 1
            seen.tokens += int(tail.rpartition(USAGE)[2].partition(b",")[0])
        else:
            seen.errors.append(tail[-400:].decode("latin-1"))
        if time.perf_counter() < self._client.until_s and DONE in tail:
            self._ask()
            return
        self.ended.set_result(None)
        assert self._transport is not None
        self._transport.close()


class Client:
    """All streams; each prompt is asked once."""

    def __init__(self, url: str, *, max_tokens: int, until_s: float) -> None:
        self._url, self._max_tokens = urlsplit(url), max_tokens
        self._numbers = itertools.count()
        self.seen, self.until_s = Seen(), until_s

    def next_request(self) -> bytes:
        """Octets of a request that was not made before."""
        number = next(self._numbers)
        body = json.dumps(
            {
                "prompt": f"{STARTS[number % len(STARTS)]} {number}:",
                "max_tokens": self._max_tokens,
                "temperature": 0.8,
                "seed": number,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST {self._url.path}/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def run(self, streams: int, *, apart_s: float) -> None:
        """Begin one stream after the other, and wait for all to end."""
        loop = asyncio.get_running_loop()
        running = []
        for _ in range(streams):
            host, port = self._url.hostname, self._url.port
            _, stream = await loop.create_connection(lambda: Stream(self), host, port)
            running.append(stream.ended)
            await asyncio.sleep(apart_s)  # clients don't come all at once
        await asyncio.gather(*running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--apart", type=float, default=0.02, help="seconds between two beginnings")
    options = parser.parse_args()
    begin_s = time.perf_counter()
    client = Client(options.url, max_tokens=options.max_tokens, until_s=begin_s + options.seconds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(client.run(options.streams, apart_s=options.apart))
    print(json.dumps(client.seen.report(time.perf_counter() - begin_s)))


if __name__ == "__main__":
    main()
