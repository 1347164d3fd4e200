"""What a power cut can leave of a commit, and files that have lost more than that (D-M6).

LMDB writes the pages of a commit, flushes, and then writes one of the two meta pages. A cut in
between leaves any of the pages, in whatever order the disk took them, and the meta page or not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdcpd.protocol.commit_log import CommitRecord, encode_record
from tiers.api import LogAppend, TierError
from tiers.build import open_logs
from tiers.lmdb_log import LmdbLogStore
from tiers.lmdb_records import LmdbRecords

PAGE_BYTES = 4096
METAS = (0, 1)
LOGS = [f"log-{number}" for number in range(12)]
Logs = dict[str, bytes]


def record(number: int) -> bytes:
    tokens = tuple(range(number % 7 + 1))
    return encode_record(
        CommitRecord(epoch=1, round=number, emitted=tokens, committed=number, digest=bytes(32))
    )


class Disk:
    """The file of a log store whose pages a test can lose."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "data.mdb"

    @property
    def octets(self) -> bytes:
        return self._file.read_bytes()

    def hold(self, octets: bytes) -> None:
        """As after the power is back."""
        self._file.write_bytes(octets)

    async def read(self) -> Logs:
        """What a router that starts now finds."""
        store = open_logs(self.folder, 1 << 22)
        found = await contents(store)
        await store.aclose()
        return found


async def contents(store: LmdbLogStore) -> Logs:
    found = {}
    for entry in await store.entries(count_max=1000):
        content = await store.read(entry.log_id)
        assert content is not None
        found[entry.log_id] = content.data
    return found


async def append(store: LmdbLogStore, names: list[str], number: int, *, times: int = 1) -> None:
    """One group commit."""
    heads = [await store.head(name) for name in names]
    outcomes = await store.append_many(
        [
            LogAppend(
                log_id=name,
                record_bytes=record(number) * times,
                if_match=head.etag if head else None,
                create=head is None,
            )
            for name, head in zip(names, heads, strict=True)
        ]
    )
    assert all(isinstance(outcome, str) for outcome in outcomes)


async def used_store(folder: Path) -> LmdbLogStore:
    """One in which pages have been freed and taken again, with records that fill pages."""
    store = open_logs(folder, 1 << 22)
    for number in range(30):
        await append(store, LOGS, number, times=40 if number % 10 == 0 else 1)
        if number % 9 == 5:
            await store.delete(LOGS[number % len(LOGS)])
    return store


async def last_commit(folder: Path, last: list[str]) -> tuple[bytes, Logs, bytes, Logs]:
    """The file and the logs before and after one more group."""
    store = await used_store(folder)
    before, known = Disk(folder).octets, await contents(store)
    await append(store, last, 30)
    after, more = Disk(folder).octets, await contents(store)
    await store.aclose()
    return before, known, after, more


def pages_of(octets: bytes) -> list[bytes]:
    assert len(octets) % PAGE_BYTES == 0
    return [octets[start : start + PAGE_BYTES] for start in range(0, len(octets), PAGE_BYTES)]


def changed(before: bytes, after: bytes) -> tuple[list[int], int]:
    """The pages that a commit wrote, and which of the two meta pages."""
    old, new = pages_of(before), pages_of(after)
    numbers = [n for n in range(len(new)) if n >= len(old) or old[n] != new[n]]
    (meta,) = set(numbers) & set(METAS)
    return [n for n in numbers if n not in METAS], meta


def arrived(before: bytes, after: bytes, numbers: tuple[int, ...]) -> bytes:
    """The file before the commit with some of its pages; those between are holes."""
    octets = bytearray(before)
    for number in numbers:
        start = number * PAGE_BYTES
        octets.extend(bytes(max(0, start + PAGE_BYTES - len(octets))))
        octets[start : start + PAGE_BYTES] = after[start : start + PAGE_BYTES]
    return bytes(octets)


def subsets(pages: list[int], *, at_most: int) -> Iterator[tuple[int, ...]]:
    """All of them if they are few; otherwise prefixes, single pages and random ones."""
    if 2 ** len(pages) <= at_most:
        for count in range(len(pages) + 1):
            yield from itertools.combinations(pages, count)
        return
    yield from (tuple(pages[:count]) for count in range(len(pages) + 1))
    yield from ((page,) for page in pages)
    seed = random.Random(7)
    for _ in range(at_most - 2 * len(pages) - 1):
        yield tuple(page for page in pages if seed.random() < 0.5)


@pytest.mark.parametrize("last", [LOGS[:1], [*LOGS, *(f"new-{n}" for n in range(60))]])
async def test_acknowledged_records_survive_a_torn_commit(tmp_path: Path, last: list[str]) -> None:
    before, known, after, more = await last_commit(tmp_path, last)
    assert set(more) == set(known) | set(last) and more != known
    pages, meta = changed(before, after)
    disk, count = Disk(tmp_path), 0
    for numbers in subsets(pages, at_most=140):
        disk.hold(arrived(before, after, numbers))
        assert await disk.read() == known, f"with pages {numbers} of {pages}"
        count += 1
    assert count >= 30
    disk.hold(arrived(before, after, (*pages, meta)))
    assert await disk.read() == more
    # All pages, and of the two meta pages the one before.
    disk.hold(arrived(after, before, (meta,)))
    assert await disk.read() == known


async def test_the_store_goes_on_after_a_torn_commit(tmp_path: Path) -> None:
    """Over the pages that were left of it, and what it writes then is as safe."""
    before, _, after, more = await last_commit(tmp_path, LOGS[:3])
    pages, _ = changed(before, after)
    Disk(tmp_path).hold(arrived(before, after, tuple(pages[::2])))
    store = open_logs(tmp_path, 1 << 22)
    await append(store, LOGS[:3], 30)
    assert await contents(store) == more
    await store.aclose()


async def test_a_file_that_lost_its_end_is_refused_or_lacks_nothing(tmp_path: Path) -> None:
    """At every page, and within one: never a guess, never a signal that kills the process."""
    store = await used_store(tmp_path)
    known = await contents(store)
    await store.aclose()
    disk, refused = Disk(tmp_path), 0
    whole = disk.octets
    cuts = [cut for page in range(len(whole) // PAGE_BYTES) for cut in (0, 100 + page)]
    for number, within in enumerate(cuts):
        octets = whole[: number // 2 * PAGE_BYTES + within]
        disk.hold(octets)
        try:
            assert await disk.read() == known
        except TierError as error:
            refused += 1
            assert disk.octets == octets, "left as it was"
            said_clearly(str(error), tmp_path)
    assert refused > len(cuts) // 2
    disk.hold(whole)
    assert await disk.read() == known


@pytest.mark.parametrize("page", METAS)
@pytest.mark.parametrize("octets", [bytes(PAGE_BYTES), b"\x55" * PAGE_BYTES])
async def test_an_overwritten_meta_page_is_refused(
    tmp_path: Path, page: int, octets: bytes
) -> None:
    """A disk writes it whole or not at all: it is no more than 512 octets."""
    await (await used_store(tmp_path)).aclose()
    disk = Disk(tmp_path)
    damaged = bytearray(disk.octets)
    damaged[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = octets
    disk.hold(damaged)
    with pytest.raises(TierError) as caught:
        open_logs(tmp_path, 1 << 22)
    said_clearly(str(caught.value), tmp_path)
    assert disk.octets == damaged


@pytest.mark.parametrize("how", ["gone", "empty", "text"])
def test_what_is_no_longer_a_database_is_not_begun_anew(tmp_path: Path, how: str) -> None:
    open_logs(tmp_path / "logs", 1 << 20).close()
    LmdbRecords(tmp_path / "records", map_bytes=1 << 20, setting="[mlc] log_path").close()
    for folder in (tmp_path / "logs", tmp_path / "records"):
        file = folder / "data.mdb"
        file.unlink()
        if how != "gone":
            file.write_bytes(b"" if how == "empty" else b"not what was here before\n" * 1000)
        with pytest.raises(TierError) as caught:
            if folder.name == "logs":
                open_logs(folder, 1 << 20)
            else:
                LmdbRecords(folder, map_bytes=1 << 20, setting="[mlc] log_path")
        said_clearly(str(caught.value), folder)
        assert file.exists() == (how != "gone")


def said_clearly(text: str, folder: Path) -> None:
    assert f"at {folder} are damaged (" in text
    assert "restore the directory from a backup, or move it away to begin anew" in text
    assert "\n" not in text and text.count(str(folder)) == 1
