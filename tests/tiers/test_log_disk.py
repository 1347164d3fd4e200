"""The disk of the commit logs: one that is full for a while, and whether what is told is there."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import lmdb
import pytest

from sdcpd.protocol.commit_log import CommitRecord, encode_record
from tiers.api import LogError, StoreFailed, StoreFull
from tiers.build import open_logs
from tiers.disk_room import SPARE_BYTES, SPARE_FILE, Spare, is_full

LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from tests.tiers.test_log_disk import fill, record
from tiers.build import open_logs

async def main():
    folder = Path(sys.argv[1])
    store = open_logs(folder, 1 << 30)
    tag = await store.append("a", record(1), offset=None, if_match=None, create=True)
    size = (folder / "data.mdb").stat().st_size
    hard = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40960, hard))
    count, tag, refusal = await fill(store, tag)
    assert (await store.head("a")).etag == tag, "reading goes on"
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    tag = await store.append("a", record(count), offset=None, if_match=tag)
    await store.aclose()
    print(type(refusal).__name__, count, (await open_logs(folder, 1 << 30).head("a")).etag == tag)

asyncio.run(main())
"""


def record(number: int) -> bytes:
    """Of a round of many tokens."""
    return encode_record(
        CommitRecord(
            epoch=1,
            round=number,
            emitted=tuple(range(200)),
            committed=200 * number,
            digest=bytes(32),
        )
    )


async def fill(store: object, tag: str) -> tuple[int, str, LogError]:
    """Append until it is refused: by which record, the last tag, and why."""
    for count in range(2, 5000):
        try:
            tag = await store.append("a", record(count), offset=None, if_match=tag)  # type: ignore[attr-defined]
        except LogError as refusal:
            return count, tag, refusal
    raise AssertionError("there was room for all")


def test_a_full_disk_is_told_and_over_when_there_is_room_again(tmp_path: Path) -> None:
    """What was acknowledged is there, nothing else, and no restart is needed."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "logs")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    kind, count, same = (done.stdout or "none 0 False").split()
    assert (kind, same) == ("StoreFull", "True"), done.stdout + done.stderr
    assert int(count) > 3


def failing(code: int) -> lmdb.Error:
    error = lmdb.Error("mdb_txn_commit: failed")
    error.code = code  # type: ignore[attr-defined]
    return error


def test_an_error_of_the_disk_is_no_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_full(failing(errno.ENOSPC), tmp_path) and is_full(failing(errno.EDQUOT), tmp_path)
    assert not is_full(failing(errno.EIO), tmp_path), "the probe finds room"
    assert list(tmp_path.iterdir()) == []

    def no_room(_: int) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "urandom", no_room)
    assert is_full(failing(errno.EIO), tmp_path) and not is_full(failing(errno.EINVAL), tmp_path)


async def test_a_disk_that_failed_takes_nothing_more_and_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_logs(tmp_path, 1 << 20)
    tag = await store.append("a", record(1), offset=None, if_match=None, create=True)

    def broken(*_: object, **__: object) -> object:
        raise lmdb.DiskError("mdb_txn_commit: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("tiers.lmdb_log.is_full", lambda *_: False)
        patch.setattr(store, "_outcome", broken)
        with pytest.raises(StoreFailed, match="the disk of the commit logs failed"):
            await store.append("a", record(2), offset=None, if_match=tag)
    with pytest.raises(StoreFailed):
        await store.append("a", record(2), offset=None, if_match=tag)
    head = await store.head("a")
    assert head is not None and head.etag == tag
    await store.aclose()


@pytest.mark.parametrize("what", ["logs", "records"])
def test_what_is_acknowledged_was_flushed(tmp_path: Path, what: str) -> None:
    """Told by the kernel's trace of system calls, or by counting in a library loaded before."""
    library = tmp_path / "flushes.so"
    source = Path(__file__).parents[1] / "kit" / "flushes.c"
    if subprocess.run(["cc", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no C compiler is installed")
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", FLUSHED[what], str(tmp_path / what), str(library)],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert [int(one) for one in done.stdout.split()] >= [2, 2, 2], "data, then what names it"


FLUSHED = {
    "logs": """
import asyncio, ctypes, sys
from pathlib import Path
from tests.tiers.test_log_disk import record
from tiers.build import open_logs

async def main():
    flushes = ctypes.CDLL(sys.argv[2]).flushes
    store = open_logs(Path(sys.argv[1]), 1 << 20)
    tag, found = None, []
    for number in range(1, 4):
        before = flushes()
        tag = await store.append("a", record(number), offset=None, if_match=tag, create=tag is None)
        found.append(flushes() - before)
    print(*found)
    await store.aclose()

asyncio.run(main())
""",
    "records": """
import asyncio, ctypes, sys
from pathlib import Path
from tiers.lmdb_records import LmdbRecords

async def main():
    flushes = ctypes.CDLL(sys.argv[2]).flushes
    store = LmdbRecords(Path(sys.argv[1]), map_bytes=1 << 20, setting="x")
    found = []
    for number in range(3):
        before = flushes()
        await store.put(b"key", bytes([number]))
        found.append(flushes() - before)
    print(*found)
    await store.aclose()

asyncio.run(main())
""",
}


SPARED = """
import os, resource, sys
from pathlib import Path
from tiers.disk_room import Spare

resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, resource.RLIM_INFINITY))
Spare(Path(sys.argv[1])).keep()
"""


def test_room_is_kept_for_deletions_as_much_as_there_is(tmp_path: Path) -> None:
    spare, file = Spare(tmp_path), tmp_path / SPARE_FILE
    assert not spare.give(), "there is none yet"
    nowhere = Spare(tmp_path / "none")
    nowhere.keep()
    assert not nowhere.give(), "without room for the file itself the logs go on"
    subprocess.run([sys.executable, "-c", SPARED, str(tmp_path)], check=True, timeout=60)
    assert file.stat().st_size == 256 << 10
    spare.keep()
    assert file.stat().st_size == 256 << 10, "what is held stays"
    assert spare.give() and file.stat().st_size == 0 and not spare.give()
    spare.keep()
    assert file.stat().st_size == file.stat().st_blocks * 512 == SPARE_BYTES


async def test_a_deletion_on_a_full_disk_takes_the_room_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_logs(tmp_path, 1 << 20)
    tag = await store.append("a", record(1), offset=None, if_match=None, create=True)
    file, begin = tmp_path / SPARE_FILE, store._env.begin

    def begins(**kind: bool) -> lmdb.Transaction:
        if kind.get("write") and file.stat().st_size:
            raise failing(errno.ENOSPC)
        return begin(**kind)

    environment = mock.Mock(wraps=store._env, begin=begins)
    monkeypatch.setattr(store, "_env", environment)
    with pytest.raises(StoreFull):
        await store.append("a", record(2), offset=None, if_match=tag)
    await store.delete("a")
    assert file.stat().st_size == SPARE_BYTES, "it is kept again"
    monkeypatch.undo()
    assert await store.read("a") is None
    await store.aclose()


async def test_logs_that_fill_their_map_can_be_deleted(tmp_path: Path) -> None:
    """LMDB copies the pages that a deletion changes: some are left to it."""
    store = open_logs(tmp_path, 300_000)
    for number in range(8):
        await store.append(f"l{number}", record(1), offset=None, if_match=None, create=True)
    tag = await store.append("a", record(1), offset=None, if_match=None, create=True)
    count, tag, refusal = await fill(store, tag)
    assert isinstance(refusal, StoreFull) and count > 50
    for number in range(8):
        await store.delete(f"l{number}")
    with pytest.raises(StoreFull):
        await fill_all(store, tag)
    await store.delete("a")
    await store.append("b", record(1), offset=None, if_match=None, create=True)
    await store.aclose()


async def fill_all(store: object, tag: str) -> None:
    """Append until it is refused, and raise that."""
    _, _, refusal = await fill(store, tag)
    raise refusal


FULL = """
import resource, sys
from pathlib import Path
from tiers.api import TierError
from tiers.build import open_logs

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    open_logs(Path(sys.argv[1]), 1 << 30)
except TierError as error:
    print(error)
"""


def test_a_disk_that_is_full_from_the_start_is_told(tmp_path: Path) -> None:
    """LMDB would map its table of readers over a hole, and die of SIGBUS at the first reader."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "logs")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.count("\n") == 1 and "cannot be opened" in done.stdout
    assert "No space left on device" in done.stdout and "[mlc] log_path" in done.stdout
