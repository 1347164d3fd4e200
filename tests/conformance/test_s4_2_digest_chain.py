"""Section 4.2: the chain of digests that both sides compute for themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.messages import Contract, Sampling
from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.scripted_target import RowsModel, one_hot
from tests.kit.vectors import VECTORS, hashes
from tests.kit.verifier_wire import Wire

MakeWire = Callable[..., Wire]
BY_DIGEST = {e["digest"]: hashes(e["members"]) for e in VECTORS["contracts"]["accept"]}


class HugeModel(FakeModel):
    """Has every token of 32 bits in its vocabulary and no scores."""

    def __init__(self) -> None:
        self.vocab = 2**32


def uint32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def first(contract_digest: bytes, prompt: Sequence[int]) -> bytes:
    """d[0] as Section 4.2 writes it."""
    tokens = b"".join(map(uint32, prompt))
    return sha256(b"SDCP-PREFIX-1\x00" + contract_digest + uint32(len(prompt)) + tokens).digest()


def of_vector(wire: Wire, digest: str) -> Contract:
    """The contract of that digest, for which the verifier's model is configured (D-C9)."""
    members = BY_DIGEST[digest]
    wire.engine.info = replace(
        wire.engine.info, model=members["target"], tokenizer=members["tokenizer"]
    )
    members = {k: tuple(v) if type(v) is list else v for k, v in members.items()}
    if "sampling" in members:
        members["sampling"] = Sampling(**members["sampling"])
    return Contract(**members)


GREEDY = [
    e
    for e in VECTORS["prefix_chains"]
    if max(e["committed"]) < 100 and BY_DIGEST[e["contract_digest"]]["rule"] == 1
]


@pytest.mark.parametrize("entry", VECTORS["prefix_chains"], ids=lambda e: e["name"])
async def test_prefix_chains(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-4.2-1, R-4.2-3: d[0] of the opening is the vector's, for an empty prompt as well."""
    wire = make_wire(model=HugeModel())
    contract = of_vector(wire, entry["contract_digest"])
    opened = state_of(await wire.open(contract=contract, prompt=tuple(entry["prompt"])))
    assert opened.digest.hex() == entry["d"][0]
    assert opened.digest == first(bytes.fromhex(entry["contract_digest"]), entry["prompt"])


@pytest.mark.parametrize("entry", GREEDY, ids=lambda e: e["name"])
async def test_committed_chains(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-4.2-2: the target writes the vector's tokens; each verdict carries the vector's d[n]."""
    rows = [one_hot(token, 100) for token in entry["committed"]]
    wire = make_wire(model=RowsModel(rows, prompt=len(entry["prompt"])))
    contract = of_vector(wire, entry["contract_digest"])
    prompt = tuple(entry["prompt"])
    state_of(await wire.open(contract=contract, prompt=prompt))
    state_of(await wire.name(contract=contract, prompt=prompt))
    for n in range(1, len(entry["d"])):
        found = verdict_of(await wire.propose(wire.bad(1)))
        assert (found.committed, found.digest.hex()) == (n, entry["d"][n])


async def test_each_verdict_extends_the_chain_by_its_tokens(wire: Wire) -> None:
    """R-4.2-2: one step a token, over what was emitted and nothing else."""
    state = state_of(await wire.open())
    await wire.name()
    digest, n = state.digest, 0
    for tokens in (3, 1, 4):
        found = verdict_of(await wire.propose(wire.bad(tokens, good=tokens - 1)))
        for token in found.emitted:
            digest, n = sha256(digest + uint32(token)).digest(), n + 1
        assert (found.digest, found.committed) == (digest, n)
        assert wire.commits()[-1].digest == digest
    assert len(output_of(await wire.output()).tokens) == n


@pytest.mark.parametrize("bit", [0, 7, 100, 255])
async def test_another_prefix_is_found_by_its_digest_alone(wire: Wire, bit: int) -> None:
    """R-4.2-4: the right length and round, one bit of the digest flipped: nothing is committed."""
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    before = wire.snapshot()
    digest = bytearray(wire.served().machine.chain.digest)
    digest[bit // 8] ^= 1 << bit % 8
    answer = await wire.propose(wire.good(2), base_digest=bytes(digest))
    refused(answer, 409, "sdcp-stale-base")
    assert wire.snapshot() == before


async def test_another_prompt_is_found_before_any_output(wire: Wire) -> None:
    """R-4.2-4: the first round extends d[0], which has the contract and the prompt in it."""
    await wire.ready()
    digest = wire.served().machine.contract_digest
    for other in (first(digest, (1, 2, 4)), first(digest, ()), first(bytes(32), (1, 2, 3))):
        refused(await wire.propose(wire.good(2), base_digest=other), 409, "sdcp-stale-base")
    assert wire.records() == [] and wire.engine.scored == []
    verdict_of(await wire.propose(wire.good(2), base_digest=first(digest, (1, 2, 3))))


async def test_an_outdated_prefix_is_found(wire: Wire) -> None:
    """R-4.2-4: d of one round before, with the present base."""
    await wire.ready()
    old = wire.served().machine.chain.digest
    verdict_of(await wire.propose(wire.good(2)))
    refused(await wire.propose(wire.good(2), base_digest=old), 409, "sdcp-stale-base")
    assert len(wire.records()) == 1


@pytest.mark.parametrize("beyond", [0, 1, 2**32 - 32, 2**32, 2**64 - 33])
async def test_tokens_beyond_the_vocabulary(wire: Wire, beyond: int) -> None:
    """R-4.2-5: in a prompt 422, in a proposal `sdcp-bad-proposal`, at any position; D-E6."""
    token = wire.model.vocab + beyond
    refused(await wire.open(prompt=(1, token)), 422)
    await wire.ready()
    refused(await wire.propose([token]), 422, "sdcp-bad-proposal")
    refused(await wire.propose([*wire.good(2), token]), 422, "sdcp-bad-proposal")
    assert wire.records() == [] and wire.engine.scored == []
    verdict_of(await wire.propose([wire.model.vocab - 1]))
