"""A server on loopback for as long as a test needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sdcpd.transport.http import Handler
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit


@asynccontextmanager
async def serving(
    kit: CertKit, handle: Handler, *, grace_s: float = 1.0, **options: Any
) -> AsyncIterator[tuple[Server, int]]:
    """A verifier's server of both versions and its port; `options` are those of Server."""
    given = {"host": "127.0.0.1", "port": 0, "body_bytes_max": 1000, "http3": True, **options}
    server = Server(handle, identity=kit.identity("verifier", "v0"), **given)
    port = await server.start()
    try:
        yield server, port
    finally:
        await server.aclose(grace_s)
