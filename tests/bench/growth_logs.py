"""What a commit log costs by its length: in its store alone, and to a session that runs."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask
from sdcpd.protocol.commit_log import CommitRecord, decode_log, encode_record, read_log
from tests.bench.growth_figures import described
from tests.bench.rounds import Running, begin, running
from tests.bench.rounds_served import M
from tests.kit.by_hand import wait_until
from tiers.api import LogContent
from tiers.lmdb_log import LmdbLogStore

RECORDS = (1, 10_000, 100_000)
SAMPLES = 200  # appends at each length, whose median counts
MIB = 1 << 20
LOG = "0" * 22
ROUND_TOKENS = M + 1
REACHED_S = 1200.0
TAKEN_UP_S = 120.0


def record(number: int) -> bytes:
    """A round of four drafted tokens and one more."""
    emitted = tuple(range(100, 100 + ROUND_TOKENS))
    digest = number.to_bytes(32, "big")
    one = CommitRecord(
        epoch=1, round=number, emitted=emitted, committed=ROUND_TOKENS * number, digest=digest
    )
    return encode_record(one)


async def grown(store: LmdbLogStore, from_: int, to: int, etag: str | None) -> tuple[str, float]:
    """Append the records between, one by one; the log's tag, and the median seconds of the last."""
    times = []
    for number in range(from_ + 1, to + 1):
        octets = record(number)
        begun = time.perf_counter()
        etag = await store.append(LOG, octets, offset=None, if_match=etag, create=etag is None)
        times.append(time.perf_counter() - begun)
    assert etag is not None, "at least one is appended"
    return etag, statistics.median(times[-SAMPLES:])


def spent_s(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


async def stored(folder: Path, lengths: Sequence[int]) -> list[dict[str, float]]:
    """Figures of the store alone, by length."""
    path = folder / "logs"
    store = LmdbLogStore(path, map_bytes=1 << 30)
    found: list[dict[str, float]] = []
    written, etag = 0, None
    for length in lengths:
        etag, append_s = await grown(store, written, max(length, written + SAMPLES), etag)
        written = max(length, written + SAMPLES)
        begun = time.perf_counter()
        content = await store.read(LOG)
        read_s = time.perf_counter() - begun
        assert isinstance(content, LogContent), "it was just written"
        parse_s = spent_s(lambda octets=content.data: read_log(decode_log(octets)))  # type: ignore[misc]
        await store.aclose()
        disk = sum(one.stat().st_blocks * 512 for one in path.iterdir() if one.suffix == ".mdb")
        begun = time.perf_counter()
        store = LmdbLogStore(path, map_bytes=1 << 30)
        open_s = time.perf_counter() - begun
        row = {"records": written, "append_s": append_s, "read_s": read_s, "parse_s": parse_s}
        found.append(row | {"open_s": open_s, "octets": len(content.data), "disk_octets": disk})
    await store.aclose()
    return found


# ---- a session with such a log


def _session(cluster: Running) -> dict[str, Any]:
    """The one session, as its router tells it; empty where it does not."""
    try:
        sessions = ask(cluster.admin, "GET", "/status", timeout_s=30.0)["sessions"]
    except (AdminRefused, AdminUnreachable):
        return {}
    return dict(sessions[0]) if sessions else {}


def _committed(cluster: Running) -> int:
    """By the verifier: the router learns of it by reading only."""
    try:
        socket = cluster.folder / "verifier.sock"
        sessions = ask(socket, "GET", "/status", timeout_s=30.0)["sessions"]
    except (AdminRefused, AdminUnreachable):
        return 0
    return max((int(one["committed"]) for one in sessions if not one["fenced"]), default=0)


def _again(cluster: Running, role: str) -> float:
    """Kill a process and start it; seconds from its start until the session commits again."""
    before = _committed(cluster)
    cluster.kill(role)
    begun = time.monotonic()
    cluster.start(role)
    wait_until(lambda: _session(cluster).get("phase") == "running", role, timeout_s=TAKEN_UP_S)
    at = max(before, _committed(cluster))
    wait_until(lambda: _committed(cluster) > at, "it commits again", timeout_s=TAKEN_UP_S)
    return time.monotonic() - begun


def served(lengths: Sequence[int], seconds: float) -> list[dict[str, float]]:
    """Figures of a session through real processes, by the length of its log."""
    found: list[dict[str, float]] = []
    with running() as cluster:
        text = threading.Thread(target=begin, args=(cluster.admin, 0))
        text.start()
        for length in lengths:
            wait_until(
                lambda reached=ROUND_TOKENS * length: _committed(cluster) >= reached,  # type: ignore[misc]
                f"{length} records",
                timeout_s=REACHED_S,
            )
            records = _committed(cluster) // ROUND_TOKENS
            rounds = sorted(cluster.measured(seconds)["drafter"]["rounds"])
            row: dict[str, float] = {"records": records}
            row["round_p50_ms"] = 1000 * statistics.median(rounds)
            row["router_restart_s"] = _again(cluster, "router")
            row["verifier_restart_s"] = _again(cluster, "verifier")
            found.append(row)
        text.join()
    return found


def measure(lengths: Sequence[int] = RECORDS, seconds: float = 3.0) -> dict[str, Any]:
    """Both parts; a session's first length is where its estimates have settled."""
    with tempfile.TemporaryDirectory() as folder:
        alone = asyncio.run(stored(Path(folder), lengths))
    return {"store": alone, "session": served(lengths, seconds)}


def table(found: dict[str, Any]) -> list[list[str]]:
    """Cells by row, the head first: of the store, and of the session."""
    rows = [["records", "append ms", "read ms", "parse ms", "open store ms", "log MiB", "disk MiB"]]
    for one in found["store"]:
        times = [one[name] for name in ("append_s", "read_s", "parse_s", "open_s")]
        row = [f"{one['records']:,}", *(f"{1000 * value:.2f}" for value in times)]
        rows.append([*row, *(f"{one[name] / MIB:.2f}" for name in ("octets", "disk_octets"))])
    return rows


def session_table(found: dict[str, Any]) -> list[list[str]]:
    """Cells by row of the session alone."""
    rows = [["records", "round p50 ms", "router killed: s to go on", "verifier killed: s to go on"]]
    for one in found["session"]:
        times = (one["round_p50_ms"], one["router_restart_s"], one["verifier_restart_s"])
        rows.append([f"{one['records']:,}", *(f"{value:.2f}" for value in times)])
    return rows


STORE_LINES = (
    ("append_s", 1000.0, "ms", "The time of an append"),
    ("read_s", 1000.0, "ms", "Reading the whole log"),
    ("parse_s", 1000.0, "ms", "Parsing what was read, which a failover adds,"),
    ("open_s", 1000.0, "ms", "Opening the store again"),
    ("disk_octets", 1 / MIB, "MiB", "The disk that it takes"),
)
SESSION_LINES = (
    ("round_p50_ms", 1.0, "ms", "The p50 of a session's round"),
    ("router_restart_s", 1.0, "s", "From the start of a killed router until the session goes on"),
    ("verifier_restart_s", 1.0, "s", "From the start of a killed verifier until it goes on"),
)


def sentences(found: dict[str, Any]) -> list[str]:
    """What grows how with the log."""
    said = []
    for part, lines in (("store", STORE_LINES), ("session", SESSION_LINES)):
        lengths = [one["records"] for one in found[part]]
        for name, times, unit, what in lines:
            values = [times * one[name] for one in found[part]]
            said.append(f"{what} {described(lengths, values, unit, 'record')}.")
    return said
