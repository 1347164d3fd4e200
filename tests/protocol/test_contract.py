"""The Session Contract: Section 4.1, D-C1 to D-C4, D-E3, D-E5, D-E7."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdcpd.protocol import cbor, codec
from sdcpd.protocol.contract import check_contract, contract_digest, decode_contract
from sdcpd.protocol.digest import prefix_digest0
from sdcpd.protocol.messages import Contract, Sampling
from sdcpd.protocol.problems import BadContract

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())
CONTRACTS = VECTORS["contracts"]
APPENDIX_A = VECTORS["appendix_a"]


def named(entries: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=[entry["name"] for entry in entries])


def appendix_a() -> Contract:
    return codec.decode(Contract, bytes.fromhex(APPENDIX_A["contract_cbor"]))


def test_appendix_a_contract() -> None:
    """R-4.1-1: the draft's own vector, octets and digest."""
    contract = appendix_a()
    check_contract(contract)
    assert codec.encode(contract).hex() == APPENDIX_A["contract_cbor"]
    assert len(codec.encode(contract)) == APPENDIX_A["contract_octets"]
    digest = contract_digest(contract)
    assert digest.hex() == APPENDIX_A["contract_digest"]
    assert prefix_digest0(digest, APPENDIX_A["prompt"]).hex() == APPENDIX_A["d"][0]


@named(CONTRACTS["accept"])
def test_accepted_contracts(entry: dict[str, Any]) -> None:
    contract = decode_contract(cbor.decode_one(bytes.fromhex(entry["cbor"])))
    check_contract(contract)
    assert len(codec.encode(contract)) == entry["octets"]
    assert contract_digest(contract).hex() == entry["digest"]


@named(CONTRACTS["same_content"])
def test_de5_digest_covers_content_not_octets(entry: dict[str, Any]) -> None:
    contract = codec.decode(Contract, bytes.fromhex(entry["cbor"]))
    assert contract_digest(contract).hex() == entry["digest"]


@named(CONTRACTS["refuse"])
def test_refused_contracts(entry: dict[str, Any]) -> None:
    """R-4.1-5, D-E7: 422 sdcp-bad-contract, by itself and inside a session-open."""
    octets = bytes.fromhex(entry["cbor"])
    with pytest.raises(BadContract) as raised:
        decode_contract(cbor.decode_one(octets))
    assert (raised.value.status, raised.value.type) == (entry["status"], entry["type"])


def test_dc1_and_dc2_are_checked_on_values_of_our_own() -> None:
    contract = appendix_a()
    for wrong in (
        replace(contract, m_max=0),
        replace(contract, m_max=65),
        replace(contract, rule=3),
        replace(contract, low_rounds=0),
        replace(contract, fallback=()),
        replace(contract, fallback=(4,)),
        replace(contract, drafters=()),
        replace(contract, max_new=2**64),
        replace(contract, stop=(-1,)),
    ):
        with pytest.raises(BadContract):
            check_contract(wrong)


def test_supported_rules_are_the_callers() -> None:
    with pytest.raises(BadContract):
        check_contract(appendix_a(), supported_rules=frozenset({2}))


def test_dz7_rule_200_requires_a_seed() -> None:
    contract = replace(appendix_a(), rule=200)
    for sampling in (None, Sampling(), Sampling(temperature_milli=700)):
        with pytest.raises(BadContract):
            check_contract(replace(contract, sampling=sampling))
    check_contract(replace(contract, sampling=Sampling(seed=0)))


def test_low_ratio_zero_and_absent_are_different_contracts() -> None:
    contract = appendix_a()
    assert contract_digest(replace(contract, low_ratio=0)) != contract_digest(contract)
    assert contract_digest(replace(contract, sampling=Sampling())) != contract_digest(contract)
