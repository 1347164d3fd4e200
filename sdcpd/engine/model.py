"""A decoder-only transformer (Llama and its kin, Gemma 3) over packed rows of many sessions.

A pass takes `rows` of tokens that belong to several sessions laid end to end.  Linear layers see
all rows at once; attention runs a session at a time over that session's KV.  With the row counts
that `runner` chooses, each row's result does not depend on what stands beside it (measured; the
start-up self-check proves it for the weights and machine at hand).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from sdcpd.engine.api import ModelError
from sdcpd.engine.attention import Attention
from sdcpd.engine.kv_pool import KvPool
from sdcpd.engine.linear import Linear
from sdcpd.engine.model_config import ModelConfig

LARGEST = 1e15  # no key or value is larger: its product with a query must stay finite


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k, v and gate, up are fused along their outputs."""

    norm_in: torch.Tensor
    qkv: Linear
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None
    out: Linear
    norm_attended: torch.Tensor | None
    """Of what attention adds, where the family has it; likewise for the MLP below."""
    norm_mlp: torch.Tensor
    gate_up: Linear
    down: Linear
    norm_out: torch.Tensor | None


class Tensors(Protocol):
    """Where tensors are taken from, by their names in Hugging Face's files."""

    def __contains__(self, name: str) -> bool: ...

    def pop(self, name: str) -> torch.Tensor:
        """Take one out; raises KeyError."""
        ...

    def names(self) -> Sequence[str]:
        """Those that were not taken."""
        ...


class LlamaModel:
    """Weights of one model on one device; holds no session state."""

    def __init__(self, config: ModelConfig, tensors: Tensors, *, device: torch.device) -> None:
        self.config = config
        self.device = device

        def take(name: str) -> torch.Tensor:
            try:
                return tensors.pop(name).to(device)
            except KeyError:
                raise ModelError(
                    f"the weights hold no tensor {name!r}, which {config.architecture} with "
                    f"{config.layers} layers needs; config.json and weights do not belong together"
                ) from None

        def shaped(name: str, *shape: int) -> torch.Tensor:
            tensor = take(name)
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"tensor {name!r} has the shape {list(tensor.shape)}, config.json asks for "
                    f"{list(shape)}; config.json and weights do not belong together"
                )
            return tensor

        self.embedding = shaped("model.embed_tokens.weight", config.vocab, config.hidden)
        self.dtype = self.embedding.dtype
        self.layers = [self._layer(shaped, tensors, i) for i in range(config.layers)]
        self.norm_out = shaped("model.norm.weight", config.hidden)
        tied = config.tied and "lm_head.weight" not in tensors
        self.head = Linear(self.embedding if tied else take("lm_head.weight"))
        self.head_tokens = tensors.pop("d2t").to(device).long() if "d2t" in tensors else None
        if left := [name for name in tensors.names() if not _is_known_extra(name)]:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"the weights also hold {left[0]!r}{others}, for which {config.architecture} as it"
                " is known here has no use: it would not write what it was trained to"
            )
        self._ropes = {
            rope: [
                table.to(self.dtype)
                for table in rope.table(config.head_dim, config.context_max, device)
            ]
            for rope in set(config.ropes)
        }

    def _layer(self, take: Callable[..., torch.Tensor], names: Tensors, index: int) -> Layer:
        c = self.config
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        rows = c.heads * c.head_dim
        sizes = {
            "q_proj": rows,
            "k_proj": c.kv_heads * c.head_dim,
            "v_proj": c.kv_heads * c.head_dim,
        }
        inner = (c.intermediate, c.hidden)
        ups = {"gate_proj": c.intermediate, "up_proj": c.intermediate}

        def biases(at: str, sizes: dict[str, int], *, needed: bool = False) -> torch.Tensor | None:
            if not needed and f"{at}{next(iter(sizes))}.bias" not in names:
                return None
            return torch.cat([take(f"{at}{name}.bias", size) for name, size in sizes.items()])

        gemma, normed = c.family.gemma, c.family.qk_norm

        def norm(name: str, *, there: bool = True, size: int = c.hidden) -> torch.Tensor | None:
            return take(f"{at}{name}.weight", size) if there else None

        before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        return Layer(
            norm_in=take(at + "input_layernorm.weight", c.hidden),
            norm_q=norm("self_attn.q_norm", there=normed, size=c.head_dim),
            norm_k=norm("self_attn.k_norm", there=normed, size=c.head_dim),
            norm_attended=norm("post_attention_layernorm", there=gemma),
            norm_out=norm("post_feedforward_layernorm", there=gemma),
            qkv=Linear(
                torch.cat(
                    [take(f"{attention}{n}.weight", size, c.hidden) for n, size in sizes.items()]
                ),
                biases(attention, sizes, needed=c.family.qkv_bias),
            ),
            out=Linear(
                take(attention + "o_proj.weight", c.hidden, rows),
                biases(attention, {"o_proj": c.hidden}),
            ),
            norm_mlp=take(f"{at}{before_mlp}.weight", c.hidden),
            gate_up=Linear(
                torch.cat(
                    [take(mlp + "gate_proj.weight", *inner), take(mlp + "up_proj.weight", *inner)]
                ),
                biases(mlp, ups),
            ),
            down=Linear(
                take(mlp + "down_proj.weight", c.hidden, c.intermediate),
                biases(mlp, {"down_proj": c.hidden}),
            ),
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: Attention,
        pool: KvPool,
    ) -> torch.Tensor:
        """Feed `tokens` [R] at `positions` [R] and return hidden states [R, hidden].

        The keys and values of the first len(slots) rows are written at those places of the pool;
        rows behind them fill the pass up.
        """
        hidden = F.embedding(tokens, self.embedding)
        if self.config.embedding_scale is not None:
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=self.dtype)
        turns = {
            rope: (cos[positions][:, None], sin[positions][:, None])
            for rope, (cos, sin) in self._ropes.items()
        }
        for index, layer in enumerate(self.layers):
            queries, keys, values = self._projected(layer, hidden, turns[self.config.ropes[index]])
            pool.write(index, slots, keys[: len(slots)], values[: len(slots)])
            added = layer.out(attention.layer(index, queries))
            hidden = hidden + self._normed(added, layer.norm_attended)
            fused = layer.gate_up(self._norm(hidden, layer.norm_mlp))
            gate, up = fused.chunk(2, dim=-1)
            added = layer.down(self._activate(gate) * up)
            hidden = hidden + self._normed(added, layer.norm_out)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] in binary32 of hidden states [R, hidden].

        A head over a reduced vocabulary (`d2t` names the token of each of its rows) leaves all
        other tokens impossible.
        """
        scores = self.head(self._norm(hidden, self.norm_out)).float()
        if self.head_tokens is None:
            return scores
        full = torch.full((len(scores), self.config.vocab), float("-inf"), device=self.device)
        full[:, self.head_tokens] = scores
        return full

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


def _is_known_extra(name: str) -> bool:
    """Whether a tensor may be there and says nothing that the others or the shape do not."""
    return name in ("lm_head.weight", "t2d") or name.endswith(("inv_freq", "masked_bias"))
