"""Section 6.9 at verifiers: what a new one takes over, and what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sdcpd.protocol.codec import encode_tokens
from sdcpd.protocol.messages import Action, State
from sdcpd.transport.http import Client, Headers, Request, Response
from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.failover import MakeWire, fence, resume_of, second


@pytest.mark.parametrize("cut", range(6))
async def test_the_text_goes_on_exactly(make_wire: MakeWire, cut: int) -> None:
    """R-6.9-9, R-6.8-8: a failover after any round; the whole is the undisturbed text."""
    first = make_wire()
    await first.ready()
    for i in range(cut):
        verdict_of(await first.propose(first.bad(3, good=i % 3)))
    tokens = first.mlc.tokens(first.log_name) if cut else ()
    resume = resume_of(first, committed_tokens=first.put("t", encode_tokens(tokens))) if cut else None  # fmt: skip
    fence(first, 2)
    other = second(make_wire, first)
    opened = state_of(await other.open(epoch=2, resume=resume))
    assert (opened.epoch, opened.round, opened.committed) == (2, cut, len(tokens))
    state_of(await other.name(epoch=2))
    for i in range(4):
        found = verdict_of(await other.propose(other.bad(3, good=i % 3), epoch=2))
        assert found.round == cut + i + 1
    output = output_of(await other.output()).tokens
    assert output[: len(tokens)] == tokens and len(output) == len(tokens) + 1 + 2 + 3 + 1
    assert list(output) == first.model.text((1, 2, 3), len(output))
    assert first.mlc.tokens(first.log_name) == output


class Cut:
    """A client that is cut off right after its next PUT was applied."""

    def __init__(self, inner: Client) -> None:
        self._inner = inner
        self.written = asyncio.Event()

    async def request(
        self, method: str, uri: str, *, headers: Headers = (), body: bytes = b"", timeout_s: float
    ) -> Response:
        """Send, and never hear of it again if it was a PUT."""
        answer = await self._inner.request(
            method, uri, headers=headers, body=body, timeout_s=timeout_s
        )
        if method == "PUT":
            self.written.set()
            await asyncio.Event().wait()
        return answer


async def test_a_round_that_was_written_counts(make_wire: MakeWire) -> None:
    """R-6.9-12: killed after the append and before the verdict: the new one resumes at that round,
    its tokens are delivered once, and the old drafter's retry gets nothing a second time.
    """
    first = make_wire()
    await first.ready()
    verdict_of(await first.propose(first.good(1)))
    cut = Cut(first.own_client.inner)
    first.own_client.inner = cut  # type: ignore[assignment]
    proposal = first.proposal(first.good(3))
    lost = asyncio.ensure_future(first.propose(first.good(3)))
    await cut.written.wait()
    lost.cancel()
    fence(first, 2)
    other = second(make_wire, first)
    opened = state_of(await other.open(epoch=2, resume=resume_of(first)))
    assert (opened.round, opened.committed) == (2, 6)
    refused(await other.propose(proposal.tokens, round=2, epoch=1), 403, "sdcp-not-assigned")
    state_of(await other.name(epoch=2))
    refused(await other.propose(proposal.tokens, round=2, epoch=1), 409, "sdcp-stale-epoch")
    assert verdict_of(await other.propose(other.good(1), epoch=2)).round == 3
    tokens = output_of(await other.output()).tokens
    assert list(tokens) == first.model.text((1, 2, 3), 8)


@pytest.mark.parametrize(
    ("changes", "statuses"),
    [
        ({"digest": bytes(32)}, {409}),
        ({"round": 3}, {409}),
        ({"round": 1}, {409}),
        ({"committed": 4}, {409}),
        ({"committed": 6}, {409}),
        ({"committed": 0, "round": 0}, {409}),
        ({"committed": 0}, {422}),
        ({"round": 0}, {422}),
        ({"round": 9, "committed": 5}, {422}),
    ],
    ids=str,
)
async def test_a_resume_that_is_not_the_logs(
    make_wire: MakeWire, changes: dict[str, Any], statuses: set[int]
) -> None:
    """R-6.9-13: refused, with the log's state where it disagrees; no session and no commit."""
    first = make_wire()
    await first.ready()
    verdict_of(await first.propose(first.good(2)))
    last = verdict_of(await first.propose(first.good(1)))
    assert (last.round, last.committed) == (2, 5)
    content = first.mlc.logs[first.log_name]
    other = second(make_wire, first)
    answer = await other.open(epoch=2, resume=resume_of(first, **changes))
    assert answer.status in statuses  # type: ignore[union-attr]
    if 409 in statuses:
        state = refused(answer, 409, "sdcp-stale-base").session_state
        assert state is not None
        assert (state.round, state.committed, state.digest) == (2, 5, last.digest)
    refused(await other.name(epoch=2), 404)
    assert first.mlc.logs[first.log_name] == content
    state_of(await other.open(epoch=2, resume=resume_of(first)))


async def test_a_resume_without_a_log(make_wire: MakeWire) -> None:
    """R-6.9-13: an empty log has no commits to resume: 409 with round 0."""
    first = make_wire()
    await first.ready()
    verdict_of(await first.propose(first.good(2)))
    resume = resume_of(first)
    other = make_wire()
    state = refused(await other.open(epoch=2, resume=resume), 409, "sdcp-stale-base").session_state
    assert state is not None and (state.round, state.committed) == (0, 0)


@pytest.mark.parametrize("kind", ["right", "short", "long", "other", "garbage", "untrusted", "503"])
async def test_committed_tokens_are_checked(make_wire: MakeWire, kind: str) -> None:
    """R-6.9-13: an array of other tokens is refused; where there is none, the log's are taken,
    so that no session ever goes on from an unchecked prefix.
    """
    first = make_wire()
    await first.ready()
    verdict_of(await first.propose(first.good(3)))
    tokens = first.mlc.tokens(first.log_name)
    contents = {
        "right": encode_tokens(tokens),
        "short": encode_tokens(tokens[:-1]),
        "long": encode_tokens((*tokens, 1)),
        "other": encode_tokens((*tokens[:-1], (tokens[-1] + 1) % 32)),
        "garbage": b"\xff\x00",
    }
    reference = first.put("t", contents.get(kind, contents["right"]))
    if kind == "untrusted":
        reference = "https://evil.test/objects/x/t"
    contacted: list[Request] = []

    async def evil(request: Request) -> Response:
        contacted.append(request)
        return Response(200, (), encode_tokens((9, 9, 9, 9)))

    async def unavailable(request: Request) -> Response | None:
        return Response(503) if "/objects/" in request.path else None

    other = second(make_wire, first)
    other.network["https://evil.test/"] = evil
    if kind == "503":
        first.mlc.before = unavailable
    answer = await other.open(epoch=2, resume=resume_of(first, committed_tokens=reference))
    assert contacted == []
    if kind in ("short", "long", "other"):
        refused(answer, 422)
        refused(await other.name(epoch=2), 404)
        return
    assert state_of(answer).committed == 4
    assert output_of(await other.output()).tokens == tokens
    assert len(first.records()) == 1


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("by_stop", [False, True])
async def test_resumed_at_the_end(make_wire: MakeWire, by_stop: bool, n: int) -> None:
    """R-6.9-14: at max_new, or behind a stop token: finished, as output says."""
    text = tuple(make_wire().model.text((1, 2, 3), n))
    members: dict[str, Any] = {"stop": (text[-1],)} if by_stop else {"max_new": n}
    first = make_wire(members=members)
    await first.ready()
    assert verdict_of(await first.propose(first.good(max(1, n - 1)))).action is Action.FINISH
    other = second(make_wire, first, members=members)
    opened = state_of(await other.open(epoch=2, resume=resume_of(first)))
    assert opened.state == State.FINISHED
    output = output_of(await other.output())
    assert (output.tokens, output.final, output.finish) == (text, True, Action.FINISH)
    refused(await other.name(epoch=2), 410, "sdcp-session-closed")


async def test_stop_tokens_of_the_prompt_end_nothing(make_wire: MakeWire) -> None:
    """R-6.9-14, R-6.3-27, D-C4: a prompt that ends with one is a prompt like any other."""
    wire = make_wire(members={"stop": (3,)})
    assert state_of(await wire.open()).state == State.WAITING
    state_of(await wire.name())
    assert len(verdict_of(await wire.propose(wire.good(1))).emitted) == 2
