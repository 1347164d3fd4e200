"""What clients from outside need: an API to talk to from other threads, and a home of their own."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sdcpd.roles.frontend import FrontEnd
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import Http1Server, StreamingResponse
from tests.kit.api import api_settings, text_model

QUIET = {
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What keeps clients from asking anybody but the API."""
HOMES = {
    "HOME": ".",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "LLM_USER_PATH": "llm",
    "HF_HOME": "hf",
    "NLTK_DATA": "nltk",
    "TMPDIR": "tmp",
}
"""Where they write."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def environment(home: Path) -> dict[str, str]:
    """The variables under which a client writes under `home` alone and asks only the API."""
    homes = {name: home / below for name, below in HOMES.items()}
    for path in homes.values():
        path.mkdir(parents=True, exist_ok=True)
    return QUIET | {name: str(path) for name, path in homes.items()}


def only_loopback(patch: pytest.MonkeyPatch) -> list[str]:
    """Let this process reach this machine alone; the names of others that it tried are listed."""
    tried: list[str] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def checked_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            _check(address[0], tried)
        connect(self, address)

    def checked_look_up(host: Any, *args: Any, **options: Any) -> Any:
        _check(host, tried)
        return look_up(host, *args, **options)

    patch.setattr(socket.socket, "connect", checked_connect)
    patch.setattr(socket, "getaddrinfo", checked_look_up)
    return tried


def _check(host: Any, tried: list[str]) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost"):
        return
    try:
        inside = ipaddress.ip_address(name).is_loopback
    except ValueError:
        inside = False
    if not inside:
        tried.append(name)
        raise OSError(f"a test's client wanted {name}")


@dataclass
class Site:
    """A front end over a generator, for clients that block; `bodies` is what they have sent."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def site(generator: Any) -> Iterator[Site]:
    """Serve it in a thread with a loop of its own."""
    made, ready, end = Site(), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with AsyncExitStack() as stack:
            front_end = FrontEnd(generator, text_model(), api_settings())
            stack.push_async_callback(front_end.aclose)

            async def handle(request: Request) -> Response | StreamingResponse:
                if request.body:
                    made.bodies.append(json.loads(request.body))
                return await front_end.handle(request)

            server = Http1Server(handle, refuse=front_end.refuse)
            stack.push_async_callback(server.aclose)
            made.url = f"http://127.0.0.1:{await server.start()}/v1"
            ready.set()
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield made
    finally:
        loops[0].call_soon_threadsafe(end.set)
        thread.join(10)
    assert not thread.is_alive()
