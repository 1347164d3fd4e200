"""Appendix A: the contract's octets, and the digests that a real session comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sdcpd.protocol.codec import encode
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.messages import Contract
from tests.kit.answers import state_of, verdict_of
from tests.kit.scripted_target import RowsModel, one_hot
from tests.kit.vectors import VECTORS, hashes
from tests.kit.verifier_wire import Wire

APPENDIX = VECTORS["appendix_a"]


def contract() -> Contract:
    members = hashes(APPENDIX["contract"])
    return Contract(**{k: tuple(v) if type(v) is list else v for k, v in members.items()})


def test_the_contract_is_143_octets() -> None:
    """R-A-1: exactly those of the appendix."""
    octets = encode(contract())
    assert len(octets) == APPENDIX["contract_octets"] == 143
    assert octets.hex() == APPENDIX["contract_cbor"]


async def test_the_digests(make_wire: Callable[..., Wire]) -> None:
    """R-A-2, R-A-3: contract digest, d[0], d[1], d[2], and d[5] after the round of the example."""
    assert contract_digest(contract()).hex() == APPENDIX["contract_digest"]
    example = APPENDIX["example_round"]
    texts = [*APPENDIX["committed"], *example["argmax"]]
    wire = make_wire(model=RowsModel([one_hot(token, 64) for token in texts], prompt=4))
    wire.contract = contract()
    wire.engine.info = replace(
        wire.engine.info, model=wire.contract.target, tokenizer=wire.contract.tokenizer
    )
    prompt = tuple(APPENDIX["prompt"])
    assert state_of(await wire.open(prompt=prompt)).digest.hex() == APPENDIX["d"][0]
    state_of(await wire.name(prompt=prompt))
    for n in (1, 2):
        found = verdict_of(await wire.propose(wire.bad(1)))
        assert (found.committed, found.digest.hex()) == (n, APPENDIX["d"][n])
    found = verdict_of(await wire.propose(example["tokens"]))
    assert (found.accepted, list(found.emitted)) == (example["a"], example["emitted"])
    assert found.digest.hex() == example["derived_d3_d4_d5"][-1]
    assert (found.committed, found.low, found.action) == (5, 0, example["action"])
