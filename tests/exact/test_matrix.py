"""The identity matrix: what is exact passes, and each way of not being so is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sdcpd.engine.api import DraftEngine, Prefix, Score, Scored
from sdcpd.engine.fake import FakeDrafter, FakeModel, FakeTarget
from sdcpd.engine.ngram import NgramDrafter
from sdcpd.exact.command import Held
from sdcpd.exact.drafters import RandomDrafter, WrongDrafter
from sdcpd.exact.matrix import SAMPLINGS, STRANGERS, Case, Matrix, Outcome, cases

PROMPT = tuple(i * 5 % 32 for i in range(130))
TOKENS = 12
MS = (1, 3)


def matrix(target: FakeTarget) -> Matrix:
    perfect = FakeDrafter(target.model)
    drafters: dict[str, DraftEngine] = {
        "perfect": perfect,
        "wrong": WrongDrafter(perfect),
        "random": RandomDrafter(1),
        "n-gram": NgramDrafter(),
    }
    return Matrix(target, drafters, prompt=PROMPT, tokens=TOKENS)


async def held(target: FakeTarget, chosen: Sequence[Case]) -> list[Held]:
    """The cases, held against the first of their sampling."""
    outcomes = [outcome async for outcome in matrix(target).run(chosen)]
    wanted = {one.case.sampling: one.tokens for one in reversed(outcomes)}
    return [Held(one, wanted[one.case.sampling]) for one in outcomes]


ALL = tuple(cases(["perfect", "wrong", "random", "n-gram"], MS))
# Of each kind one; the strangers and the events take their time.
FEW = tuple(one for one in ALL if one.batch == 1 and (one.sampling == "greedy" or not one.event))


@pytest.mark.parametrize("chosen", [FEW, pytest.param(ALL, marks=pytest.mark.slow)])
async def test_an_exact_engine_passes_and_every_event_takes_place(chosen: Sequence[Case]) -> None:
    found = await held(FakeTarget(FakeModel()), chosen)
    assert [str(one.outcome.case) for one in found if not one.same] == []
    assert [str(one.outcome.case) for one in found if not one.outcome.took_place] == []
    greedy = found[0].outcome
    assert list(greedy.tokens) == FakeModel().text(PROMPT, TOKENS)
    by_case = {str(one.outcome.case): one.outcome.happened for one in found}
    perfect = by_case["greedy, perfect M=3"]
    assert perfect["accepted"] == perfect["proposed"] > 0
    wrong = by_case["greedy, wrong M=3"]
    assert wrong["accepted"] == 0 < wrong["proposed"]
    assert by_case["greedy, perfect M=3, prefix hit"]["by the drafter"] == 128


def test_the_cases_are_those_of_the_matrix() -> None:
    chosen = list(cases(["perfect", "wrong"], range(1, 5)))
    assert len(set(chosen)) == len(chosen)
    for sampling in SAMPLINGS:
        mine = [one for one in chosen if one.sampling == sampling]
        assert mine[0] == Case(sampling, "")
        for drafter in ("perfect", "wrong"):
            assert {one.m for one in mine if one.drafter == drafter and one.batch == 1} >= {
                1,
                2,
                3,
                4,
            }
            assert any(one.batch == 1 + STRANGERS for one in mine if one.drafter == drafter)
        assert {one.event for one in mine} == {"", "self-decoding", "failover", "prefix hit"}


class Batched(FakeTarget):
    """Its text depends on how many tokens are verified at once."""

    async def score(self, work: Score) -> Scored:
        """See TargetEngine."""
        found = await super().score(work)
        if len(work.proposed) < 3:
            return found
        return replace(found, accepted=0, additional=(found.additional + 1) % 32)


class Forgetful(FakeTarget):
    """KV that it is given changes its text."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self._spoilt: set[tuple[bytes, int]] = set()

    async def prepare(
        self,
        session: bytes,
        epoch: int,
        prefix: Prefix,
        *,
        kv: bytes | None = None,
        blocks: Sequence[bytes | memoryview] = (),
    ) -> int:
        """See TargetEngine."""
        if blocks:
            self._spoilt.add((session, epoch))
        return await super().prepare(session, epoch, prefix, kv=kv, blocks=blocks)

    async def score(self, work: Score) -> Scored:
        """See TargetEngine."""
        found = await super().score(work)
        if (work.session, work.epoch) not in self._spoilt:
            return found
        return replace(found, accepted=0, additional=(found.additional + 1) % 32)


@pytest.mark.parametrize(
    ("kind", "differing"),
    [(Batched, ["greedy, perfect M=3"]), (Forgetful, ["greedy, no drafter, prefix hit"])],
)
async def test_what_is_not_exact_is_found(kind: type[FakeTarget], differing: list[str]) -> None:
    chosen = [
        Case("greedy", ""),
        Case("greedy", "perfect", 1),
        Case("greedy", "perfect", 3),
        Case("greedy", "", event="prefix hit"),
    ]
    found = await held(kind(FakeModel()), chosen)
    assert [str(one.outcome.case) for one in found if not one.same] == differing
    assert all(one.parts_at is not None for one in found if not one.same)


def test_an_event_that_did_not_happen_is_told() -> None:
    nothing = {"self-decoded": 0, "opened": 1, "KV tokens reused": 0}
    for event in ("self-decoding", "failover", "prefix hit"):
        assert not Outcome(Case("greedy", "perfect", 1, 1, event), (1,), nothing).took_place
    assert Outcome(Case("greedy", ""), (1,), nothing).took_place


@pytest.mark.parametrize(
    ("tokens", "wanted", "parts_at"),
    [((1, 2), (1, 2), None), ((1, 3), (1, 2), 1), ((1,), (1, 2), 1), ((1, 2, 3), (1, 2), 2)],
)
def test_where_two_texts_part(
    tokens: tuple[int, ...], wanted: tuple[int, ...], parts_at: int | None
) -> None:
    outcome = Held(Outcome(Case("greedy", ""), tokens, {}), wanted)
    assert (outcome.same, outcome.parts_at) == (parts_at is None, parts_at)
