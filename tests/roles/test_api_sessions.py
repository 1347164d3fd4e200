"""Clients that come back to a session: what they get, of which sessions, and what they are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sdcpd.engine.tokenizer import TextStream
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles import session_output
from sdcpd.roles.api_sessions import TOKENS_AT_ONCE
from sdcpd.transport.http import Request, Response
from tests.kit.api import (
    END,
    STORY,
    Api,
    Scripted,
    ScriptModel,
    cluster_api,
    events_of,
    served,
    text_model,
    tokenizer,
)
from tests.kit.cluster import ROUTER, Cluster
from tests.kit.records import MemoryRecords
from tests.roles.test_frontend import sessions_ended
from tests.roles.test_frontend_requests import AB, bearer, checked, key_file

COMPLETIONS = "/v1/completions"
V0 = "https://v0.test/"
SCRIPT = tokenizer().encode(STORY).ids
END_ID = tokenizer().token_to_id(END)
UNKNOWN = "A" * 22


def path(label: str, query: str = "") -> str:
    return f"/v1/sdcp/sessions/{label}/output{query}"


async def read(api: Api, label: str, query: str = "") -> list[Any]:
    """The events of a session's output."""
    status, fields, octets = await api.raw("GET", path(label, query))
    assert status == 200, octets
    assert fields["content-type"].startswith("text/event-stream")
    return events_of(octets)


async def refused(api: Api, label: str, query: str = "") -> tuple[int, dict[str, Any]]:
    """Status and error of what is no output."""
    status, answer = await api.json("GET", path(label, query))
    return status, checked(answer)


def tokens_of(events: Sequence[Any]) -> list[int]:
    """The tokens of events without a gap between them."""
    tokens: list[int] = []
    for event in events:
        assert event["from"] == events[0]["from"] + len(tokens)
        tokens += event["tokens"]
    return tokens


def text_of(events: Sequence[Any]) -> str:
    return "".join(event["text"] for event in events)


async def ended(api: Api, count: int, **body: Any) -> tuple[str, str]:
    """Label and text of a session that has ended, with a prompt of one token."""
    asked = {"prompt": [1], "max_tokens": count, "temperature": 0} | body
    status, whole = await api.json("POST", COMPLETIONS, body=asked)
    assert status == 200, whole
    return whole["id"].removeprefix("cmpl-"), whole["choices"][0]["text"]


class Stream:
    """A client's stream of the API, by octets, so that it can break anywhere."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.label = ""

    @classmethod
    async def begin(cls, api: Api, count: int) -> Stream:
        """A text of which the first octets have come."""
        body = {"prompt": [1], "max_tokens": count, "temperature": 0, "stream": True}
        made = cls(*await api.open("POST", COMPLETIONS, body=json.dumps(body).encode()))
        head = (await made._reader.readuntil(b"\r\n\r\n")).decode()
        made.label = head.partition("x-request-id: ")[2].partition("\r\n")[0]
        await made._reader.readuntil(b"data: ")
        return made

    async def rest(self) -> bytes:
        """What still comes."""
        octets = await self._reader.read()
        self._writer.close()
        return octets

    def lost(self) -> None:
        """The client is gone."""
        self._writer.transport.abort()


async def until_read(cluster: Cluster, readers: int = 1) -> None:
    """Wait until so many clients have come back to the one session."""
    async with asyncio.timeout(5):
        while [routed.readers for routed in cluster.router.sessions] != [readers]:
            await asyncio.sleep(0.002)


# ---- what is given


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-"])
async def test_the_whole_output_of_an_ended_session(prefix: str) -> None:
    """D-G1: token for token what the target writes, and the text of the first answer."""
    async with cluster_api(SCRIPT) as (api, cluster):
        label, text = await ended(api, 60)
        *events, done = await read(api, prefix + label)
        assert isinstance(cluster.model, ScriptModel)
        assert tokens_of(events) == cluster.model.next(1, 60)
        assert text_of(events) == text and done == "[DONE]"
        assert [event["finish_reason"] for event in events][-1] == "length"
        assert {(event["object"], event["session"]) for event in events} == {("sdcp.output", label)}


async def test_coming_back_at_every_token_gives_exactly_the_rest() -> None:
    """D-G1, D-G2: characters of several octets, whose tokens are on both sides of the border."""
    async with cluster_api(SCRIPT) as (api, _):
        count = len(SCRIPT) + 2  # ends in the middle of a word
        label, _ = await ended(api, count)
        *events, _ = await read(api, label)
        tokens = tokens_of(events)
        stream = TextStream(text_model())
        shown = ["", *(stream.add(token) for token in tokens)]
        whole = "".join(shown) + stream.finish()
        for n in range(count + 1):
            *events, done = await read(api, label, f"?from={n}")
            assert (events[0]["from"], done) == (n, "[DONE]")
            assert tokens_of(events) == tokens[n:]
            assert text_of(events) == whole[len("".join(shown[: n + 1])) :]
        assert "🙂" in whole
        beyond, _ = await read(api, label, "?from=1000000")
        assert (beyond["from"], beyond["tokens"]) == (1000000, [])


async def test_a_text_that_ended_by_itself_says_so() -> None:
    """The stop token is committed, so it is there; it has no text."""
    script = [*tokenizer().encode("one two").ids, END_ID]
    async with cluster_api(script) as (api, _):
        label, text = await ended(api, 200)
        *events, _ = await read(api, label)
        assert tokens_of(events)[-1] == END_ID
        assert (text_of(events), events[-1]["finish_reason"]) == (text, "stop")


async def test_two_read_an_open_session_and_each_gets_everything() -> None:
    """R-6.7-9: the first client's stream too, whose session is not disturbed."""
    async with cluster_api(SCRIPT, pass_time_s=0.005, drafters=0) as (api, cluster):
        stream = await Stream.begin(api, 60)
        reads = [read(api, stream.label, query) for query in ("", "?from=0", "?from=9&x=1")]
        *all_events, octets = await asyncio.gather(*reads, stream.rest())
        assert isinstance(cluster.model, ScriptModel)
        wanted = cluster.model.next(1, 60)
        for first, events in zip((0, 0, 9), all_events, strict=True):
            assert tokens_of(events[:-1]) == wanted[first:]
            assert len(events) > 10, "they come as they are committed"
        assert b"data: [DONE]" in octets
        assert cluster.verifiers[V0].counts["opened"] == 1


async def test_beyond_what_is_committed_waits_for_the_end() -> None:
    """D-G2: while the session is open nothing comes but its end."""
    async with cluster_api(SCRIPT, pass_time_s=0.005, drafters=0) as (api, _):
        stream = await Stream.begin(api, 30)
        only, done = await read(api, stream.label, "?from=1000")
        assert (only["tokens"], only["finish_reason"], done) == ([], "length", "[DONE]")
        stream.lost()


async def test_a_long_text_comes_in_parts_and_at_once() -> None:
    """Whoever catches up holds up nobody."""
    count = TOKENS_AT_ONCE + 44
    async with cluster_api(SCRIPT) as (api, _):
        label, text = await ended(api, count)
        *events, _ = await read(api, label)
        assert [len(event["tokens"]) for event in events] == [TOKENS_AT_ONCE, 44]
        assert text_of(events) == text


async def test_silence_is_filled_with_comments() -> None:
    """ux 1.2 row 17, as in other streams."""
    more = asyncio.Event()
    generator = Scripted(parts=[AB, more, AB])
    label = session_path_id(generator.session)
    async with served(generator, sse_ping_s=0.01) as api:
        reader, writer = await api.open("GET", path(label))
        await reader.readuntil(b'"ab"')
        await reader.readuntil(b": ping\n\n")
        more.set()
        assert b"[DONE]" in await reader.read()
        writer.close()


# ---- clients that go


async def test_a_reader_that_goes_ends_nothing() -> None:
    async with cluster_api(SCRIPT, pass_time_s=0.005, drafters=0) as (api, cluster):
        stream = await Stream.begin(api, 60)
        reader, writer = await api.open("GET", path(stream.label))
        await reader.readuntil(b"data: ")
        await until_read(cluster)
        writer.transport.abort()
        await until_read(cluster, 0)
        assert b"data: [DONE]" in await stream.rest()


async def test_a_session_goes_on_for_who_has_come_back() -> None:
    """A connection whose end the router sees late: its client reads elsewhere already."""
    async with cluster_api(SCRIPT, pass_time_s=0.005, drafters=0) as (api, cluster):
        stream = await Stream.begin(api, 60)
        reading = asyncio.ensure_future(read(api, stream.label))
        await until_read(cluster)
        stream.lost()
        *events, done = await reading
        assert isinstance(cluster.model, ScriptModel)
        assert tokens_of(events) == cluster.model.next(1, 60) and done == "[DONE]"
        await sessions_ended(cluster)


async def test_what_an_abandoned_session_had_committed() -> None:
    """ux 1.2 row 4: it was ended when its client went; nobody takes what there is for all of it."""
    async with cluster_api(SCRIPT, pass_time_s=0.005, drafters=0) as (api, cluster):
        stream = await Stream.begin(api, 450)
        stream.lost()
        await sessions_ended(cluster)
        for there in (True, False):
            *events, error = await read(api, stream.label)
            committed = list(cluster.mlc.tokens(stream.label))
            assert tokens_of(events) == committed and 0 < len(committed) < 450
            assert all(event["finish_reason"] is None for event in events)
            assert checked(error)["code"] == "sdcp_session_failed"
            assert "its client had gone" in error["error"]["message"]
            if there:
                cluster.kill(V0)  # then the log has it


# ---- after a restart of the router


async def restarted(cluster: Cluster) -> None:
    """The router is killed and started again, and all have reported to it."""
    cluster.kill(ROUTER)
    cluster.add_router()
    await cluster.ready()


async def test_an_open_session_is_read_on_after_a_restart() -> None:
    """R-6.9-18: what the client has and what it reads then are the text."""
    async with cluster_api(SCRIPT, pass_time_s=0.005) as (api, cluster):
        stream = await Stream.begin(api, 200)
        reader, writer = await api.open("GET", path(stream.label))
        await reader.readuntil(b"\r\n\r\n")
        had = json.loads((await reader.readuntil(b"\n\n")).partition(b"data: ")[2])
        await restarted(cluster)
        async with served(cluster.router) as again:
            *events, done = await read(again, stream.label, f"?from={len(had['tokens'])}")
        # Not before: what is left of the old router would end the session.
        writer.transport.abort()
        stream.lost()
        assert isinstance(cluster.model, ScriptModel)
        wanted = cluster.model.next(1, 200)
        assert had["tokens"] + tokens_of(events) == wanted and done == "[DONE]"
        assert had["text"] + text_of(events) == api.text.decode(wanted)


@pytest.mark.parametrize("verifier", ["there", "gone"])
@pytest.mark.parametrize("stopped", [False, True])
async def test_what_ended_before_a_restart_is_in_its_log(
    verifier: str, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its verifier tells how it ended; without it nobody can, unless the last token does."""
    script = [*tokenizer().encode("one two").ids, END_ID] if stopped else SCRIPT
    async with cluster_api(script) as (api, cluster):
        label, text = await ended(api, 60)
        await restarted(cluster)
        if verifier == "gone":
            cluster.kill(V0)
        async with served(cluster.router) as again:
            if verifier == "gone":
                status, error = await refused(again, label)
                assert status == 503 and "has just been started" in error["message"]
                monkeypatch.setattr(session_output, "YOUNG_S", 0.0)  # as some seconds later
            *events, done = await read(again, f"cmpl-{label}")
        assert tokens_of(events) == list(cluster.mlc.tokens(label))
        assert (text_of(events), done) == (text, "[DONE]")
        reason = "stop" if stopped else "length" if verifier == "there" else None
        assert events[-1]["finish_reason"] == reason


async def test_what_was_abandoned_before_a_restart_is_no_whole_text() -> None:
    async with cluster_api(SCRIPT, pass_time_s=0.005, drafters=0) as (api, cluster):
        stream = await Stream.begin(api, 450)
        stream.lost()
        await sessions_ended(cluster)
        await restarted(cluster)
        async with served(cluster.router) as again:
            *events, error = await read(again, stream.label)
        assert tokens_of(events) == list(cluster.mlc.tokens(stream.label))
        assert checked(error)["code"] == "sdcp_session_failed"
        assert "before its text was complete" in error["error"]["message"]


async def test_a_session_that_is_open_at_another_router() -> None:
    """D-Z8: routers that share the logs see all of them; what this one holds is not the end."""
    async with cluster_api(SCRIPT) as (api, cluster):
        label, _ = await ended(api, 8)
        (session,) = cluster.router._ended
        await restarted(cluster)
        assert isinstance(cluster.records, MemoryRecords)
        cluster.records.content[session] = b"another's"
        async with served(cluster.router) as again:
            status, error = await refused(again, label)
        assert status == 503 and "open at another router" in error["message"]


async def test_a_log_that_cannot_be_read_now() -> None:
    async def deaf(_: Request) -> Response:
        return Response(503)

    async with cluster_api(SCRIPT) as (api, cluster):
        label, _ = await ended(api, 8)
        await restarted(cluster)
        cluster.mlc.before = deaf
        async with served(cluster.router) as again:
            status, error = await refused(again, label)
        assert status == 503 and "cannot read commit log" in error["message"]


# ---- what is refused


async def test_a_session_that_left_no_log() -> None:
    async with cluster_api(SCRIPT, log_kept="90min") as (api, _):
        status, error = await refused(api, UNKNOWN)
        assert (status, error["code"], error["param"]) == (404, "not_found", "id")
        assert UNKNOWN in error["message"] and "kept for 90min after its end" in error["message"]
        assert (await api.raw("HEAD", path(UNKNOWN)))[0] == 404


@pytest.mark.parametrize("named", ["", "x", "A" * 21, "A" * 21 + "B", "cmpl-", f"x-{UNKNOWN}"])
async def test_what_is_no_session_id(named: str) -> None:
    async with served(Scripted()) as api:
        status, error = await refused(api, named)
        assert (status, error["param"]) == (400, "id") and repr(named) in error["message"]


@pytest.mark.parametrize(
    "query",
    [
        "from=",
        "from",
        "from=-1",
        "from=+1",
        "from=1.0",
        "from=1&from=1",
        f"from={2**64}",
        "from=" + "9" * 5000,
        "from=%F0%9F%99%82",
        "a=1&%66rom=0x1",
    ],
)
async def test_a_from_that_is_no_number_of_tokens(query: str) -> None:
    """D-G3."""
    generator = Scripted()
    async with served(generator) as api:
        status, error = await refused(api, session_path_id(generator.session), f"?{query}")
        assert (status, error["param"]) == (400, "from") and "from" in error["message"]


async def test_methods_and_keys_are_as_elsewhere(tmp_path: Path) -> None:
    generator = Scripted(parts=[AB])
    mine = path(session_path_id(generator.session))
    async with served(generator) as api:
        status, fields, body = await api.raw("HEAD", mine)
        assert (status, body) == (200, b"")
        assert fields["x-request-id"] == session_path_id(generator.session)
        status, fields, _ = await api.raw("OPTIONS", mine)
        assert (status, fields["allow"]) == (204, "GET, HEAD, OPTIONS")
        assert (await api.raw("POST", mine))[0] == 405
        for other in ("/v1/sdcp/sessions", f"/v1/sdcp/sessions/{UNKNOWN}", f"{mine}/x"):
            assert (await api.raw("GET", other))[0] == 404
    async with served(generator, keys_file=key_file(tmp_path / "keys", alice="one")) as api:
        assert (await api.raw("GET", mine))[0] == 401
        status, _, octets = await api.raw("GET", mine, headers=bearer("one"))
        assert status == 200 and text_of(events_of(octets)[:-1]) == "ab"


async def test_a_bug_is_an_error_event_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    generator = Scripted(parts=[AB, RuntimeError("a bug")])
    async with served(generator) as api:
        _, error = await read(api, session_path_id(generator.session))
        assert "a bug" not in checked(error)["message"]
    assert "RuntimeError: a bug" in caplog.text
