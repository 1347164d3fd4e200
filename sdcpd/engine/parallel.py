"""A model over several processes of one host: this one leads, the others do what it does.

Each process has its part of the weights and of every key and value (shard.py).  The leader alone
knows sessions; it tells the followers of each pass, and of what it does to the pool, as plain
integers through a pipe that nobody else has.  Tensors go through torch.distributed: NCCL between
GPUs, gloo between CPUs, on loopback, met through a file in a private directory.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import cbor2
import torch
import torch.distributed as dist

from sdcpd.engine.api import ModelError
from sdcpd.engine.kv_pool import KvPool
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.shard import Shard

log = logging.getLogger("sdcpd.engine")
STOP_S = 5.0
TENSOR_TAG = 65535  # among ourselves alone


class Followers:
    """The other processes of a model; ends them when it is closed, and ends us when one dies."""

    def __init__(self, settings: ModelSettings, count: int) -> None:
        """Start `count` of them, each of which loads its part."""
        self._directory = tempfile.TemporaryDirectory(prefix="sdcpd-parallel-")
        self._meeting = f"file://{self._directory.name}/meeting"
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._lives: list[socket.socket] = []
        """Nothing is said there; that they close says that this process has ended."""
        for rank in range(1, count + 1):
            self._start(rank, count + 1, settings)

    def _start(self, rank: int, world: int, settings: ModelSettings) -> None:
        ours, theirs = socket.socketpair()
        life, their_life = socket.socketpair()
        with theirs, their_life:
            given = [theirs.fileno(), their_life.fileno()]
            process = subprocess.Popen(
                [sys.executable, "-m", "sdcpd.engine.follower", *map(str, given)],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the leader, who ends them
            )
        pipe = Connection(ours.detach())
        pipe.send_bytes(packed("load", settings.plain(), rank, world, self._meeting))
        self._processes.append(process)
        self._pipes.append(pipe)
        self._lives.append(life)

    def meet(self, device: torch.device) -> None:
        """Wait until all have loaded their parts; raises ModelError with what one says."""
        for number, pipe in enumerate(self._pipes, 1):
            try:
                failure = pipe.recv_bytes().decode()
            except EOFError:
                failure = f"process {number} of tensor_parallel ended before it was ready"
            if failure:
                self.close()
                raise ModelError(failure)
        try:
            join(0, len(self._pipes) + 1, self._meeting, device)
        except RuntimeError as e:
            self.close()
            raise ModelError(f"the processes of tensor_parallel did not meet: {e}") from e
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """No pass can be run without one of them: the service manager is to start us anew."""
        code = process.wait()
        if not self._closing:
            log.critical(
                "process %d of tensor_parallel has ended with code %d: so does this one",
                process.pid,
                code,
            )
            os.kill(os.getpid(), signal.SIGTERM)

    def tell(self, what: str, *values: Any) -> None:
        """Have all of them do something."""
        message = packed(what, *values)
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def close(self) -> None:
        """End them."""
        self._closing = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for life in self._lives:
            life.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._directory.cleanup()


def packed(what: str, *values: Any) -> bytes:
    """A message to a follower: CBOR, tensors as their octets."""
    told = [_tagged(value) if isinstance(value, torch.Tensor) else value for value in values]
    octets: bytes = cbor2.dumps([what, told])
    return octets


def unpacked(octets: bytes) -> tuple[str, list[Any]]:
    """What `packed` made; sequences come back as lists."""
    what, told = cbor2.loads(octets)
    return what, [_tensor(one) if isinstance(one, cbor2.CBORTag) else one for one in told]


def _tagged(tensor: torch.Tensor) -> cbor2.CBORTag:
    octets = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return cbor2.CBORTag(TENSOR_TAG, [dtype, list(tensor.shape), octets])


def _tensor(tag: cbor2.CBORTag) -> torch.Tensor:
    dtype, shape, octets = tag.value
    return torch.frombuffer(bytearray(octets), dtype=getattr(torch, dtype)).view(shape)


class SharedPool(KvPool):
    """The leader's part of a pool; what is done to it, the followers do to theirs."""

    def __init__(self, followers: Followers, shard: Shard, **options: Any) -> None:
        super().__init__(**options)
        self._followers, self._shard = followers, shard
        self.heads_stored = self.kv_heads * shard.count

    def copy(self, blocks: Sequence[int], to: Sequence[int]) -> None:
        """See KvPool."""
        self._followers.tell("copy", list(blocks), list(to))
        super().copy(blocks, to)

    def get(
        self, table: Sequence[int], positions: int, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of all heads."""
        self._followers.tell("get", list(table), positions, start)
        keys, values = super().get(table, positions, start)
        return self._shard.gather(keys, 1), self._shard.gather(values, 1)

    def put(
        self, table: Sequence[int], keys: torch.Tensor, values: torch.Tensor, start: int = 0
    ) -> None:
        """Rows of all heads."""
        self._followers.tell("put", list(table), keys, values, start)
        super().put(table, self._shard.slice(keys, 1), self._shard.slice(values, 1), start)


def join(rank: int, world: int, meeting: str, device: torch.device) -> None:
    """Meet the other processes; all are on this host, and nothing leaves it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world)
