"""The commit log: Section 6.8, D-M5, D-M6, D-M8."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol import commit_log
from sdcpd.protocol.commit_log import (
    CommitRecord,
    FenceRecord,
    LogCorrupt,
    Record,
    decode_log,
    encode_record,
    read_log,
)

CASES = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())["commit_log"]["cases"]
uints = st.integers(0, 2**64 - 1)
commits = st.builds(
    CommitRecord,
    epoch=st.integers(0, 4),
    round=uints,
    emitted=st.lists(uints, max_size=5).map(tuple),
    committed=uints,
    digest=st.binary(min_size=32, max_size=32),
)
records: st.SearchStrategy[Record] = commits | st.builds(FenceRecord, epoch=st.integers(0, 4))


def record(members: dict[str, Any]) -> Record:
    if "round" not in members:
        return FenceRecord(**members)
    digest = bytes.fromhex(members["digest"][2:-1])
    return CommitRecord(**{**members, "emitted": tuple(members["emitted"]), "digest": digest})


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_commit_log_vectors(case: dict[str, Any]) -> None:
    """R-6.8-2, D-M8: a record of a lower epoch is void, wherever it stands."""
    expected = [record(members) for members in case["records"]]
    assert b"".join(map(encode_record, expected)).hex() == case["object"]
    found = decode_log(bytes.fromhex(case["object"]))
    assert found == expected
    summary = read_log(found)
    assert summary.highest_epoch == case["highest_epoch"]
    assert summary.records == tuple(expected)
    assert list(summary.commits) == [expected[k] for k in case["valid_commits"]]
    assert list(summary.tokens) == case["committed_tokens"]
    last = summary.last_valid
    assert case["last"] == (
        last and {"round": last.round, "committed": last.committed, "digest": last.digest.hex()}
    )


@given(st.lists(records, max_size=6))
def test_logs_round_trip(log: list[Record]) -> None:
    assert decode_log(b"".join(map(encode_record, log))) == log


@given(st.lists(records, max_size=8), st.integers(5, 9))
def test_dm8_nothing_of_a_lower_epoch_counts_after_a_fence(log: list[Record], epoch: int) -> None:
    before = read_log(log)
    after = read_log([*log, FenceRecord(epoch=epoch), *log])
    assert after.highest_epoch == epoch
    assert (after.commits, after.tokens) == (before.commits, before.tokens)


@given(st.lists(records, min_size=1, max_size=3), st.data())
def test_dm6_a_torn_log_is_corrupt(log: list[Record], data: st.DataObject) -> None:
    octets = b"".join(map(encode_record, log))
    last = len(encode_record(log[-1]))
    cut = data.draw(st.integers(1, last - 1))
    with pytest.raises(LogCorrupt):
        decode_log(octets[:-cut])


COMMIT = {"epoch": 1, "round": 1, "emitted": [5], "committed": 1, "digest": bytes(32)}


def test_dm5_unknown_keys_are_ignored() -> None:
    found = decode_log(cbor2.dumps({**COMMIT, "writer": 1.5}) + cbor2.dumps({"epoch": 2, 7: None}))
    assert [type(entry) for entry in found] == [CommitRecord, FenceRecord]


@pytest.mark.parametrize(
    "octets",
    [
        cbor2.dumps(5),
        cbor2.dumps({}),
        cbor2.dumps([1]),
        cbor2.dumps({"epoch": True}),
        cbor2.dumps({"epoch": -1}),
        cbor2.dumps({**COMMIT, "digest": bytes(31)}),
        cbor2.dumps({**COMMIT, "emitted": [1.0]}),
        cbor2.dumps({key: COMMIT[key] for key in COMMIT if key != "committed"}),
        bytes.fromhex("a26565706f6368016565706f636802"),
        b"\xff",
    ],
)
def test_dm6_what_is_no_record_is_corrupt(octets: bytes) -> None:
    with pytest.raises(LogCorrupt, match="record 1"):
        decode_log(encode_record(FenceRecord(epoch=1)) + octets)


@given(st.data())
def test_the_short_way_through_a_commit_reads_what_the_long_one_reads(data: st.DataObject) -> None:
    """Of our own encoding with an octet changed, added or lost; also counts that are wrong."""
    record = data.draw(commits)
    octets = bytearray(encode_record(record))
    assert decode_log(bytes(octets)) == [record]
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(octets) - 1))
        match data.draw(st.sampled_from(["change", "add", "lose", "count"])):
            case "change":
                octets[at] = data.draw(st.integers(0, 255))
            case "add":
                octets.insert(at, data.draw(st.integers(0, 255)))
            case "lose" if len(octets) > 1:
                del octets[at]
            case "count":
                place = bytes(octets).find(b"emitted") + 7
                octets[place % len(octets)] = 0x80 + data.draw(st.integers(0, 0x18))

    before, after = (encode_record(data.draw(commits)) for _ in range(2))
    alone = data.draw(st.booleans())
    log = bytes(octets) if alone else before + bytes(octets) + after

    def read() -> list[Record] | str:
        try:
            return decode_log(log)
        except LogCorrupt as error:
            return str(error)

    short = read()
    with patch.object(commit_log, "_own_commit", lambda *_: None):
        assert read() == short
