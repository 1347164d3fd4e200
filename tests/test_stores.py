"""What a process keeps: trouble with it is told by the instance whose it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdcpd.config import Config
from sdcpd.parts import Instance, Parts
from sdcpd.protocol.commit_log import FenceRecord, encode_record
from sdcpd.stores import Stores
from tests.kit.full_logs import filled
from tiers.api import StoreFull
from tiers.lmdb_log import LmdbLogStore
from tiers.watched import WatchedLogs, WatchedRecords


async def test_a_routers_full_logs_are_its_trouble_and_say_where_they_are(tmp_path: Path) -> None:
    mlc = {"log_path": str(tmp_path / "{instance}"), "log_size": "1MiB"}
    parts = Parts(Config.model_validate({"mlc": mlc}))
    router, other = Instance("router", "r0"), Instance("verifier", "v0")
    async with parts.stack:
        stores = Stores(parts)
        logs = await stores.logs(router)
        assert isinstance(logs, WatchedLogs) and isinstance(logs._store, LmdbLogStore)
        await filled(logs._store)
        record = encode_record(FenceRecord(epoch=1))
        with pytest.raises(StoreFull):
            await logs.append("a", record, offset=None, if_match=None, create=True)
        (reason,) = parts.health(router).reasons
        assert reason == (
            f"the commit logs in {tmp_path}/router cannot be used, and no text is written without "
            "them: the commit logs have no room for another record; see that disk and [mlc] log_size"
        )
        assert parts.health(other).ready
        sessions, _ = await stores.records(router)
        assert isinstance(sessions, WatchedRecords)
        assert stores.cache_check() is None, "there is none yet"
