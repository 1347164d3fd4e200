"""Objects of 4 MiB on one host, against memcpy and Redis: `python -m tests.bench.same_host`.

In process: put and get of the memory tiers against a memcpy between touched buffers, one thread.
Between two processes: PUT and GET by the way through shared memory and over mutual TLS, against SET
and GET of a redis-server over loopback TCP (apt-get install redis-server), by redis-py where it is
installed and by a bare client that only moves octets.  Medians; the rows of a table take turns.
With --objects 1 everything stays in the processor's caches.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib.util
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from sdcpd.dev.plan import free_ports
from sdcpd.transport.client import HttpClient
from sdcpd.transport.local_client import LocalClient
from sdcpd.transport.tls import TlsIdentity
from tests.kit.certs import CertKit
from tests.kit.cuda import no_cuda
from tests.kit.same_host import same_host
from tiers.api import Key, Tier, entry_of
from tiers.host import HostTier
from tiers.pinned import PinnedTier

SIZE_BYTES = 4 << 20
OBJECTS = 16  # 64 MiB, more than the caches of most processors hold
BLOCKS = 5
KIND = "application/octet-stream"
Step = Callable[[int], Awaitable[object]]


def objects(count: int) -> list[bytes]:
    """Different octets, each in pages of its own."""
    return [os.urandom(SIZE_BYTES) for _ in range(count)]


async def medians(steps: dict[str, Step], rounds: int, count: int) -> dict[str, float]:
    """Seconds of each step.

    They take turns in blocks: one after the other with the same object, the first would warm the
    caches for the rest. The beginning of a block warms up.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(BLOCKS):
        for name, step in steps.items():
            for number in range(rounds // BLOCKS + count):
                begin = time.perf_counter()
                await step(number % count)
                if number >= count:
                    times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in times.items()}


# ---- in process


async def in_process(rounds: int, count: int) -> None:
    """One thread, one loop."""
    sources = objects(count)
    entries = [entry_of(one, media_type=KIND) for one in sources]
    target = (ctypes.c_char * (count * SIZE_BYTES))()
    ctypes.memset(target, 1, len(target))
    keys = [Key("scope", str(number)) for number in range(count)]
    host = HostTier(2 * count * SIZE_BYTES)
    pinned = PinnedTier(2 * count * SIZE_BYTES, runtime=no_cuda)

    async def copy_in(number: int) -> None:
        ctypes.memmove(ctypes.byref(target, number * SIZE_BYTES), sources[number], SIZE_BYTES)

    out = (ctypes.c_char * SIZE_BYTES)()

    async def copy_out(number: int) -> None:
        ctypes.memmove(out, ctypes.byref(target, number * SIZE_BYTES), SIZE_BYTES)

    def put(tier: Tier) -> Step:
        return lambda number: tier.put(keys[number], entries[number], lease_s=0)

    async def tag_and_put(number: int) -> None:
        entry = entry_of(sources[number], media_type=KIND)
        await pinned.put(keys[number], entry, lease_s=0)

    async def get_and_copy(number: int) -> None:
        found = await pinned.get(keys[number])
        assert found is not None
        bytes(found.data)

    steps: dict[str, Step] = {
        "memcpy in": copy_in,
        "memcpy out": copy_out,
        "host put": put(host),
        "host get": lambda number: host.get(keys[number]),
        "pinned put": put(pinned),
        "pinned get (view, checked)": lambda number: pinned.get(keys[number]),
        "pinned put, tag computed first": tag_and_put,
        "pinned get, copied out as well": get_and_copy,
    }
    found = await medians(steps, rounds, count)
    print("In process, 4 MiB                    us    x memcpy")
    for name, taken_s in found.items():
        base_s = found["memcpy out" if "get" in name or "out" in name else "memcpy in"]
        print(f"  {name:32s} {taken_s * 1e6:7.1f}   {taken_s / base_s:8.2f}")
    await host.aclose()
    await pinned.aclose()


# ---- between two processes


def serve(folder: Path, pipe: Connection, kind: str) -> None:
    """A cache in a process of its own."""

    async def run() -> None:
        size_bytes = 32 * SIZE_BYTES
        tier: Tier = (
            PinnedTier(size_bytes, runtime=no_cuda) if kind == "pinned" else HostTier(size_bytes)
        )
        async with same_host(folder, tier=tier) as site:
            leaf = site.kit.leaf("drafter", "d0")
            pipe.send((site.base, site.kit.ca, leaf.crt_path, leaf.key_path))
            await asyncio.to_thread(pipe.recv)

    uvloop.run(run())


async def ours(stack: AsyncExitStack, folder: Path, kind: str, sources: list[bytes]) -> Any:
    """Steps that write and read an object of a server with that tier, by both ways."""
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(folder / kind, theirs, kind)
    )
    process.start()
    stack.callback(process.join)
    stack.callback(pipe.send, "end")
    base, ca, crt, key = pipe.recv()
    http = HttpClient(TlsIdentity(ca=ca, cert=crt, key=key), check_peer=lambda *_: None)
    stack.push_async_callback(http.aclose)
    local = LocalClient(http)
    stack.push_async_callback(local.aclose)
    await local.request("OPTIONS", f"{base}objects/scope/q_rows.0")
    count = 0

    async def both(client: LocalClient | HttpClient, number: int) -> None:
        nonlocal count
        count += 1
        uri = f"{base}objects/scope/q_rows.{count}"
        put = await client.request("PUT", uri, body=sources[number])
        got = await client.request("GET", uri)
        assert put.status == 201 and len(got.body) == SIZE_BYTES, (put, got.status)

    def stayed_local() -> None:
        assert local.failures == 0 and local.exchanges > 0, "the short way was not taken"

    stack.callback(stayed_local)
    return lambda number: both(local, number), lambda number: both(http, number)


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """A server that keeps nothing on the disk; its port."""
    (port,) = free_ports(1)
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(
        ["redis-server", *options, "--dir", str(folder)], stdout=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 10
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    if time.monotonic() > deadline:
                        raise
            yield port
        finally:
            process.terminate()


class BareRedis:
    """SET and GET of one size and nothing else; reads into one buffer, parses next to nothing."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(SIZE_BYTES + 64)

    def set(self, key: bytes, value: bytes) -> None:
        """Write."""
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
        self._send([head, value, b"\r\n"])
        assert self._socket.recv(64) == b"+OK\r\n"

    def get(self, key: bytes) -> bytes:
        """Read."""
        self._send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)])
        head = b"$%d\r\n" % SIZE_BYTES
        whole = len(head) + SIZE_BYTES + 2
        view, have = memoryview(self._buffer), 0
        while have < whole:
            have += self._socket.recv_into(view[have:])
        assert self._buffer.startswith(head)
        return bytes(view[len(head) : len(head) + SIZE_BYTES])

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _send(self, parts: list[bytes]) -> None:
        sent = self._socket.sendmsg(parts)
        rest = memoryview(b"".join(parts))[sent:] if sent < sum(map(len, parts)) else b""
        self._socket.sendall(rest)


def redis_step(client: Any, sources: list[bytes]) -> Step:
    """Write and read one object."""

    async def step(number: int) -> None:
        key = b"q_rows.%d" % number
        client.set(key, sources[number])
        assert len(client.get(key)) == SIZE_BYTES

    return step


async def between_processes(rounds: int, count: int) -> None:
    """Ours and Redis in one run."""
    sources = objects(count)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        CertKit(folder / "warm")
        steps: dict[str, Step] = {}
        for kind in ("host", "pinned"):
            local, tls = await ours(stack, folder, kind, sources)
            steps[f"shared memory, {kind} tier"] = local
            if kind == "host":
                steps["HTTP/2 with mutual TLS, host tier"] = tls
        if shutil.which("redis-server") is None:
            print("redis-server is not installed: nothing to compare with (apt-get install it)")
        else:
            port = stack.enter_context(redis_server(folder))
            bare = BareRedis(port)
            stack.callback(bare.close)
            steps["Redis, bare client"] = redis_step(bare, sources)
            if importlib.util.find_spec("redis") is None:
                print("redis-py is not installed: only the bare client is measured")
            else:
                import redis

                parser = "hiredis" if importlib.util.find_spec("hiredis") else "its own parser"
                client = redis.Redis(port=port)
                stack.callback(client.close)
                steps[f"Redis, redis-py with {parser}"] = redis_step(client, sources)
        found = await medians(steps, rounds, count)
        best_s = found["shared memory, host tier"]
        print("Two processes, 4 MiB there and back   us    x shared memory")
        for name, taken_s in found.items():
            print(f"  {name:34s} {taken_s * 1e6:8.0f}   {taken_s / best_s:8.2f}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150, help="of which the median is taken")
    parser.add_argument("--objects", type=int, default=OBJECTS, help="that take turns")
    asked = parser.parse_args()
    uvloop.run(in_process(asked.rounds, asked.objects))
    uvloop.run(between_processes(asked.rounds, asked.objects))


if __name__ == "__main__":
    main()
