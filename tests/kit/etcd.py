"""A real etcd on loopback, of one member or of three, in a folder that is thrown away."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdcpd.dev.plan import free_ports
from tiers.api import LogStore

BINARY = shutil.which("etcd")
START_S = 30.0
# Builds that etcd's makers do not test must be asked for by name.
_UNSUPPORTED = {"aarch64": "arm64", "i686": "386", "armv7l": "arm"}


def need_etcd() -> None:
    """Skip the test where there is none."""
    if BINARY is None:
        pytest.skip("etcd is not installed")
    pytest.importorskip("aetcd", reason="the extra etcd is not installed")


class Member:
    """One process; killed without notice, and started again with what it had on its disk."""

    def __init__(self, folder: Path, name: str, ports: tuple[int, int], *options: str) -> None:
        client, peer = ports
        self.port = client
        self.address = f"127.0.0.1:{client}"
        self.peer = f"{name}=http://127.0.0.1:{peer}"
        scheme = "https" if any(option.startswith("--cert-file") for option in options) else "http"
        self._log = folder / f"{name}.log"
        self._options = [
            f"--name={name}",
            f"--data-dir={folder / name}",
            f"--listen-client-urls={scheme}://{self.address}",
            f"--advertise-client-urls={scheme}://{self.address}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster-token={folder.name}",
            "--logger=zap",
            "--log-outputs=stderr",
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._serving = threading.Event()

    def start(self, peers: str) -> None:
        """Start the process, without waiting until it serves."""
        self._serving.clear()
        self._process = subprocess.Popen(
            [str(BINARY), *self._options, f"--initial-cluster={peers}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"ETCD_UNSUPPORTED_ARCH": _UNSUPPORTED.get(platform.machine(), "")},
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,))
        self._reader.start()

    def wait(self) -> None:
        """Return when it says that it serves clients, which it does once it has a leader."""
        if not self._serving.wait(START_S):
            raise AssertionError(f"etcd did not start:\n{self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """End it as a power cut would (kill -9)."""
        if self._process is None or self._reader is None:
            return
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process = self._reader = None

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr, self._log.open("ab") as log:
            for line in process.stderr:
                log.write(line)
                if b"serving client traffic" in line:
                    self._serving.set()


class EtcdCluster:
    """The members of one cluster."""

    def __init__(self, folder: Path, *options: str, members: int = 1) -> None:
        folder.mkdir(parents=True)
        ports = free_ports(2 * members)
        pairs = zip(ports[::2], ports[1::2], strict=True)
        self.members = [
            Member(folder, f"m{number}", pair, *options) for number, pair in enumerate(pairs)
        ]
        self._peers = ",".join(member.peer for member in self.members)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses for clients."""
        return tuple(member.address for member in self.members)

    def start(self) -> None:
        """Start all members and wait until all serve."""
        for member in self.members:
            member.start(self._peers)
        for member in self.members:
            member.wait()

    def restart(self, member: Member) -> None:
        """Start a member that was killed, and wait until it serves."""
        member.start(self._peers)
        member.wait()

    def stop(self) -> None:
        """Kill all members."""
        for member in self.members:
            member.kill()


@contextmanager
def running_etcd(folder: Path, *options: str, members: int = 1) -> Iterator[EtcdCluster]:
    """A cluster that serves; skips the test where etcd is missing."""
    need_etcd()
    cluster = EtcdCluster(folder, *options, members=members)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


async def revision_of(logs: LogStore) -> int:
    """How many transactions have been written to a store's etcd so far."""
    from aetcd.rpc import rpc_pb2 as pb

    from tiers.etcd_log import EtcdLogStore

    assert isinstance(logs, EtcdLogStore)
    answer = await logs._client.range(pb.RangeRequest(key=b"none"))
    return int(answer.header.revision)
