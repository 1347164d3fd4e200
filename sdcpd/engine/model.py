"""A decoder-only transformer (Llama and its kin, Gemma 3) over packed rows of many sessions.

A pass takes rows of tokens that belong to several sessions laid end to end.  Linear layers see all
rows at once; attention runs a session at a time over that session's KV.  With the row counts that
`runner` chooses, each row's result does not depend on what stands beside it (measured; the start-up
self-check proves it for the weights and machine at hand).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sdcpd.engine.attention import Attention
from sdcpd.engine.kv_pool import KvPool, Slots, write
from sdcpd.engine.layers import Layer, Loader, Tensors
from sdcpd.engine.linear import Linear
from sdcpd.engine.model_config import ModelConfig
from sdcpd.engine.rope import Rope
from sdcpd.engine.shard import Shard

LARGEST = 1e15  # no key or value is larger: its product with a query must stay finite
Turns = dict[Rope, tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines [R, 1, head_dim] of a pass's rows."""


class LlamaModel:
    """Weights of one model, or of one process's part of it, on one device; no session state."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        *,
        device: torch.device,
        shard: Shard | None = None,
        lay_out: bool = True,
    ) -> None:
        """`config` and `tensors` are the whole model's; `lay_out` as Linear has it.

        Raises ModelError.
        """
        self.shard = shard or Shard()
        self.config = self.shard.part_of(config)
        self.device = device
        loader = Loader(config, tensors, device=device, shard=self.shard, lay_out=lay_out)
        self.embedding = loader.whole("model.embed_tokens.weight", config.vocab, config.hidden)
        self.dtype = self.embedding.dtype
        self.layers = [loader.layer(index) for index in range(config.layers)]
        self.norm_out = loader.whole("model.norm.weight", config.hidden)
        tied = config.tied and "lm_head.weight" not in tensors
        self.head: Linear | None = None
        if self.shard.rank == 0:  # who leads alone asks for scores
            self.head = loader.linear(self.embedding if tied else loader.take("lm_head.weight"))
        self.head_tokens = loader.take("d2t").long() if "d2t" in tensors else None
        loader.check_nothing_left()
        self._ropes = {
            rope: [
                table.to(self.dtype)
                for table in rope.table(config.head_dim, config.context_max, device)
            ]
            for rope in set(config.ropes)
        }

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Slots,
        attention: Attention,
        pool: KvPool,
    ) -> torch.Tensor:
        """Feed `tokens` [R] at `positions` [R] and return hidden states [R, hidden].

        The keys and values of the rows are written where `slots` says.
        """
        hidden, turns = self.begin(tokens, positions)
        for index, layer in enumerate(self.layers):
            place = (pool.keys[index], pool.values[index], slots)
            queries = self.before(layer, hidden, turns[self.config.ropes[index]], place)
            hidden = self.after(layer, hidden, attention.layer(index, queries))
        return hidden

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Turns]:
        """Hidden states [R, hidden] before the first layer, and how positions turn them."""
        hidden = F.embedding(tokens, self.embedding)
        if self.config.embedding_scale is not None:
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=self.dtype)
        turns = {
            rope: (
                cos.index_select(0, positions)[:, None],
                sin.index_select(0, positions)[:, None],
            )
            for rope, (cos, sin) in self._ropes.items()
        }
        return hidden, turns

    def before(
        self,
        layer: Layer,
        hidden: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        place: tuple[torch.Tensor, torch.Tensor, Slots],
    ) -> torch.Tensor:
        """Write a layer's keys and values and return its queries [R, heads, head_dim].

        `place`: the pool's keys and values of the layer, and where in them rows belong.
        """
        queries, keys, values = self._projected(layer, hidden, turn)
        write(place, keys, values)
        return queries

    def after(self, layer: Layer, hidden: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Hidden states after a layer, whose attention has `seen` [R, heads * head_dim]."""
        added = self.shard.sum(layer.out(seen))
        hidden = hidden + self._normed(added, layer.norm_attended)
        fused = layer.gate_up(self._norm(hidden, layer.norm_mlp))
        gate, up = fused.chunk(2, dim=-1)
        added = self.shard.sum(layer.down(self._activate(gate) * up))
        return hidden + self._normed(added, layer.norm_out)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores in binary32 of hidden states [R, hidden], one for each row of the head.

        Those of a head over a reduced vocabulary are spread by `expanded`.
        """
        assert self.head is not None, "a follower gives no scores"
        return self.head(self._norm(hidden, self.norm_out)).float()

    @torch.inference_mode()
    def expanded(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V]: tokens that the head has no row for (`d2t` names those of its rows) are
        impossible.
        """
        if self.head_tokens is None:
            return scores
        full = torch.full((len(scores), self.config.vocab), float("-inf"), device=self.device)
        return full.index_copy_(1, self.head_tokens, scores)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        if self.config.family.gemma:
            return (wide * (1.0 + weight.float())).to(self.dtype)
        return weight * wide.to(self.dtype)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return hidden if weight is None else self._norm(hidden, weight)

    def _activate(self, gate: torch.Tensor) -> torch.Tensor:
        if self.config.activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh")
        return F.silu(gate)

    def _projected(
        self, layer: Layer, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [R, heads of each, head_dim] of a layer's rows."""
        c, (cos, sin) = self.config, turn
        fused = layer.qkv(self._norm(hidden, layer.norm_in))
        fused = fused.view(len(hidden), c.heads + 2 * c.kv_heads, c.head_dim)
        turned = fused[:, : c.heads + c.kv_heads]
        if layer.norm_q is not None and layer.norm_k is not None:
            asked, kept = turned[:, : c.heads], turned[:, c.heads :]
            turned = torch.cat(
                (self._norm(asked, layer.norm_q), self._norm(kept, layer.norm_k)), dim=1
            )
        half = c.head_dim // 2
        rotated = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
        turned = turned * cos + rotated * sin
        # Sessions read over each other's rows and mask them: 0 times what is not finite is not 0.
        keys = _finite(turned[:, c.heads :])
        return turned[:, : c.heads], keys, _finite(fused[:, c.heads + c.kv_heads :])


def _finite(rows: torch.Tensor) -> torch.Tensor:
    largest = min(LARGEST, torch.finfo(rows.dtype).max)
    return rows.clamp(-largest, largest).nan_to_num_(0.0)
