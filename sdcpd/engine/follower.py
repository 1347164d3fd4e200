"""A process of a model that is spread over several: `python -m sdcpd.engine.follower FD`.

It is started by the leader (parallel.py), does as it is told, and ends when the leader does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from sdcpd.engine.api import ModelError
from sdcpd.engine.attention import Segment
from sdcpd.engine.load import load_part
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.parallel import join, unpacked
from sdcpd.engine.runner import Runner, Shape
from sdcpd.engine.shard import Shard


class Follower:
    """What a follower does when it is told to."""

    def __init__(self, runner: Runner, shard: Shard) -> None:
        self._runner, self._shard = runner, shard

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        segments: Sequence[Sequence[Any]],
        shape: Sequence[Any],
    ) -> None:
        """Its part of a pass."""
        rows, keys, buckets = shape
        self._runner.shape = Shape(rows, tuple(keys), tuple(buckets))
        parts = [
            Segment(first, count, start, tuple(table)) for first, count, start, table in segments
        ]
        self._runner.forward(tokens, positions, parts)

    def copy(self, blocks: list[int], to: list[int]) -> None:
        """See KvPool."""
        self._runner.pool.copy(blocks, to)

    def get(self, table: list[int], positions: int, start: int) -> None:
        """Give its heads' rows."""
        for rows in self._runner.pool.get(table, positions, start):
            self._shard.gather(rows, 1)

    def put(self, table: list[int], keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Take its heads' rows."""
        cut = self._shard.slice
        self._runner.pool.put(table, cut(keys, 1), cut(values, 1), start)


def main() -> None:
    """Load a part of the model, meet the others, and follow."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader closes the pipe when it is done
    life = socket.socket(fileno=int(sys.argv[2]))
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    pipe = Connection(int(sys.argv[1]))
    _, (settings, rank, world, meeting) = unpacked(pipe.recv_bytes())
    shard = Shard(rank, world)
    try:
        runner = load_part(ModelSettings.of(settings), shard)
    except ModelError as e:
        pipe.send_bytes(str(e).encode())
        return
    pipe.send_bytes(b"")
    join(rank, world, meeting, runner.model.device)
    follower = Follower(runner, shard)
    while True:
        try:
            what, values = unpacked(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # what torch.distributed has running is not waited for
        getattr(follower, what)(*values)


def _end_with(life: socket.socket) -> None:
    """End when the leader does, even in the middle of a sum that will never be complete."""
    life.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main()
