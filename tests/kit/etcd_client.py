"""A client of a real etcd whose answers can be lost, and whose requests can be late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tiers.etcd_client import EtcdClient, EtcdSettings
from tiers.etcd_errors import Lost
from tiers.etcd_log import EtcdLogStore

Step = Callable[[Any], Awaitable[Any]]


class ScriptedClient(EtcdClient):
    """Takes each transaction that writes through the next step of a script, while there is one."""

    def __init__(self, settings: EtcdSettings) -> None:
        super().__init__(settings)
        self.script: list[Step] = []
        self.held: list[Any] = []
        self.before_page: Callable[[], Awaitable[None]] | None = None

    async def txn(self, request: Any) -> Any:
        """See EtcdClient."""
        if self.script and _writes(request):
            return await self.script.pop(0)(request)
        return await super().txn(request)

    async def range(self, request: Any) -> Any:
        """See EtcdClient."""
        if self.before_page is not None:
            hook, self.before_page = self.before_page, None
            await hook()
        return await super().range(request)

    async def through(self, request: Any) -> Any:
        """A step: all is well."""
        return await super().txn(request)

    async def done_and_lost(self, request: Any) -> Any:
        """A step: etcd did it, and the answer never came."""
        await super().txn(request)
        raise Lost("the answer was lost")

    async def lost(self, request: Any) -> Any:
        """A step: the request never arrived."""
        raise Lost("the request was lost")

    async def late(self, request: Any) -> Any:
        """A step: the request is on its way, and nobody knows for how long."""
        self.held.append(request)
        raise Lost("no answer in time")

    async def behind_the_late(self, request: Any) -> Any:
        """A step: what was held arrives first."""
        for held in self.held:
            await super().txn(held)
        return await super().txn(request)


def scripted_store(settings: EtcdSettings) -> tuple[EtcdLogStore, ScriptedClient]:
    """A store that was not checked at its start, and the client that it calls."""
    client = ScriptedClient(settings)
    return EtcdLogStore(client, settings.prefix), client


def _writes(request: Any) -> bool:
    return any(op.HasField("request_put") for op in request.success)
