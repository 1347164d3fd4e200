"""Passes in static shapes: torch.compile over what lies between attentions, as CUDA graphs.

A pass is cut at its attentions, whose shapes depend on the sessions in it.  What lies between two
of them is compiled once for each number of rows in use and, on a GPU, recorded as a CUDA graph,
which is replayed with one launch.  All layers share the compiled code.  What is fed in lies in
memory of fixed addresses, and is brought there from pinned memory without waiting.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sdcpd.engine.attention import Attention
from sdcpd.engine.kv_pool import KvPool
from sdcpd.engine.model import LlamaModel, Turns

RECOMPILES_MAX = 64  # numbers of rows in use, times kinds of layers
WARM_UP = 3  # runs before a graph is recorded, as torch asks for


class CompiledModel:
    """A model whose passes have one of a few numbers of rows."""

    def __init__(
        self,
        model: LlamaModel,
        pool: KvPool,
        *,
        backend: str = "inductor",
        graphs: bool | None = None,
    ) -> None:
        """`graphs`: whether to record CUDA graphs; None: on a GPU."""
        self.model, self.pool = model, pool
        self.graphs = model.device.type == "cuda" if graphs is None else graphs
        self.before: Callable[..., torch.Tensor] = model.before
        self.after: Callable[..., torch.Tensor] = model.after
        if model.shard.count == 1:  # sums over processes are recorded, not compiled
            torch._dynamo.config.recompile_limit = RECOMPILES_MAX
            compiled = torch.compile(backend=backend, dynamic=False, fullgraph=True)
            self.before, self.after = compiled(model.before), compiled(model.after)
        self._passes: dict[int, _StaticPass] = {}

    def forward(
        self, tokens: list[int], positions: list[int], slots: list[int], attention: Attention
    ) -> torch.Tensor:
        """Hidden states [R, hidden], until the next pass; the lists are R long.

        The first pass with so many rows takes as long as compiling does.
        """
        rows = len(tokens)
        if rows not in self._passes:
            self._passes[rows] = _StaticPass(self, rows)
        return self._passes[rows].run([tokens, positions, slots], attention)


class _StaticPass:
    """The pieces of a pass of a fixed number of rows, and the memory between them."""

    def __init__(self, owner: CompiledModel, rows: int) -> None:
        model = owner.model
        device, config = model.device, model.config
        self._owner, self._model = owner, model
        self._staged = torch.zeros(3, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._fed = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._fed[2] = owner.pool.nowhere  # recording writes, too
        width = config.heads * config.head_dim
        self._seen = torch.zeros(rows, width, dtype=model.dtype, device=device)
        self._hidden = self._queries = self._seen
        self._turns: Turns = {}
        self._recorded: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    @torch.inference_mode()
    def run(self, fed: list[list[int]], attention: Attention) -> torch.Tensor:
        """One pass."""
        if self._owner.graphs and not self._recorded:
            self._record()
        self._staged.copy_(torch.tensor(fed))
        self._fed.copy_(self._staged, non_blocking=True)
        layers = self._model.config.layers
        for index in range(layers + 1):
            queries = self._piece(index)
            if index < layers:
                attention.layer(index, queries, out=self._seen)
        return self._hidden

    def _piece(self, index: int) -> torch.Tensor:
        if not self._recorded:
            self._step(index)
            return self._queries
        graph, queries = self._recorded[index]
        graph.replay()
        return queries

    def _step(self, index: int) -> None:
        """From what the attention of layer `index` - 1 has seen to the queries of layer `index`."""
        model, owner, pool = self._model, self._owner, self._owner.pool
        tokens, positions, slots = self._fed
        if index == 0:
            self._hidden, self._turns = model.begin(tokens, positions)
        else:
            self._hidden = owner.after(model.layers[index - 1], self._hidden, self._seen)
        if index < model.config.layers:
            turn = self._turns[model.config.ropes[index]]
            place = (pool.keys[index], pool.values[index], slots)
            self._queries = owner.before(model.layers[index], self._hidden, turn, place)

    def _record(self) -> None:
        """Record each piece after the one before, whose results it reads where they lie."""
        memory = torch.cuda.graph_pool_handle()
        made = []
        for index in range(self._model.config.layers + 1):
            hidden, graph = self._hidden, torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self._hidden = hidden
                    self._step(index)
            torch.cuda.current_stream().wait_stream(side)
            self._hidden = hidden
            with torch.cuda.graph(graph, pool=memory):
                self._step(index)
            made.append((graph, self._queries))
        self._recorded = made
