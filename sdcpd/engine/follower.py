"""A process of a model that is spread over several: `python -m sdcpd.engine.follower FD`.

It is started by the leader (parallel.py), does as it is told, and ends when the leader does.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from sdcpd.engine.api import ModelError
from sdcpd.engine.attention import Segment
from sdcpd.engine.load import load_part
from sdcpd.engine.parallel import join
from sdcpd.engine.runner import Runner, Shape
from sdcpd.engine.shard import Shard

_PR_SET_PDEATHSIG = 1


class Follower:
    """What a follower does when it is told to."""

    def __init__(self, runner: Runner, shard: Shard) -> None:
        self._runner, self._shard = runner, shard

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        segments: Sequence[Segment],
        shape: Shape,
    ) -> None:
        """Its part of a pass."""
        self._runner.shape = shape
        self._runner.forward(tokens, positions, segments)

    def copy(self, blocks: list[int], to: list[int]) -> None:
        """See KvPool."""
        self._runner.pool.copy(blocks, to)

    def get(self, table: list[int], positions: int, start: int) -> None:
        """Give its heads' rows."""
        for rows in self._runner.pool.get(table, positions, start):
            self._shard.gather(rows, 1)

    def put(self, table: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take its heads' rows."""
        cut = self._shard.slice
        self._runner.pool.put(table, cut(keys, 1), cut(values, 1))


def main() -> None:
    """Load a part of the model, meet the others, and follow."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader closes the pipe when it is done
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = Connection(int(sys.argv[1]))
    settings, rank, world, meeting = pipe.recv()
    shard = Shard(rank, world)
    try:
        runner = load_part(settings, shard)
    except ModelError as e:
        pipe.send(str(e))
        return
    pipe.send(None)
    join(rank, world, meeting, runner.model.device)
    follower = Follower(runner, shard)
    while True:
        try:
            what, values = pipe.recv()
        except EOFError:
            return
        getattr(follower, what)(*values)


if __name__ == "__main__":
    main()
