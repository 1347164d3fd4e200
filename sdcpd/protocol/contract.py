"""The Session Contract: what is acceptable beyond its CDDL, and its digest (Section 4.1)."""

from hashlib import sha256

from sdcpd.protocol import cbor, codec
from sdcpd.protocol.messages import Contract, Rule
from sdcpd.protocol.problems import BadContract

_DOMAIN = b"SDCP-CONTRACT-1\x00"
SUPPORTED_RULES: frozenset[int] = frozenset(int(rule) for rule in Rule)


def decode_contract(value: object) -> Contract:
    """Return the contract that a decoded CBOR value is, checked as `check_contract` does.

    Raises BadContract for everything that is wrong, "not a map" included (D-E7).
    """
    contract = codec.read_contract(value)
    _check_prose(contract, SUPPORTED_RULES)
    return contract


def check_contract(
    contract: Contract, *, supported_rules: frozenset[int] = SUPPORTED_RULES
) -> None:
    """Hold a contract to its CDDL and to what only the prose asks; raises BadContract.

    m_max is at least 1 (D-C1), the rule is served here (D-C2), and rule 200 has a seed (D-Z7). The
    target's and tokenizer's digests are for the caller to compare with its own.
    """
    # A contract that our own code built has not been through the decoder yet.
    codec.read_contract(cbor.decode_one(codec.encode(contract)))
    _check_prose(contract, supported_rules)


def _check_prose(contract: Contract, supported_rules: frozenset[int]) -> None:
    if contract.m_max < 1:
        raise BadContract("contract m_max is 0, so that no proposal could keep it")
    if contract.rule not in supported_rules:
        raise BadContract("contract rule is not supported")
    seed = contract.sampling.seed if contract.sampling is not None else None
    if contract.rule == Rule.RACE and seed is None:
        raise BadContract("contract sampling has no seed, which rule 200 requires")


def contract_digest(contract: Contract) -> bytes:
    """Return the SHA-256 over the contract's deterministic encoding (Section 4.1).

    It covers the content, not the octets received (D-E5).
    """
    return sha256(_DOMAIN + codec.encode(contract)).digest()
