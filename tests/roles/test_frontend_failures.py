"""When /ready says yes, and what clients see of what goes wrong between instances (ux 1.2, 1.3)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sdcpd.protocol import router
from sdcpd.protocol.problems import PROBLEMS_BY_SUFFIX, Problem
from sdcpd.roles.base import problem_response
from sdcpd.transport.http import Handler, Request, Response
from tests.kit.api import STORY, Api, Scripted, cluster_api, served, tokenizer

SCRIPT = tokenizer().encode(STORY).ids
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
V0 = "https://v0.test/"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that can't be begun is given up after a second, not after 30."""
    monkeypatch.setattr(router, "OPENING_TROUBLE_S", 1.0)


async def ready(api: Api) -> tuple[int, Any]:
    return await api.json("GET", "/ready")


async def test_ready_once_a_token_has_been_written() -> None:
    """ux 1.2 row 15: not when every part says that it is ready, but when a text has come."""
    async with cluster_api(SCRIPT) as (api, cluster):
        handle, failing = cluster.network[V0], True

        async def refusing(request: Request) -> Response:
            if failing and request.path == "/sessions":
                return Response(500)
            return await handle(request)

        cluster.network[V0] = refusing
        task = asyncio.ensure_future(api.front_end.write_first_text())
        async with asyncio.timeout(10):
            while "could not be written" not in (await ready(api))[1]["reason"]:
                await asyncio.sleep(0)
            status, answer = await ready(api)
            assert status == 503
            assert answer["error"]["code"] == "not_ready"
            failing = False
            await task
        assert (await ready(api))[0] == 200
        assert not cluster.router.sessions
        cluster.kill(V0)
        async with asyncio.timeout(3):
            while (await ready(api))[0] == 200:
                await asyncio.sleep(0.02)


async def test_a_first_text_that_is_given_up_is_ended() -> None:
    never = asyncio.Event()
    generator = Scripted(opening=never)
    async with served(generator) as api:
        task = asyncio.ensure_future(api.front_end.write_first_text())
        async with asyncio.timeout(5):
            while not generator.requests:
                await asyncio.sleep(0)
        assert (await ready(api))[0] == 503
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def problem_of(kind: type[Problem]) -> Response:
    return problem_response(kind("a reason that is for other instances"))


@pytest.mark.parametrize("suffix", sorted(PROBLEMS_BY_SUFFIX))
@pytest.mark.parametrize("stream", [False, True])
async def test_no_problem_of_the_protocol_reaches_a_client(suffix: str, stream: bool) -> None:
    """ux finding 5: clients retry a 409 by themselves, and do not read problem documents."""
    async with cluster_api(SCRIPT) as (api, cluster):
        cluster.network[V0] = _answering(cluster.network[V0], PROBLEMS_BY_SUFFIX[suffix])
        body = {"prompt": "x", "stream": stream, "temperature": 0}
        async with asyncio.timeout(20):
            status, fields, octets = await api.raw("POST", COMPLETIONS, body=body)
        assert status in (502, 503)
        assert fields["content-type"] == "application/json"
        error = json.loads(octets)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "server_error"
        assert ("retry-after" in fields) == (status == 503)


def _answering(handle: Handler, kind: type[Problem]) -> Handler:
    """A verifier that opens no session."""

    async def handler(request: Request) -> Response:
        return problem_of(kind) if request.path == "/sessions" else await handle(request)

    return handler
