"""A router's commit logs at its admin socket: `sdcpctl log` asks for these."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sdcpd.admin_logs import LogsAdmin, LogsRefused
from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, Record, decode_log, encode_record
from sdcpd.protocol.digest import extend
from sdcpd.protocol.log_check import log_faults
from tiers.api import Fenced
from tiers.build import open_logs
from tiers.lmdb_log import LmdbLogStore

SESSION = "AAECAwQFBgcICQoLDA0ODw"


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[LmdbLogStore]:
    store = open_logs(tmp_path, 1 << 20)
    yield store
    await store.aclose()


def commits(*emitted: tuple[int, ...], epoch: int = 1) -> list[Record]:
    """Rounds one after the other, as a verifier writes them."""
    digest, made, committed = bytes(32), list[Record](), 0
    for number, tokens in enumerate(emitted, 1):
        digest, committed = extend(digest, tokens), committed + len(tokens)
        made.append(
            CommitRecord(
                epoch=epoch, round=number, emitted=tokens, committed=committed, digest=digest
            )
        )
    return made


async def written(logs: LmdbLogStore, records: list[Record]) -> str:
    data = b"".join(map(encode_record, records))
    return await logs.put(SESSION, data, if_match=None, if_none_match=True)


async def test_a_log_is_shown_without_its_tokens_unless_asked(logs: LmdbLogStore) -> None:
    """D-M12: what was generated is nobody's business who looks after the service."""
    await written(logs, [*commits((5, 6), (7,)), FenceRecord(epoch=2)])
    admin = LogsAdmin(logs)
    shown = await admin.show({"session": SESSION})
    assert [one["kind"] for one in shown["records"]] == ["commit", "commit", "fence"]
    assert (shown["epoch"], shown["round"], shown["committed"]) == (2, 2, 3)
    assert "tokens" not in shown["records"][0]
    whole = await admin.show({"session": SESSION, "tokens": True})
    assert [one.get("tokens") for one in whole["records"]] == [[5, 6], [7], None]


async def test_a_good_log_holds_together(logs: LmdbLogStore) -> None:
    await written(logs, [*commits((5, 6), (7,)), FenceRecord(epoch=2)])
    assert (await LogsAdmin(logs).verify({"session": SESSION}))["faults"] == []


GOOD = commits((5, 6), (7,), (8, 9))


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([GOOD[0], GOOD[2]], "has round 3 after 1"),
        ([GOOD[0], GOOD[0]], "has round 1 after 1"),
        ([*commits((5, 6)), *commits((5, 6), (8,))[1:]], None),
        ([GOOD[0], *commits((5, 9), (7,))[1:]], "digest that its tokens do not give"),
        ([GOOD[0], FenceRecord(epoch=3), FenceRecord(epoch=3)], "fence that raises no epoch: 3"),
        ([FenceRecord(epoch=3), GOOD[0]], "has epoch 1 after 3: void"),
        ([*commits((5,), ())], "commits no token"),
        ([*GOOD[:1], *commits((5, 6, 6), (7,))[1:]], "4 committed after 2 and 1 emitted"),
    ],
)
def test_what_no_writer_could_have_written_is_found(
    records: list[Record], fault: str | None
) -> None:
    faults = log_faults(records)
    assert faults == [] if fault is None else any(fault in one for one in faults), faults


async def test_a_fence_ends_the_writers_authority(logs: LmdbLogStore) -> None:
    await written(logs, commits((5, 6)))
    assert (await LogsAdmin(logs).fence({"session": SESSION}))["epoch"] == 2
    content = await logs.read(SESSION)
    assert content is not None and decode_log(content.data)[-1] == FenceRecord(epoch=2)
    late = encode_record(commits((5, 6), (7,))[1])
    with pytest.raises(Fenced):
        await logs.append(SESSION, late, offset=None, if_match=content.etag)


@pytest.mark.parametrize("session", [None, 5, "", "x", "../etc", SESSION[:-1] + "x"])
async def test_what_is_no_session_is_said(logs: LmdbLogStore, session: object) -> None:
    for resource in LogsAdmin(logs).resources.values():
        with pytest.raises(LogsRefused, match=r"no session id|there is no log"):
            await resource({"session": session})
