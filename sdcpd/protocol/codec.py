"""Octets to messages and back (Section 5.2): strict on receipt, core deterministic when sent.

A receiver takes every valid encoding (D-E1) and ignores unknown keys, except in the contract
(D-E3). Octets that cannot be decoded are `Malformed` wherever they stand; what decodes but is
wrong is `BadContract` inside the contract and `Malformed` elsewhere, and the envelope is judged
first (D-E7). The size of a body is checked before it comes here.
"""

from typing import Any, TypeVar, cast

from cbor2 import dumps

from sdcpd.protocol import cbor, fields, logprobs
from sdcpd.protocol.fields import (
    Invalid,
    Table,
    array_of,
    converted,
    hint,
    octets,
    optional,
    required,
    text,
    uint,
    uint_between,
    uints,
)
from sdcpd.protocol.limits import DIGEST_BYTES, M_MAX, SCOPE_BYTES, SESSION_ID_BYTES, UINT_MAX
from sdcpd.protocol.messages import (
    Action,
    Assignment,
    Contract,
    Event,
    InstanceRole,
    Message,
    Output,
    Policy,
    Proposal,
    Resume,
    Sampling,
    SessionOpen,
    SessionState,
    State,
    Status,
    Verdict,
)
from sdcpd.protocol.problems import BadContract, Malformed

MEDIA_TYPE = "application/sdcp+cbor"

M = TypeVar("M", bound=Message)

_hash32 = octets(DIGEST_BYTES)
_session_id = octets(SESSION_ID_BYTES)
_percent = uint_between(0, 100)
_milli = uint_between(0, 1000)
_action = converted(uint, Action.received)
_some_uints = array_of(uint, least=1)
_LADDER = frozenset({Action.REDUCE, Action.SWITCH, Action.SELF_DECODE, Action.FAIL})


def _ladder(value: object) -> Action:
    number = uint(value)
    if number not in _LADDER:
        raise Invalid("is not reduce, switch, self_decode or fail")
    return Action(number)


def _part(value: object) -> tuple[int, ...]:
    values = uints(value)
    if len(values) < 2:
        raise Invalid("is not a part")
    return values


def _prompt(value: object) -> tuple[int, ...] | str:
    return value if type(value) is str else uints(value)


_SAMPLING = (
    optional("temperature_milli", uint),
    optional("top_k", uint),
    optional("top_p_milli", _milli),
    optional("seed", uint),
)
_sampling = Table(Sampling, *_SAMPLING)
_contract_sampling = Table(Sampling, *_SAMPLING, closed=True)

_contract = Table(
    Contract,
    required("target", _hash32),
    required("tokenizer", _hash32),
    optional("drafters", array_of(_hash32, least=1)),
    required("rule", uint),
    optional("sampling", _contract_sampling.read),
    required("m_max", uint_between(0, M_MAX)),
    required("max_new", uint),
    required("stop", uints),
    required("low_rounds", uint_between(1, UINT_MAX)),
    optional("low_ratio", _percent),
    required("fallback", array_of(_ladder, least=1)),
    optional("self_load", _percent),
    optional("self_max", uint),
    optional("scope", octets(SCOPE_BYTES)),
    closed=True,
)


def read_contract(value: object) -> Contract:
    """Check a decoded contract against its CDDL; raises BadContract (Section 4.1, D-E7)."""
    if cbor.holds_duplicates(value):
        raise BadContract("contract has a key twice")
    try:
        return _contract.read(value)
    except Invalid as error:
        raise BadContract(f"contract {error}") from None


_resume = Table(
    Resume,
    required("round", uint),
    required("committed", uint),
    required("digest", _hash32),
    required("committed_tokens", text),
    optional("target_kv", text),
)
_status = Table(
    Status,
    required("instance", text),
    required("role", converted(uint_between(1, 2), InstanceRole)),
    required("load", _percent),
    required("queue", uint),
    optional("accept_milli", _milli),
    optional("cache_mbps", uint),
    required("ttl_ms", uint),
    hint("engine", text),
    hint("model", _hash32),
    hint("ready", fields.boolean),
    hint("tokens_per_s", uint),
    hint("rules", uints),
    hint("dropped", array_of(_session_id)),
    hint("certificate_until", uint),
    hint("vocab", uint),
)

_TABLES: dict[type[Message], Table[Any]] = {
    Sampling: _sampling,
    Contract: _contract,
    Resume: _resume,
    Status: _status,
    # The contract stands last: if both it and the envelope are wrong, the answer is 400 (D-E7).
    SessionOpen: Table(
        SessionOpen,
        required("session", _session_id),
        required("epoch", uint),
        required("prompt", _prompt),
        optional("prompt_kv", text),
        required("commit_log", text),
        optional("resume", _resume.read),
        hint("self_decode_after_ms", uint),
        hint("logprobs", uint_between(0, logprobs.ALTERNATIVES_MAX)),
        required("contract", read_contract),
    ),
    SessionState: Table(
        SessionState,
        required("session", _session_id),
        required("epoch", uint),
        required("round", uint),
        required("committed", uint),
        required("digest", _hash32),
        optional("state", converted(uint, State.received)),
    ),
    Assignment: Table(
        Assignment,
        required("session", _session_id),
        required("epoch", uint),
        required("verifier", text),
        required("drafter", text),
        required("prompt", _prompt),
        required("round", uint),
        optional("sampling", _sampling.read),
        required("committed", uint),
        required("digest", _hash32),
        optional("committed_tokens", text),
        required("m_init", uint),
        hint("vocab", uint),
        required("contract", read_contract),
    ),
    Proposal: Table(
        Proposal,
        required("session", _session_id),
        required("epoch", uint),
        required("round", uint),
        required("drafter", text),
        required("base", uint),
        required("base_digest", _hash32),
        required("tokens", _some_uints),
        optional("q_rows", text),
        optional("draft_kv", text),
        required("status", _status.read),
    ),
    Verdict: Table(
        Verdict,
        required("session", _session_id),
        required("epoch", uint),
        required("round", uint),
        required("accepted", uint),
        required("emitted", uints),
        required("committed", uint),
        required("digest", _hash32),
        required("action", _action),
        required("m_cap", uint),
        required("low", uint),
        required("load", _percent),
    ),
    Output: Table(
        Output,
        required("session", _session_id),
        required("epoch", uint),
        required("from", uint, attribute="from_"),
        required("tokens", uints),
        required("final", fields.boolean),
        optional("finish", _action),
        hint("rounds", uint),
        hint("drafted", uint),
        hint("accepted", uint),
        hint("self_decoded", uint),
        hint("parts", array_of(_part)),
        hint("logprobs", logprobs.rows),
    ),
    Event: Table(
        Event,
        required("session", _session_id),
        required("epoch", uint),
        required("kind", _action),
        required("committed", uint),
        required("digest", _hash32),
    ),
    Policy: Table(
        Policy,
        required("session", _session_id),
        required("from_round", uint),
        required("sampling", _sampling.read),
    ),
    **logprobs.TABLES,
}


def decode(kind: type[M], body: bytes) -> M:
    """Decode a body as a message of `kind`; raises Malformed (400) or BadContract (422)."""
    try:
        value = cbor.decode_one(body)
    except cbor.NotWellFormed as error:
        raise Malformed(f"body is not valid CBOR: {error}") from None
    if kind is Contract:
        return cast(M, read_contract(value))
    _refuse_duplicates(value, has_contract=kind in (SessionOpen, Assignment))
    try:
        return cast(M, _TABLES[kind].read(value))
    except Invalid as error:
        raise Malformed(f"message {error}") from None


def _refuse_duplicates(value: object, *, has_contract: bool) -> None:
    """Refuse a key that came twice, except in the contract, which judges itself (D-E7)."""
    if has_contract and type(value) is dict:
        value = [[key, member] for key, member in value.items() if key != "contract"]
    if cbor.holds_duplicates(value):
        raise Malformed("a map has a key twice")


def encode(message: Message) -> bytes:
    """Encode a message in core deterministic encoding (RFC 8949 Section 4.2.1, D-E1)."""
    return dumps(_TABLES[type(message)].plain(message, _TABLES))


def decode_tokens(body: bytes) -> tuple[int, ...]:
    """Decode a prompt or committed_tokens object, an array of uint (D-M4); raises Malformed."""
    try:
        return uints(cbor.decode_one(body))
    except (cbor.NotWellFormed, Invalid) as error:
        raise Malformed(f"token object {error}") from None


def encode_tokens(tokens: tuple[int, ...] | list[int]) -> bytes:
    """Encode an array of uint (D-M4)."""
    return dumps(tokens)


def decode_item(body: bytes) -> object:
    """Decode any one item as `cbor` describes; raises Malformed, for a key twice as well."""
    values = decode_items(body)
    if len(values) != 1:
        raise Malformed("body is not one CBOR item")
    return values[0]


def decode_items(body: bytes) -> list[object]:
    """Decode a CBOR sequence (RFC 8742), which may be empty; raises Malformed."""
    values: list[object] = []
    position = 0
    while position < len(body):
        try:
            value, position = cbor.decode_next(body, position)
        except cbor.NotWellFormed as error:
            raise Malformed(f"body is not valid CBOR: {error}") from None
        values.append(value)
    if cbor.holds_duplicates(values):
        raise Malformed("a map has a key twice")
    return values


def encode_item(value: object) -> bytes:
    """Encode a value whose map keys are all text, in core deterministic encoding.

    (With keys of several types cbor2 sorts by length first, which is not the core order.)
    """
    return dumps(value, canonical=True)
