"""The transport against hypercorn and a bare TLS socket: `python -m tests.bench.transport`.

Server and client are processes of their own on one machine, on uvloop, with certificates on both
sides; every row of a table comes from the same run.  Needs hypercorn (`pip install hypercorn`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import ssl
import statistics
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import uvloop

from sdcpd.transport import quic_link, tuning
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Request, Response
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity
from tests.bench.bare_h2 import load
from tests.kit.certs import CertKit

ASK, ANSWER = bytes(300), bytes(200)
MIB = 1 << 20
BODIES = (1, 4, 16)
STREAMS = (1, 8, 64)
SMALL_DATAGRAMS = patch.object(quic_link, "DATAGRAM_BYTES_MAX", 1200)
Ask = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a request for a path with a body, returns the answer's body."""


@dataclass(frozen=True, slots=True)
class Files:
    """Authority, certificate and key of one side."""

    ca: Path
    crt: Path
    key: Path

    def identity(self) -> TlsIdentity:
        """For our own transport."""
        return TlsIdentity(ca=self.ca, cert=self.crt, key=self.key)

    def client_context(self) -> ssl.SSLContext:
        """For the others."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.crt, self.key)
        return context


# ---- servers: each in a process of its own, telling its port


async def serve_ours(files: Files, told: Connection) -> None:
    """HTTP/2 and HTTP/3."""

    async def handle(request: Request) -> Response:
        if request.path == "/bulk":
            return Response(200, (), bytes(int(request.query)))
        return Response(200, (), ANSWER)

    server = Server(
        handle,
        identity=files.identity(),
        host="127.0.0.1",
        port=0,
        body_bytes_max=64 * MIB,
        http3=True,
    )
    told.send(await server.start())
    await asyncio.Event().wait()


async def serve_hypercorn(files: Files, told: Connection) -> None:
    """The ASGI server, HTTP/2, client certificates required."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            continue
        body = ANSWER
        if scope["path"] == "/bulk":
            body = bytes(int(scope["query_string"]))
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    config = Config()
    with __import__("socket").socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config.bind = [f"127.0.0.1:{port}"]
    config.certfile, config.keyfile = str(files.crt), str(files.key)
    config.ca_certs, config.verify_mode = str(files.ca), ssl.CERT_REQUIRED
    config.keep_alive_max_requests, config.h2_max_concurrent_streams = 1 << 30, 200
    config.loglevel = "ERROR"
    asyncio.get_running_loop().call_later(1.0, told.send, port)
    await serve(app, config, shutdown_trigger=asyncio.Event().wait)  # type: ignore[arg-type]


class RawTls(asyncio.BufferedProtocol):
    """Length-prefixed messages on a TLS socket, as fast as the event loop's own TLS goes."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(256 << 10))
        self._head = bytearray()
        self._left = self._wanted = 0
        self._transport: asyncio.Transport | None = None
        self.answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """One message at a time: 8 octets of head, then the body, whose octets are dropped."""
        data = self._buffer[:nbytes]
        if len(self._head) < 8:
            missing = 8 - len(self._head)
            self._head += data[:missing]
            data = data[missing:]
            if len(self._head) < 8:
                return
            self._left, self._wanted = struct.unpack(">II", self._head)
        self._left -= len(data)
        if not self._left:
            self._head.clear()
            if self.answered is not None:
                self.answered.set_result(None)
            else:
                self.send(self._wanted, 0)

    def send(self, size: int, wanted: int, body: bytes | None = None) -> None:
        """A message, which asks for so many octets."""
        assert self._transport is not None, "it is connected"
        self._transport.write(struct.pack(">II", size, wanted))
        self._transport.write(bytes(size) if body is None else body)


async def serve_raw(files: Files, told: Connection) -> None:
    """A bare TLS socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.crt, files.key)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(RawTls, "127.0.0.1", 0, ssl=context)
    told.send(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def serve_small_datagrams(files: Files, told: Connection) -> None:
    """HTTP/3 as over a network, where no datagram may be larger than the smallest there is."""
    with SMALL_DATAGRAMS:
        await serve_ours(files, told)


SERVERS = {
    "ours": serve_ours,
    "small datagrams": serve_small_datagrams,
    "hypercorn": serve_hypercorn,
    "raw": serve_raw,
}


def run_server(name: str, files: Files, told: Connection) -> None:
    """The server's process."""
    tuning.tune_process()
    uvloop.run(SERVERS[name](files, told))


# ---- clients


async def http_ask(files: Files, port: int, transport: Any, stack: AsyncExitStack) -> Ask:
    """Requests through our client."""
    client = HttpClient(files.identity(), transport=transport)
    stack.push_async_callback(client.aclose)

    async def ask(path: str, body: bytes) -> bytes:
        uri = f"https://127.0.0.1:{port}{path}"
        answer = await client.request("POST", uri, body=body, timeout_s=120)
        assert answer.status == 200, answer
        return answer.body

    return ask


async def raw_ask(files: Files, port: int, stack: AsyncExitStack) -> Ask:
    """Messages over one TLS socket, one at a time."""
    loop = asyncio.get_running_loop()
    transport, raw = await loop.create_connection(
        RawTls, "127.0.0.1", port, ssl=files.client_context(), server_hostname="127.0.0.1"
    )
    stack.callback(transport.close)
    turn = asyncio.Lock()

    async def ask(path: str, body: bytes) -> bytes:
        wanted = int(path.partition("?")[2] or len(ANSWER))
        async with turn:
            raw.answered = loop.create_future()
            raw.send(len(body), wanted, body)
            await raw.answered
            return b""

    return ask


async def small_datagrams_ask(files: Files, port: int, stack: AsyncExitStack) -> Ask:
    """HTTP/3 with such datagrams both ways."""
    ask = await http_ask(files, port, "h3", stack)
    with SMALL_DATAGRAMS:
        await ask("/", ASK)  # connects
    return ask


async def small(ask: Ask, streams: int, seconds: float) -> dict[str, float]:
    """Requests a second, and the median of one exchange in milliseconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def work() -> None:
        while (begin := time.perf_counter()) < end:
            await ask("/", ASK)
            times.append(time.perf_counter() - begin)

    for _ in range(50):
        await ask("/", ASK)
    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(streams)))
    spent = time.perf_counter() - begin
    return {"per_s": len(times) / spent, "median_ms": 1000 * statistics.median(times)}


async def bulk(ask: Ask, size: int, seconds: float) -> dict[str, float]:
    """MiB a second, up and down."""
    found = {}
    for name, path, body in (("up", "/", bytes(size)), ("down", f"/bulk?{size}", b"")):
        await ask(path, body)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            await ask(path, body)
            count += 1
        found[name] = count * size / MIB / (time.perf_counter() - begin)
    return found


async def beside(ask: Ask, seconds: float) -> float:
    """Median of a small exchange in milliseconds while 16 MiB bodies come down."""
    over = asyncio.Event()

    async def load() -> None:
        while not over.is_set():
            await ask(f"/bulk?{16 * MIB}", b"")

    loading = asyncio.ensure_future(load())
    await asyncio.sleep(0.2)  # until bulk flows; what is measured begins then
    found = await small(ask, 1, seconds)
    over.set()
    await loading
    return found["median_ms"]


async def measure(files: Files, ports: dict[str, int], seconds: float) -> dict[str, Any]:
    """All figures of one run."""
    found: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        stacks: dict[str, Ask] = {
            "HTTP/2": await http_ask(files, ports["ours"], "h2", stack),
            "HTTP/3": await http_ask(files, ports["ours"], "h3", stack),
            "HTTP/3 1200": await small_datagrams_ask(files, ports["small datagrams"], stack),
            "hypercorn": await http_ask(files, ports["hypercorn"], "h2", stack),
            "raw TLS": await raw_ask(files, ports["raw"], stack),
        }
        for name, ask in stacks.items():
            row: dict[str, Any] = {}
            for streams in STREAMS:
                row[f"small x{streams}"] = await small(ask, streams, seconds)
            for size in BODIES:
                row[f"{size} MiB"] = await bulk(ask, size * MIB, seconds)
            if name != "raw TLS":
                row["beside"] = await beside(ask, seconds)
            found[name] = row
    context = files.client_context()
    for name, port in (("HTTP/2", ports["ours"]), ("hypercorn", ports["hypercorn"])):
        for streams in STREAMS:
            found[name][f"bare x{streams}"] = await load(
                context, port, ASK, streams=streams, seconds=seconds
            )
    return found


def show(found: dict[str, Any]) -> None:
    """Three tables, and the ratios that matter."""
    print(f"small exchange at {STREAMS} streams: requests a second (median ms)")
    for name, row in found.items():
        beside_ms = f"   beside bulk {row['beside']:.2f} ms" if "beside" in row else ""
        print(f"  {name:12} {_small_cells(row, 'small')}{beside_ms}")
    print("the same with a client that costs next to nothing")
    for name in ("HTTP/2", "hypercorn"):
        print(f"  {name:12} {_small_cells(found[name], 'bare')}")
    print(f"bodies: MiB a second up / down at {BODIES} MiB")
    for name, row in found.items():
        cells = [row[f"{n} MiB"] for n in BODIES]
        print(f"  {name:12} " + "  ".join(f"{c['up']:7.1f} /{c['down']:7.1f}" for c in cells))
    ours, other, raw = found["HTTP/2"], found["hypercorn"], found["raw TLS"]
    for kind in ("small", "bare"):
        ratio = ours[f"{kind} x64"]["per_s"] / other[f"{kind} x64"]["per_s"]
        print(f"{kind} x64 against hypercorn {ratio:.2f}")
    for way in ("up", "down"):
        print(f"4 MiB {way} against raw TLS {ours['4 MiB'][way] / raw['4 MiB'][way]:.2f}")


def _small_cells(row: dict[str, Any], kind: str) -> str:
    cells = [row[f"{kind} x{n}"] for n in STREAMS]
    return "  ".join(f"{c['per_s']:8.0f} ({c['median_ms']:6.3f})" for c in cells)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        kit = CertKit(Path(folder))
        server, client = (
            Files(kit.ca, leaf.crt_path, leaf.key_path)
            for leaf in (kit.leaf("verifier", "v0"), kit.leaf("drafter", "d0"))
        )
        ports, processes = {}, []
        for name in SERVERS:
            mine, theirs = context.Pipe()
            process = context.Process(target=run_server, args=(name, server, theirs), daemon=True)
            process.start()
            processes.append(process)
            ports[name] = mine.recv()
        tuning.tune_process()
        found = uvloop.run(measure(client, ports, options.seconds))
        for process in processes:
            process.kill()
    print(json.dumps(found, indent=1)) if options.json else show(found)


if __name__ == "__main__":
    main()
