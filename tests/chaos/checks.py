"""What must hold at the end: logs against texts, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from sdcpd.admin_client import fetch
from sdcpd.engine.tokenizer import TextModel
from sdcpd.protocol.commit_log import FenceRecord, LogSummary, decode_log, read_log
from sdcpd.transport.client import HttpClient
from sdcpd.transport.tls import TlsIdentity
from tests.chaos.client import Stream
from tests.chaos.cluster import ROUTER, Cluster
from tests.chaos.instances import Process
from tests.chaos.texts import Text, Undisturbed

SETTLE_S = 60.0


@dataclass
class Logs:
    """What the logs of all streams came to."""

    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    """Tokens that were compared."""
    failovers: int = 0
    """Sessions that ended under another epoch than they began."""


async def check_logs(
    cluster: Cluster,
    streams: Iterable[Stream],
    known: dict[Text, Undisturbed],
    text: TextModel,
) -> Logs:
    """Every log holds what its client saw, a record a round, under rising epochs."""
    crt = cluster.pki / "verifier.v0.crt"
    client = HttpClient(
        TlsIdentity(ca=cluster.pki / "ca.crt", cert=crt, key=crt.with_suffix(".key"))
    )
    found = Logs()
    try:
        for stream in streams:
            uri = f"{cluster.base(ROUTER)}logs/{stream.session}"
            response = await client.request("GET", uri, timeout_s=30.0)
            if response.status != 200:
                found.wrong.append(f"session {stream.session}: its log: {response.status}")
                continue
            log = read_log(decode_log(response.body))
            found.tokens += len(log.tokens)
            found.failovers += log.highest_epoch > 1
            found.wrong += [
                f"session {stream.session}: {one}" for one in _wrong(log, stream, known, text)
            ]
    finally:
        await client.aclose()
    return found


def _wrong(
    log: LogSummary, stream: Stream, known: dict[Text, Undisturbed], text: TextModel
) -> Iterable[str]:
    yield from _out_of_authority(log)
    rounds = [commit.round for commit in log.commits]
    if rounds != list(range(1, len(rounds) + 1)):
        yield f"its rounds are not one record each: {rounds}"
    committed = 0
    for commit in log.commits:
        committed += len(commit.emitted)
        if commit.committed != committed:
            yield f"round {commit.round} says {commit.committed} tokens, and {committed} are there"
    if not stream.whole:
        return
    undisturbed = known.get(stream.text)
    if undisturbed is not None and log.tokens != undisturbed.ids:
        yield f"its ids are {log.tokens} instead of {undisturbed.ids}"
    if stream.ids and stream.ids != log.tokens:
        yield f"its client read {stream.ids}, and its log holds {log.tokens}"
    if (said := text.decode(list(log.tokens))) != stream.received:
        yield f"its client saw {stream.received!r}, and its log says {said!r}"
    if len(log.tokens) != stream.text.max_tokens:
        yield f"{len(log.tokens)} tokens of {stream.text.max_tokens}"


def _out_of_authority(log: LogSummary) -> Iterable[str]:
    """A higher epoch begins with its fence, and nothing of a lower one stands behind it (6.8)."""
    epoch = 1
    for number, record in enumerate(log.records):
        if record.epoch < epoch:
            yield f"record {number} is of epoch {record.epoch}, behind a fence of epoch {epoch}"
        if record.epoch > epoch and not isinstance(record, FenceRecord):
            yield f"record {number} begins epoch {record.epoch} without a fence"
        epoch = max(epoch, record.epoch)


async def left_behind(cluster: Cluster) -> list[str]:
    """Wait until no session is open anywhere; what is left after a while is wrong."""
    try:
        async with asyncio.timeout(SETTLE_S):
            while left := await _open(cluster):
                await asyncio.sleep(0.2)
    except TimeoutError:
        return left
    return []


async def _open(cluster: Cluster) -> list[str]:
    left = []
    for name, process in cluster.processes.items():
        status = await process.ask("GET", "/status")
        if status is None:
            left.append(f"{name} does not answer")
            continue
        left += [f"{name}: {one}" for one in await _leases(process)]
        sessions = status["sessions"]
        if process.role == "verifier":  # it keeps those that have ended, for readers that are late
            sessions = [one for one in sessions if one["state"] not in _OVER and not one["fenced"]]
        left += [f"{name} has session {one['session']}" for one in sessions]
        left += [
            f"{name} counts {one['sessions']} sessions of {one['base_uri']}"
            for one in status.get("instances", ())
            if one["sessions"]
        ]
    return left


async def _leases(process: Process) -> list[str]:
    """Tiers that hold what is under a lease."""
    said = await asyncio.to_thread(fetch, process.socket_path, "/metrics")
    lines = [one for one in said.splitlines() if one.startswith("sdcp_cache_leased_bytes{")]
    return [line for line in lines if float(line.split()[-1])]


_OVER = (3, 4)  # finished, failed (D-O11)
