"""Messages to octets and back: Section 5.2, D-E1 to D-E9, with pycddl as an outside check."""

import json
import random
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycddl import Schema

from sdcpd.protocol import codec
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

HERE = Path(__file__).parent.parent
VECTORS = json.loads((HERE / "vectors.json").read_text())["messages"]
CDDL = (HERE / "sdcp.cddl").read_text()
KINDS: dict[str, type[Message]] = {
    "contract": Contract,
    "session-open": SessionOpen,
    "session-state": SessionState,
    "assignment": Assignment,
    "proposal": Proposal,
    "verdict": Verdict,
    "output": Output,
    "status": Status,
    "event": Event,
    "policy": Policy,
}
HINTS = {
    SessionOpen: {"self_decode_after_ms", "logprobs"},
    Assignment: {"vocab"},
    Output: {"rounds", "drafted", "accepted", "self_decoded", "parts", "logprobs"},
    Status: {"engine", "model", "ready", "tokens_per_s", "rules", "dropped", "vocab"},
}

# ------------------------------------------------------------------------------- strategies

uints = st.integers(0, 23) | st.integers(0, 2**64 - 1)
percent = st.integers(0, 100)
tokens = st.lists(uints, max_size=8).map(tuple)
hash32 = st.binary(min_size=32, max_size=32)
session_ids = st.binary(min_size=16, max_size=16)
uris = st.text(max_size=30)
ladder = st.sampled_from([Action.REDUCE, Action.SWITCH, Action.SELF_DECODE, Action.FAIL])


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


samplings = st.builds(
    Sampling,
    temperature_milli=maybe(uints),
    top_k=maybe(uints),
    top_p_milli=maybe(st.integers(0, 1000)),
    seed=maybe(uints),
)
contracts = st.builds(
    Contract,
    target=hash32,
    tokenizer=hash32,
    rule=uints,
    m_max=st.integers(0, 64),
    max_new=uints,
    stop=tokens,
    low_rounds=st.integers(1, 2**64 - 1),
    fallback=st.lists(ladder, min_size=1, max_size=5).map(tuple),
    drafters=maybe(st.lists(hash32, min_size=1, max_size=3).map(tuple)),
    sampling=maybe(samplings),
    low_ratio=maybe(percent),
    self_load=maybe(percent),
    self_max=maybe(uints),
    scope=maybe(session_ids),
)
prompts = tokens | uris
resumes = st.builds(
    Resume,
    round=uints,
    committed=uints,
    digest=hash32,
    committed_tokens=uris,
    target_kv=maybe(uris),
)
statuses = st.builds(
    Status,
    instance=uris,
    role=st.sampled_from(InstanceRole),
    load=percent,
    queue=uints,
    ttl_ms=uints,
    accept_milli=maybe(st.integers(0, 1000)),
    cache_mbps=maybe(uints),
    engine=maybe(uris),
    model=maybe(hash32),
    ready=maybe(st.booleans()),
    tokens_per_s=maybe(uints),
    rules=maybe(tokens),
    dropped=maybe(st.lists(session_ids, max_size=2).map(tuple)),
    vocab=maybe(uints),
)
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "contract": contracts,
    "status": statuses,
    "session-open": st.builds(
        SessionOpen,
        session=session_ids,
        epoch=uints,
        contract=contracts,
        prompt=prompts,
        commit_log=uris,
        prompt_kv=maybe(uris),
        resume=maybe(resumes),
        self_decode_after_ms=maybe(uints),
        logprobs=maybe(st.integers(0, 20)),
    ),
    "session-state": st.builds(
        SessionState,
        session=session_ids,
        epoch=uints,
        round=uints,
        committed=uints,
        digest=hash32,
        state=maybe(st.sampled_from(State) | st.integers(5, 300)),
    ),
    "assignment": st.builds(
        Assignment,
        session=session_ids,
        epoch=uints,
        contract=contracts,
        verifier=uris,
        drafter=uris,
        prompt=prompts,
        round=uints,
        committed=uints,
        digest=hash32,
        m_init=uints,
        sampling=maybe(samplings),
        committed_tokens=maybe(uris),
        vocab=maybe(uints),
    ),
    "proposal": st.builds(
        Proposal,
        session=session_ids,
        epoch=uints,
        round=uints,
        drafter=uris,
        base=uints,
        base_digest=hash32,
        tokens=st.lists(uints, min_size=1, max_size=8).map(tuple),
        status=statuses,
        q_rows=maybe(uris),
        draft_kv=maybe(uris),
    ),
    "verdict": st.builds(
        Verdict,
        session=session_ids,
        epoch=uints,
        round=uints,
        accepted=uints,
        emitted=tokens,
        committed=uints,
        digest=hash32,
        action=st.sampled_from(Action),
        m_cap=uints,
        low=uints,
        load=percent,
    ),
    "output": st.builds(
        Output,
        session=session_ids,
        epoch=uints,
        from_=uints,
        tokens=tokens,
        final=st.booleans(),
        finish=maybe(st.sampled_from(Action)),
    ),
    "event": st.builds(
        Event,
        session=session_ids,
        epoch=uints,
        kind=st.sampled_from(Action),
        committed=uints,
        digest=hash32,
    ),
    "policy": st.builds(Policy, session=session_ids, from_round=uints, sampling=samplings),
}
rules = pytest.mark.parametrize("rule", list(STRATEGIES))


def named(entries: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "entry", entries, ids=[e.get("name", e.get("rule")) for e in entries]
    )


def as_members(value: Any) -> Any:
    """The vectors' JSON form of a value: octets as h'..'."""
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    if isinstance(value, dict):
        return {key: as_members(member) for key, member in value.items()}
    if isinstance(value, list):
        return [as_members(member) for member in value]
    return value


def without_hints(value: Any, kind: type[Message]) -> Any:
    kept = {key: member for key, member in value.items() if key not in HINTS.get(kind, ())}
    if isinstance(kept.get("status"), dict):
        kept["status"] = without_hints(kept["status"], Status)
    return kept


def other_encoding(value: Any, rng: random.Random) -> bytes:
    """A valid encoding of a value with random key order, head widths, and chunking (D-E1)."""
    if isinstance(value, bool):
        return b"\xf5" if value else b"\xf4"
    if isinstance(value, int):
        return _head(0, int(value), rng)
    if isinstance(value, (bytes, str)):
        major = 3 if isinstance(value, str) else 2
        pieces = [value] if rng.random() < 0.6 else [value[:3], value[3:]]
        chunks = [p.encode() if isinstance(p, str) else p for p in pieces]
        octets = b"".join(_head(major, len(c), rng) + c for c in chunks)
        return octets if len(chunks) == 1 else bytes([major << 5 | 31]) + octets + b"\xff"
    pairs = list(value.items()) if isinstance(value, dict) else [(None, v) for v in value]
    major = 5 if isinstance(value, dict) else 4
    if major == 5:
        rng.shuffle(pairs)
    octets = b"".join(
        (other_encoding(k, rng) if major == 5 else b"") + other_encoding(v, rng) for k, v in pairs
    )
    if rng.random() < 0.5:
        return bytes([major << 5 | 31]) + octets + b"\xff"
    return _head(major, len(pairs), rng) + octets


def _head(major: int, n: int, rng: random.Random) -> bytes:
    widths = [w for w in (0, 1, 2, 4, 8) if n < (24 if w == 0 else 256**w)]
    width = rng.choice(widths)
    if width == 0:
        return bytes([major << 5 | n])
    return bytes([major << 5 | {1: 24, 2: 25, 4: 26, 8: 27}[width]]) + n.to_bytes(width, "big")


# ------------------------------------------------------------------------------ the vectors


@named(VECTORS["valid"])
def test_valid_messages_round_trip(entry: dict[str, Any]) -> None:
    """R-5.2-1, D-E1: decoded, and encoded again to the same core deterministic octets."""
    body = bytes.fromhex(entry["cbor"])
    message = codec.decode(KINDS[entry["rule"]], body)
    assert codec.encode(message) == body
    assert as_members(codec.decode_item(body)) == entry["members"]


@named(VECTORS["accept_and_ignore"])
def test_de3_unknown_keys_are_ignored(entry: dict[str, Any]) -> None:
    """R-5.2-2: an unknown key changes nothing that the message says."""
    kind = KINDS[entry["rule"]]
    message = codec.decode(kind, bytes.fromhex(entry["cbor"]))
    assert codec.decode(kind, codec.encode(message)) == message


@named(VECTORS["unknown_action_is_fail"])
def test_de4_unknown_action_is_fail(entry: dict[str, Any]) -> None:
    message: Any = codec.decode(KINDS[entry["rule"]], bytes.fromhex(entry["cbor"]))
    member = {"verdict": "action", "output": "finish", "event": "kind"}[entry["rule"]]
    assert getattr(message, member) is Action.FAIL


@named(VECTORS["malformed_proposal"])
def test_de2_malformed_proposal_is_400(entry: dict[str, Any]) -> None:
    with pytest.raises(Malformed) as raised:
        codec.decode(Proposal, bytes.fromhex(entry["cbor"]))
    assert raised.value.status == entry["status"]


@named(VECTORS["valid"])
def test_de2_truncation_at_every_octet_is_malformed(entry: dict[str, Any]) -> None:
    """Also where the contract is cut: octets that cannot be decoded are 400 (D-E2)."""
    body = bytes.fromhex(entry["cbor"])
    for end in range(len(body)):
        with pytest.raises(Malformed):
            codec.decode(KINDS[entry["rule"]], body[:end])


# ------------------------------------------------------------------------------- properties


@rules
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_round_trips(rule: str, data: st.DataObject) -> None:
    message = data.draw(STRATEGIES[rule])
    assert codec.decode(KINDS[rule], codec.encode(message)) == message


@rules
@settings(max_examples=30)
@given(data=st.data())
def test_de1_encoding_is_core_deterministic(rule: str, data: st.DataObject) -> None:
    """All keys are text below 24 octets, where cbor2's order and the core order agree."""
    body = codec.encode(data.draw(STRATEGIES[rule]))
    assert cbor2.dumps(cbor2.loads(body), canonical=True) == body


@rules
@settings(max_examples=30)
@given(data=st.data())
def test_encoding_satisfies_the_drafts_cddl(rule: str, data: st.DataObject) -> None:
    """R-5.2-1, with pycddl as an outside check; our hints are unknown keys there."""
    schema = _schema(rule)
    value = without_hints(cbor2.loads(codec.encode(data.draw(STRATEGIES[rule]))), KINDS[rule])
    schema.validate_cbor(cbor2.dumps(value))


_SCHEMAS: dict[str, Schema] = {}


def _schema(rule: str) -> Schema:
    if rule not in _SCHEMAS:
        _SCHEMAS[rule] = Schema(f"start = {rule}\n{CDDL}")
    return _SCHEMAS[rule]


@rules
@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_de1_every_valid_encoding_is_accepted(rule: str, data: st.DataObject, seed: int) -> None:
    message = data.draw(STRATEGIES[rule])
    body = other_encoding(cbor2.loads(codec.encode(message)), random.Random(seed))
    assert codec.decode(KINDS[rule], body) == message


@rules
@settings(max_examples=50)
@given(data=st.data())
def test_changed_octets_never_raise_anything_else(rule: str, data: st.DataObject) -> None:
    body = bytearray(codec.encode(data.draw(STRATEGIES[rule])))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode(KINDS[rule], bytes(body))
    except (Malformed, BadContract):
        return


# ------------------------------------------------------------------------------ single rules


def session_open(**changes: Any) -> dict[str, Any]:
    body = bytes.fromhex(VECTORS["valid"][0]["cbor"])
    members = {**cbor2.loads(body), **changes}
    return {key: member for key, member in members.items() if member is not ...}


def test_de7_missing_contract_is_400_and_a_wrong_one_is_422() -> None:
    with pytest.raises(Malformed):
        codec.decode(SessionOpen, cbor2.dumps(session_open(contract=...)))
    wrongs: list[object] = [[1], 1, None, {}, cbor2.CBORTag(1, {})]
    for wrong in wrongs:
        with pytest.raises(BadContract):
            codec.decode(SessionOpen, cbor2.dumps(session_open(contract=wrong)))


def test_de7_envelope_is_judged_before_the_contract() -> None:
    with pytest.raises(Malformed):
        codec.decode(SessionOpen, cbor2.dumps(session_open(contract={}, epoch=-1)))
    with pytest.raises(Malformed):
        codec.decode(SessionOpen, cbor2.dumps(session_open(contract={}, resume={})))


def spliced(members: dict[str, Any], **raw: bytes) -> bytes:
    """Encode a map with some values given as octets."""
    pairs = [cbor2.dumps(key) + cbor2.dumps(value) for key, value in members.items()]
    pairs += [cbor2.dumps(key) + octets for key, octets in raw.items()]
    return bytes([0xA0 + len(pairs)]) + b"".join(pairs)


TWICE = bytes.fromhex("a2616101616102")


def test_de2_a_key_twice_is_422_inside_the_contract_only() -> None:
    without = session_open(contract=...)
    with pytest.raises(BadContract):
        codec.decode(SessionOpen, spliced(without, contract=TWICE))
    with pytest.raises(Malformed):
        codec.decode(SessionOpen, spliced(without, contract=TWICE, other=TWICE))
    with pytest.raises(Malformed):
        codec.decode(SessionOpen, spliced(session_open(), contract=b"\xa0"))
    proposal = cbor2.loads(bytes.fromhex(VECTORS["valid"][5]["cbor"]))
    with pytest.raises(Malformed):
        codec.decode(Proposal, spliced(proposal, contract=TWICE))


def test_de2_octets_that_cannot_be_decoded_are_400_in_the_contract_too() -> None:
    for octets in (b"\x61\xff", b"\x1c", b"\x81" * 40 + b"\x00", b"\xff"):
        with pytest.raises(Malformed):
            codec.decode(SessionOpen, spliced(session_open(contract=...), contract=octets))


@pytest.mark.parametrize("key", sorted(HINTS[Status]))
def test_dz5_hints_of_another_type_count_as_absent(key: str) -> None:
    known = {"instance": "d", "role": 1, "load": 0, "queue": 0, "ttl_ms": 1}
    wrongs: list[object] = [None, -1, 1.0, [None], cbor2.CBORTag(9, 0)]
    wrongs += ["7"] * (key != "engine") + [True] * (key != "ready")
    for wrong in wrongs:
        status = codec.decode(Status, cbor2.dumps({**known, key: wrong}))
        assert getattr(status, key) is None


@pytest.mark.parametrize("value", [None, -1, 21, "many"])
def test_dz5_logprobs_out_of_range_count_as_absent(value: object) -> None:
    message = codec.decode(SessionOpen, cbor2.dumps(session_open(logprobs=value)))
    assert message.logprobs is None


def test_de9_absent_members_are_left_out() -> None:
    assert codec.encode(Sampling()) == b"\xa0"
    assert codec.decode(Sampling, b"\xa0") == Sampling()


def test_dh10_details_name_members_and_not_values() -> None:
    with pytest.raises(Malformed) as raised:
        codec.decode(SessionOpen, cbor2.dumps(session_open(prompt=[4711, "secret"])))
    assert "prompt" in raised.value.detail
    assert "4711" not in raised.value.detail and "secret" not in raised.value.detail


@given(tokens)
def test_dm4_token_objects_round_trip(value: tuple[int, ...]) -> None:
    body = codec.encode_tokens(value)
    assert body == cbor2.dumps(list(value))
    assert codec.decode_tokens(body) == value
    assert codec.decode_tokens(other_encoding(list(value), random.Random(len(body)))) == value


@pytest.mark.parametrize(
    "body", ["", "01", "a0", "8120", "81f5", "81c24101", "8161" + "31", "8101" + "00", "8201"]
)
def test_dm4_what_is_no_array_of_uint_is_malformed(body: str) -> None:
    with pytest.raises(Malformed):
        codec.decode_tokens(bytes.fromhex(body))


def test_items_and_sequences() -> None:
    header = {"format": "sdcp-kv-1", "tokens": 3}
    octets = codec.encode_item(header) + codec.encode_item(b"\x00" * 4)
    assert codec.decode_items(octets) == [header, b"\x00" * 4]
    assert codec.decode_items(b"") == []
    for wrong in (octets, b"", TWICE, octets[:-1]):
        with pytest.raises(Malformed):
            codec.decode_item(wrong)
