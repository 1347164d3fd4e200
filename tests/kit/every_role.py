"""A verifier, a drafter and a router, real all three, to ask each the same thing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from sdcpd.protocol.codec import MEDIA_TYPE
from sdcpd.transport.http import Client, Headers, Response
from tests.kit.cluster import peer
from tests.kit.drafter_rig import DrafterRig, drafter_rig
from tests.kit.network import DroppingClient
from tests.kit.router_rig import RouterRig, router_rig
from tests.kit.verifier_wire import Wire

ROLES = ("verifier", "drafter", "router")
OWN: dict[str, tuple[str, str, str]] = {
    "verifier": ("drafter", "POST", "proposals"),
    "drafter": ("router", "POST", "assignments"),
    "router": ("verifier", "POST", "events"),
}
"""Of each role: whose request a resource of its own is, its method and its path."""


@dataclass
class EveryRole:
    """Each in a network of its own, without a session."""

    wire: Wire
    drafter: DrafterRig
    router: RouterRig

    async def send(
        self,
        who: str,
        *,
        method: str = "",
        path: str | None = None,
        by: str = "",
        body: bytes = b"",
        headers: Headers = (("content-type", MEDIA_TYPE),),
    ) -> Response:
        """Ask a role; unless told otherwise as its rightful client, for its own resource."""
        own_by, own_method, own_path = OWN[who]
        uri = self._base(who) + (own_path if path is None else path)
        return await self._client(who, by or own_by).request(
            method or own_method, uri, headers=headers, body=body
        )

    def _base(self, who: str) -> str:
        bases = {"verifier": self.wire, "drafter": self.drafter, "router": self.router}
        return bases[who].base

    def _client(self, who: str, by: str) -> Client:
        name = {"drafter": "d0", "verifier": "v0", "router": "r0"}.get(by, "f0")
        as_ = peer(by, name, f"https://{name}.test/")
        handlers = {
            "verifier": self.wire.verifier.listener.handle,
            "drafter": self.drafter.drafter.listener.handle,
            "router": self.router.router.listener.handle,
        }
        return DroppingClient({self._base(who): handlers[who]}, as_)


@asynccontextmanager
async def every_role() -> AsyncIterator[EveryRole]:
    """All three, serving."""
    async with AsyncExitStack() as stack:
        drafter = await stack.enter_async_context(drafter_rig())
        router = await stack.enter_async_context(router_rig())
        wire = Wire()
        stack.push_async_callback(wire.verifier.aclose)
        yield EveryRole(wire, drafter, router)
