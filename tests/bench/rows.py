"""What rule 2 adds to a round: `python -m tests.bench.rows`.

A real verifier and a real drafter, each a process of its own, over HTTP/2 with mutual TLS on
loopback; the engines do nothing, the rows are made up beforehand, and the commit log is in memory,
so that what differs is the rows' way: written, fetched, checked.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop

from sdcpd.dev.plan import free_ports
from sdcpd.engine.api import Draft, DraftWork, Score, Scored
from sdcpd.engine.fake import FakeDrafter, FakeModel, FakeTarget
from sdcpd.engine.rows import check_rows
from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import prefix_digest0
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.messages import Assignment, Message, Rule, Sampling, SessionOpen
from sdcpd.protocol.sparse import SparseRows
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.drafter import Drafter, DrafterConfig
from sdcpd.roles.objects import Objects
from sdcpd.roles.verifier import Verifier, VerifierConfig
from sdcpd.transport import tuning
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Client, Handler
from sdcpd.transport.loopback import LoopbackClient
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity
from tests.kit.certs import CertKit
from tests.kit.cluster import DOMAIN, PEERS, ROUTER, peer
from tests.kit.mlc import MemoryMlc
from tests.kit.verifier_machine import contract
from tiers.host import HostTier
from tiers.resource import MlcResource

VOCAB, M = 128_256, 8
DRAFTER = "https://d0.test/"
PROMPT = (1, 2, 3)
TOKENS = tuple(range(100, 100 + M))


@dataclass(frozen=True, slots=True)
class Files:
    """Authority, certificate and key of one side."""

    ca: Path
    crt: Path
    key: Path

    def identity(self) -> TlsIdentity:
        """For the transport."""
        return TlsIdentity(ca=self.ca, cert=self.crt, key=self.key)


class NullTarget(FakeTarget):
    """Accepts everything at once."""

    async def check_rows(self, octets: bytes | memoryview, tokens: Sequence[int]) -> None:
        """As a real engine does."""
        await check_rows(octets, VOCAB, tokens)

    async def score(self, work: Score) -> Scored:
        """See TargetEngine."""
        return Scored(len(work.proposed), 1)


class NullDrafter(FakeDrafter):
    """Proposes the same at once, and notes when it was asked."""

    def __init__(self, rows: bytes | SparseRows | None) -> None:
        super().__init__(FakeModel(vocab=VOCAB))
        self.asked: list[float] = []
        self._rows = rows

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """See DraftEngine."""
        self.asked.append(time.perf_counter())
        return Draft(TOKENS, self._rows)


# ---- the verifier's process


async def serve(files: Files, base: str, told: Connection) -> None:
    """A verifier with its cache."""
    network: dict[str, Handler] = {ROUTER: MemoryMlc().handle}
    client = LoopbackClient(network, peer("verifier", "v0", base))
    verifier = Verifier(
        VerifierConfig(
            base,
            ROUTER,
            machine=VerifierSettings(None, None),
            enforcing_logs=True,
            round_rate=1e9,
        ),
        engine=NullTarget(FakeModel(vocab=VOCAB)),
        client=client,
        objects=Objects(client, bases=(ROUTER, base), own=base, is_near=client.is_near),
        peers=PEERS,
        mlc=MlcResource(
            base_path="",
            objects=HostTier(1 << 30),
            logs=None,
            authorize=lambda *_: None,
            object_bytes_max=256 << 20,
        ),
        name="v0.x",
        status_ttl_s=3.0,
    )
    network[base] = verifier.listener.handle
    server = Server(
        verifier.listener.handle,
        identity=files.identity(),
        host="127.0.0.1",
        port=int(base.rsplit(":", 1)[1].rstrip("/")),
        body_bytes_max=256 << 20,
    )
    await server.start()
    told.send("ready")
    await asyncio.Event().wait()


def run_server(files: Files, base: str, told: Connection) -> None:
    """The process."""
    logging.basicConfig(level=logging.WARNING)
    tuning.tune_process()
    uvloop.run(serve(files, base, told))


# ---- the drafter's process


def sparse_rows() -> SparseRows:
    """What a drafter samples from: its 64 likeliest tokens."""
    places, values = array("I"), array("f")
    chooser = np.random.default_rng(1)
    for index, token in enumerate(TOKENS):
        row = np.zeros(VOCAB)
        row[chooser.choice(VOCAB, 63, replace=False)] = chooser.random(63)
        row[token] = 1.0
        there = np.flatnonzero(row)
        places.extend((there + index * VOCAB).tolist())
        values.extend((row[there] / row.sum()).tolist())
    return SparseRows(VOCAB, M, places, values)


def dense_rows() -> bytes:
    """Of a drafter that samples from all tokens."""
    rows = np.random.default_rng(1).random((M, VOCAB)).astype("<f4") + 1e-3
    return bytes((rows / rows.sum(axis=1, keepdims=True)).astype("<f4").tobytes())


async def post(client: Client, method: str, uri: str, message: Message) -> None:
    """One message of the router's; anything but success is the end."""
    headers = (("content-type", MEDIA_TYPE),)
    answer = await client.request(method, uri, headers=headers, body=encode(message))
    assert 200 <= answer.status < 300, answer


async def rounds(
    clients: dict[str, Client],
    base: str,
    session: bytes,
    rows: bytes | SparseRows | None,
    count: int,
) -> list[float]:
    """Seconds of each of so many rounds of one session."""
    info = NullTarget(FakeModel(vocab=VOCAB)).info
    engine = NullDrafter(rows)
    agreed = contract(
        rule=Rule.GREEDY if rows is None else Rule.SPECULATIVE_SAMPLING,
        sampling=Sampling(temperature_milli=0 if rows is None else 1000),
        max_new=1 << 20,
        stop=(),
        target=info.model,
        tokenizer=info.tokenizer,
        drafters=(engine.model,),
    )
    opened = SessionOpen(
        session=session,
        epoch=1,
        contract=agreed,
        prompt=PROMPT,
        commit_log=f"{ROUTER}logs/{session_path_id(session)}",
    )
    assignment = Assignment(
        session=session,
        epoch=1,
        contract=agreed,
        verifier=base,
        drafter=DRAFTER,
        prompt=PROMPT,
        round=0,
        committed=0,
        digest=prefix_digest0(contract_digest(agreed), PROMPT),
        m_init=M,
        vocab=VOCAB,
    )
    await post(clients["router"], "POST", base + "sessions", opened)
    path = f"sessions/{session_path_id(session)}/drafter"
    await post(clients["router"], "PUT", base + path, assignment)
    drafter = Drafter(
        DrafterConfig(DRAFTER, machine=DrafterSettings(m=M)),
        engine=engine,
        client=clients["drafter"],
        objects=Objects(clients["drafter"], bases=(base,), own=DRAFTER),
        peers=PEERS,
        mlc=None,
        name="d0.x",
    )
    network: dict[str, Handler] = {DRAFTER: drafter.listener.handle}
    router = LoopbackClient(network, peer("router", "r0", ROUTER))
    await post(router, "POST", DRAFTER + "assignments", assignment)
    while len(engine.asked) <= count:
        assert drafter.sessions, "the drafter has given up"
        await asyncio.sleep(0.01)
    await drafter.aclose()
    return [b - a for a, b in zip(engine.asked, engine.asked[1:], strict=False)]


async def measure(files: dict[str, Files], base: str, count: int) -> dict[str, float]:
    """Median of a round in milliseconds, by kind; taken in turns."""
    clients: dict[str, Client] = {
        name: HttpClient(files[name].identity(), transport="h2") for name in ("router", "drafter")
    }
    kinds: dict[str, bytes | SparseRows | None] = {
        "rule 1": None,
        "top-k rows": sparse_rows(),
        "dense rows": dense_rows(),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    number = 0
    for _ in range(3):
        for name, rows in kinds.items():
            number += 1
            found = await rounds(clients, base, bytes([number] * 16), rows, count)
            times[name] += found[5:]
    for client in clients.values():
        await client.aclose()
    return {name: 1000 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of each session")
    count = parser.parse_args().rounds
    logging.basicConfig(level=logging.WARNING)
    tuning.tune_process()
    with tempfile.TemporaryDirectory() as folder:
        kit = CertKit(Path(folder), trust_domain=DOMAIN)
        base = f"https://127.0.0.1:{free_ports(1)[0]}/"
        places = {"router": ROUTER, "verifier": base, "drafter": DRAFTER}
        files = {}
        for role, uri in places.items():
            leaf = kit.leaf(role, f"{role[0]}0", base_uri=uri)
            files[role] = Files(kit.ca, leaf.crt_path, leaf.key_path)
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=run_server, args=(files["verifier"], base, there), daemon=True
        )
        process.start()
        here.recv()
        found = uvloop.run(measure(files, base, count))
        process.terminate()
    print(f"a round of M = {M}, V = {VOCAB}: median ms")
    for name, milliseconds in found.items():
        print(f"  {name:12} {milliseconds:7.2f}   adds {milliseconds - found['rule 1']:6.2f}")


if __name__ == "__main__":
    main()
