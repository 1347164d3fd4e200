"""Tensor parallelism: which part of every layer a process has, and how the parts are added up.

Heads and the inner rows of the MLP are divided (Megatron-LM, arXiv 1909.08053); embeddings, norms
and the output head are whole everywhere.  What the parts add to a layer is gathered and summed in
the order of ranks, not reduced: a reduction adds up in an order that depends on the number of rows,
and then a row's bits would.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from sdcpd.engine.api import ModelError
from sdcpd.engine.model_config import ModelConfig


class Shard:
    """One process's part; `Shard()` is the whole."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """The shape of the part; raises ModelError if the model cannot be divided so."""
        for name in ("heads", "kv_heads", "intermediate"):
            if getattr(config, name) % self.count:
                raise ModelError(
                    f"tensor_parallel = {self.count}: the model's {name} ({getattr(config, name)}) "
                    "cannot be divided by it; choose a divisor"
                )
        return replace(
            config,
            heads=config.heads // self.count,
            kv_heads=config.kv_heads // self.count,
            intermediate=config.intermediate // self.count,
        )

    def slice(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's part of a tensor along a dimension, in memory of its own."""
        if self.count == 1:
            return tensor
        size = tensor.shape[dim] // self.count
        return tensor.narrow(dim, self.rank * size, size).clone()

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, the same bits in each."""
        if self.count == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous())
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other.float()
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of all processes, put together along a dimension."""
        if self.count == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=dim)
