"""sdcpctl instances and sessions: what they do to a cluster, by the real command and socket."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sdcpd.admin import RouterAdmin
from sdcpd.protocol.messages import InstanceRole, Sampling
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.transport.http1 import Http1Server
from tests.kit.api import STORY, ScriptModel, text_model, tokenizer
from tests.kit.cluster import Cluster

pytestmark = pytest.mark.slow
SCRIPT = tokenizer().encode(STORY).ids
GREEDY = Sampling(temperature_milli=0)
V0, V1, D0, D1 = (f"https://{name}.test/" for name in ("v0", "v1", "d0", "d1"))


@dataclass
class Ran:
    code: int
    out: str
    err: str


@dataclass
class Ctl:
    """A cluster in memory, and sdcpctl at its router's socket."""

    cluster: Cluster
    socket: Path

    async def __call__(self, *arguments: str) -> Ran:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli", *arguments, "--endpoint", f"unix:{self.socket}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            out, err = await process.communicate()
        assert process.returncode is not None
        assert b"Traceback" not in err
        return Ran(process.returncode, out.decode(), err.decode())

    async def states(self) -> dict[str, str]:
        """State by the name's beginning."""
        done = await self("instances", "list", "-o", "jsonl")
        found = [json.loads(line) for line in done.out.splitlines()]
        return {one["instance"].split(".")[0]: one["state"] for one in found}

    def begin(self, count: int = 400) -> asyncio.Task[list[int]]:
        """A text, greedily."""

        async def read() -> list[int]:
            tokens: list[int] = []
            request = GenerationRequest((1, 2, 3), count, (), GREEDY)
            async for part in await self.cluster.router.generate(request):
                tokens += part.tokens
            return tokens

        return asyncio.ensure_future(read())

    async def committed(self, count: int) -> None:
        """Wait until the one session has so many tokens."""
        async with asyncio.timeout(10):
            while not any(one.machine.committed >= count for one in self.cluster.router.sessions):
                await asyncio.sleep(0)

    def text(self, count: int = 400) -> list[int]:
        """What the target writes."""
        assert isinstance(self.cluster.model, ScriptModel)
        return self.cluster.model.next(3, count)


@asynccontextmanager
async def ctl(folder: Path, *, pass_time_s: float = 0.01) -> AsyncIterator[Ctl]:
    made = Cluster(model=ScriptModel(SCRIPT))
    made.add_router()
    for name in ("v0", "v1"):
        made.add_verifier(name, pass_time_s=pass_time_s)
    for name in ("d0", "d1"):
        made.add_drafter(name, noise=0.0)
    server = Http1Server(
        RouterAdmin("r0", made.router, text_model()).handle, path=folder / "a.sock"
    )
    await server.start()
    try:
        await made.ready()
        yield Ctl(made, folder / "a.sock")
    finally:
        await server.aclose()
        await made.aclose()


async def test_a_drained_drafters_sessions_get_another(tmp_path: Path) -> None:
    async with ctl(tmp_path) as c:
        text = c.begin()
        await c.committed(5)
        (routed,) = c.cluster.router.sessions
        first = routed.machine.drafter
        assert first in (D0, D1)
        name = "d0" if first == D0 else "d1"
        done = await c("instances", "drain", name, "--wait")
        assert done.code == 0, done.err
        assert "sessions left there: 0" in done.out
        assert (await c.states())[name] == "draining"
        table = await c("status")
        assert table.code == 0 and "draining" in table.out, table.err
        assert await text == c.text()
        assert routed.machine.drafter != first or routed.machine.closed
        c.cluster.drafters[D1 if first == D0 else D0]
        assert (await c("instances", "undrain", name)).code == 0
        assert (await c.states())[name] == "ready"


async def test_a_drained_verifiers_sessions_go_on_there(tmp_path: Path) -> None:
    async with ctl(tmp_path) as c:
        text = c.begin()
        await c.committed(5)
        (routed,) = c.cluster.router.sessions
        base = routed.machine.verifier
        name = "v0" if base == V0 else "v1"
        done = await c("instances", "drain", name, "--wait")
        assert done.code == 0, done.err
        assert text.done() or not c.cluster.router.sessions
        assert await text == c.text()
        assert routed.machine.failovers == 0
        for _ in range(4):
            await c.begin(3)
        assert len(c.cluster.verifiers[base].sessions) == 1, "it gets no more"


async def test_or_move_at_once_and_the_text_is_the_same(tmp_path: Path) -> None:
    async with ctl(tmp_path) as c:
        text = c.begin(800)
        await c.committed(5)
        (routed,) = c.cluster.router.sessions
        base = routed.machine.verifier
        name = "v0" if base == V0 else "v1"
        done = await c("instances", "drain", name, "--move", "--wait")
        assert done.code == 0, done.err
        assert await text == c.text(800)
        assert routed.machine.failovers == 1
        assert routed.machine.verifier != base
        other = "v1" if name == "v0" else "v0"
        done = await c("instances", "drain", other, "--move")
        assert done.code == 1
        assert "no other verifier" in done.err
        assert (await c.states())[other] == "ready"


async def test_with_all_verifiers_drained_new_texts_are_refused(tmp_path: Path) -> None:
    async with ctl(tmp_path) as c:
        for name in ("v0", "v1"):
            await c("instances", "drain", name)
        with pytest.raises(GenerationError, match="no verifier is ready") as e:
            await c.begin(3)
        assert e.value.retry_after_s
        board = c.cluster.router.board
        assert board.drained(V0, InstanceRole.VERIFIER)
        await c("instances", "undrain", V1)
        assert await c.begin(3) == c.text(3)


async def test_names_that_are_none(tmp_path: Path) -> None:
    async with ctl(tmp_path) as c:
        for arguments in (("drain", "v9"), ("undrain", "x")):
            done = await c("instances", *arguments)
            assert done.code == 5 and "there are: " in done.err
        done = await c("instances", "drain", "")
        assert done.code == 1 and "name an instance" in done.err
        for command in ("show", "cancel", "watch"):
            done = await c("sessions", command, "A" * 22)
            assert done.code == 5 and "is not known to this router" in done.err
        done = await c("sessions", "list", "--state", "asleep")
        assert done.code == 2 and "running" in done.err
        assert (await c("instances", "show", "v9")).code == 5
        shown = json.loads((await c("instances", "show", "v0", "-o", "json")).out)
        assert (shown["schema"], shown["role"]) == ("sdcpctl/v1", "verifier")


async def test_a_session_is_shown_followed_and_ended(tmp_path: Path) -> None:
    async with ctl(tmp_path) as c:
        assert (await c("sessions", "list")).out == "no open session\n"
        assert (await c("sessions", "watch")).code == 5
        text = c.begin(300)
        await c.committed(1)
        listed = json.loads((await c("sessions", "list", "-o", "json")).out)["sessions"]
        label = listed[0]["session"]
        assert json.loads((await c("sessions", "show", label, "-o", "json")).out)["open"] is True
        followed = await c("sessions", "watch", label, "-o", "jsonl")
        lines = [json.loads(line) for line in followed.out.splitlines()]
        assert lines[0]["session"] == label
        rounds = [one for line in lines for one in line.get("rounds", [])]
        shown = "".join(one["accepted"] + one["own"] for one in rounds) + lines[-1]["rest"]
        assert shown == text_model().decode(await text)
        assert lines[-1]["end"] == "finished"
        strip = (await c("sessions", "watch")).out
        assert "[" in strip and strip.endswith("per pass of the target\n")
        done = await c("sessions", "cancel", label)
        assert done.code == 1
        assert "has ended already" in done.err
        text = c.begin(100_000)
        await c.committed(1)
        done = await c("sessions", "cancel", "last")
        assert done.code == 0, done.err
        with pytest.raises(GenerationError, match="ended by an operator of this service"):
            await text
        assert not c.cluster.router.sessions


async def test_text_of_before_a_failover_is_not_shown_as_a_round(tmp_path: Path) -> None:
    async with ctl(tmp_path) as c:
        text = c.begin(300)
        await c.committed(20)
        (routed,) = c.cluster.router.sessions
        moved = await c("instances", "drain", routed.machine.verifier, "--move")
        assert moved.code == 0 and "1 sent elsewhere" in moved.out, moved.err
        async with asyncio.timeout(10):
            while routed.machine.failovers == 0 or routed.place is None:
                await asyncio.sleep(0)
        followed = await c("sessions", "watch", "last", "-o", "jsonl")
        rounds = [
            one for line in followed.out.splitlines() for one in json.loads(line).get("rounds", [])
        ]
        assert [one["known"] for one in rounds[:2]] == [False, True]
        assert sum(not one["known"] for one in rounds) == 1
        assert len(rounds[0]["own"]) >= 20
        strip = (await c("sessions", "watch", "last")).out
        assert not strip.startswith("[") and "of an earlier verifier" in strip
        assert await text == c.text(300)
