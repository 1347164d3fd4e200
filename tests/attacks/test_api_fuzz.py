"""Whatever is sent to the API, it answers in shape and in time, and serves the next one.

Over raw sockets against the real roles in memory.  What was found here has a test of its own
below, or in `tests/transport/test_http1.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from sdcpd.transport import http1
from tests.attacks.api_inputs import BODY_MAX, CHAT, COMPLETIONS, GOOD, Asked, filled, requests
from tests.attacks.exchange import Answer, exchange, parsed
from tests.kit.api import STORY, Api, Scripted, cluster_api, served, tokenizer
from tests.kit.cluster import Cluster

SCRIPT = tokenizer().encode(STORY).ids
PATIENCE_S = 0.15
"""What the server has with requests that do not arrive; 30 s elsewhere."""


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("READ_S", "IDLE_S", "LINGER_S"):
        monkeypatch.setattr(http1, name, PATIENCE_S)


def good(path: str, *, number: int = 0, more: str = "") -> Asked:
    """A request that must be answered."""
    return _post(path, json.dumps(GOOD[path][number]).encode(), more=more)


def _post(path: str, body: bytes, *, more: str = "") -> Asked:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{more}"
    return Asked(f"{head}Connection: close\r\n\r\n".encode("latin-1") + body, "POST", cut=False)


@dataclass
class Target:
    """The API under attack, and what it has answered."""

    runner: asyncio.Runner
    api: Api
    cluster: Cluster
    session: str = ""
    statuses: Counter[int] = field(default_factory=Counter)

    def ask(self, asked: Asked) -> list[Answer]:
        """One exchange."""
        octets = asked.octets.replace(b"SESSION", self.session.encode())
        answers = self.runner.run(exchange(self.api.port, replace(asked, octets=octets)))
        self.statuses.update(answer.status for answer in answers)
        return answers

    def serves(self) -> None:
        """Every good request is answered, and is a session that can be read again."""
        for path in (CHAT, COMPLETIONS):
            for number in range(len(GOOD[path])):
                (answer,) = self.ask(good(path, number=number))
                assert answer.status == 200, answer
                self.session = answer.fields["x-request-id"]


async def nothing_left(api: Api, cluster: Cluster) -> None:
    """Wait until no session, text or connection is left."""
    served = [s for v in cluster.verifiers.values() for s in v.sessions]
    async with asyncio.timeout(5):
        while (
            cluster.router.sessions
            or not all(s.machine.closed for s in served)
            or api.front_end._texts._opening
        ):
            await asyncio.sleep(0.005)


@contextmanager
def target(caplog: pytest.LogCaptureFixture) -> Iterator[Target]:
    """Serve it; what was logged and what is left is looked at at the end."""
    with asyncio.Runner() as runner:
        stack = cluster_api(SCRIPT, cors_origins=("*",))
        api, cluster = runner.run(stack.__aenter__())
        try:
            made = Target(runner, api, cluster)
            made.serves()
            yield made
            made.serves()
            runner.run(nothing_left(api, cluster))
        finally:
            runner.run(stack.__aexit__(None, None, None))
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, errors


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def fuzz(made: Target, *, examples: int, derandomize: bool) -> None:
    """So many requests."""

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=QUIET,
    )
    @given(requests())
    def check(asked: Asked) -> None:
        made.ask(asked)

    check()


@pytest.mark.slow
def test_any_request_is_answered_in_shape(caplog: pytest.LogCaptureFixture) -> None:
    with target(caplog) as made:
        fuzz(made, examples=150, derandomize=True)
    assert {200, 400, 405} <= made.statuses.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_very_many_requests_are_answered_in_shape(caplog: pytest.LogCaptureFixture) -> None:
    with target(caplog) as made:
        fuzz(made, examples=5000, derandomize=False)
    print(sorted(made.statuses.items()))


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        (COMPLETIONS, BODY_MAX, 400),
        (CHAT, BODY_MAX, 400),
        (CHAT, BODY_MAX + 1, 413),
    ],
)
def test_bodies_as_large_as_may_be(
    path: str, size: int, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One text of a megabyte, which has far more tokens than the context."""
    body = filled(path, size)
    assert len(body) == size
    with target(caplog) as made:
        (answer,) = made.ask(_post(path, body))
    assert answer.status == status
    code = json.loads(answer.body)["error"]["code"]
    assert code == {400: "context_length_exceeded", 413: "body_too_large"}[status]


@pytest.mark.parametrize("more", ["", "Expect: 100-continue\r\n"])
def test_any_split_and_any_number_of_requests(more: str, caplog: pytest.LogCaptureFixture) -> None:
    """Pipelined, in pieces of any size, and with a client that waits for leave to send."""
    one = good(CHAT, more=more).octets.replace(b"Connection: close\r\n", b"")
    octets = one * 4 + good(COMPLETIONS, more=more).octets
    chance = random.Random(5)

    async def send(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        rest = octets
        while rest:
            size = chance.choice((1, 2, 50, 300))
            writer.write(rest[:size])
            rest = rest[size:]
            await writer.drain()
            await asyncio.sleep(0)
        found = await reader.read()
        writer.transport.abort()
        return found

    with target(caplog) as made:
        answers = parsed(made.runner.run(asyncio.wait_for(send(made.api.port), 5)), "POST")
    assert [answer.status for answer in answers] == [200] * 5


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Origin: \xe9\r\n", 200),
        ("Origin: \xe9\r\nAccess-Control-Request-Headers: \xff\r\n", 200),
        ("Access-Control-Request-Headers: a\r\nOrigin: a\r\nOrigin: b\r\n", 200),
    ],
)
def test_what_is_said_back_of_a_request_is_any_field_that_it_may_have(
    headers: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An origin that is no ASCII is given back where all are allowed."""
    with target(caplog) as made:
        (answer,) = made.ask(good(COMPLETIONS, more=headers))
        asked = (
            f"OPTIONS {CHAT} HTTP/1.1\r\nHost: h.localhost\r\n{headers}Connection: close\r\n\r\n"
        )
        (preflight,) = made.ask(Asked(asked.encode("latin-1"), "OPTIONS", cut=False))
    assert (answer.status, preflight.status) == (status, 204)


KEY = "one"
SHOWN = [
    "",
    "Bearer",
    "Bearer ",
    "Basic b25lOg==",
    "bearer \xe9",
    f"Bearer {KEY}, x",
    f"Token {KEY}",
]
SHOWN += [f"Bearer\t{KEY}", f"Bearer {KEY}\x00", "Bearer " + "k" * 9000, f"Bearer {KEY * 2}"]


def test_nobody_gets_in_without_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the field looks like that has none, and twice with one of two."""
    (tmp_path / "keys").write_text(f"alice:sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")

    async def ask() -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        generator = Scripted(parts=[[1]])
        async with served(generator, keys_file=tmp_path / "keys") as api:
            for shown in [*SHOWN, f"Bearer {KEY}", f"bearer   {KEY}"]:
                asked = good(COMPLETIONS, more=f"Authorization: {shown}\r\n")
                answers = await exchange(api.port, asked)
                found[shown] = {answer.status for answer in answers}
        return found

    found = asyncio.run(ask())
    assert all(found[shown] <= {400, 401, 431} for shown in SHOWN)
    assert found[f"Bearer {KEY}"] == found[f"bearer   {KEY}"] == {200}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
