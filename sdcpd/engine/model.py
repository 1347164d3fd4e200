"""A decoder-only transformer of the Llama family over packed rows of many sessions.

A pass takes `rows` of tokens that belong to several sessions laid end to end.  Linear layers see
all rows at once; attention runs a session at a time over that session's KV.  With the row counts
that `runner` chooses, each row's result does not depend on what stands beside it (measured; the
start-up self-check proves it for the weights and machine at hand).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sdcpd.engine.api import ModelError
from sdcpd.engine.kv import KEY_BLOCK, SessionKv, padded
from sdcpd.engine.weights import ModelConfig


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[first, first + rows)` of a pass are positions `[start, start + rows)` of `kv`."""

    kv: SessionKv
    first: int
    rows: int
    start: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k, v and gate, up are fused along their outputs."""

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def _rope_table(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [context, head_dim], in binary32 (RoPE; Llama 3 scaling)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.rope_theta**half)
    scaling = config.rope_scaling
    if scaling is not None:
        wavelength = 2 * math.pi / inverse
        low = scaling.original_context / scaling.low_freq_factor
        high = scaling.original_context / scaling.high_freq_factor
        smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
        inverse = torch.where(
            wavelength > low,
            inverse / scaling.factor,
            torch.where(wavelength < high, inverse, blended),
        )
    angles = torch.arange(config.context_max).float()[:, None] * inverse[None, :]
    angles = torch.cat((angles, angles), dim=-1).to(device)
    return angles.cos(), angles.sin()


class LlamaModel:
    """Weights of one model on one device; holds no session state."""

    def __init__(
        self, config: ModelConfig, tensors: dict[str, torch.Tensor], *, device: torch.device
    ) -> None:
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
        self.layers = [self._layer(shaped, i) for i in range(config.layers)]
        self.norm_out = shaped("model.norm.weight", config.hidden)
        self.head = (
            self.embedding
            if config.tied and "lm_head.weight" not in tensors
            else take("lm_head.weight")
        )
        self.head_tokens = tensors["d2t"].to(device).long() if "d2t" in tensors else None
        self._cos, self._sin = (t.to(self.dtype) for t in _rope_table(config, device))

    def _layer(self, take: Callable[..., torch.Tensor], index: int) -> Layer:
        c = self.config
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        rows = c.heads * c.head_dim
        sizes = {
            "q_proj": rows,
            "k_proj": c.kv_heads * c.head_dim,
            "v_proj": c.kv_heads * c.head_dim,
        }
        bias = None
        if c.qkv_bias:
            bias = torch.cat([take(f"{attention}{n}.bias", size) for n, size in sizes.items()])
        inner = (c.intermediate, c.hidden)
        return Layer(
            norm_in=take(at + "input_layernorm.weight", c.hidden),
            qkv=torch.cat(
                [take(f"{attention}{n}.weight", size, c.hidden) for n, size in sizes.items()]
            ),
            qkv_bias=bias,
            out=take(attention + "o_proj.weight", c.hidden, rows),
            norm_mlp=take(at + "post_attention_layernorm.weight", c.hidden),
            gate_up=torch.cat(
                [take(mlp + "gate_proj.weight", *inner), take(mlp + "up_proj.weight", *inner)]
            ),
            down=take(mlp + "down_proj.weight", c.hidden, c.intermediate),
        )

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Feed rows `tokens` [R] at `positions` [R], write their KV, return hidden states."""
        hidden = F.embedding(tokens, self.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        masks = [self._mask(segment) for segment in segments]
        for index, layer in enumerate(self.layers):
            attended = self._attention(index, layer, hidden, cos, sin, segments, masks)
            hidden = hidden + F.linear(attended, layer.out)
            gate, up = F.linear(self._norm(hidden, layer.norm_mlp), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] in binary32 of hidden states [R, hidden].

        A head over a reduced vocabulary (`d2t` names the token of each of its rows) leaves all
        other tokens impossible.
        """
        scores = F.linear(self._norm(hidden, self.norm_out), self.head).float()
        if self.head_tokens is None:
            return scores
        full = torch.full((len(scores), self.config.vocab), float("-inf"), device=self.device)
        full[:, self.head_tokens] = scores
        return full

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * wide.to(self.dtype)

    def _mask(self, segment: Segment) -> torch.Tensor:
        """Additive causal mask [group * rows, keys] of a segment, keys padded to KEY_BLOCK."""
        end = segment.start + segment.rows
        keys = torch.arange(padded(end, KEY_BLOCK), device=self.device)
        queries = torch.arange(segment.start, end, device=self.device)
        mask = torch.zeros(segment.rows, len(keys), dtype=self.dtype, device=self.device)
        mask.masked_fill_(keys[None, :] > queries[:, None], float("-inf"))
        return mask.repeat(self.config.heads // self.config.kv_heads, 1)

    def _attention(
        self,
        index: int,
        layer: Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        segments: Sequence[Segment],
        masks: list[torch.Tensor],
    ) -> torch.Tensor:
        c = self.config
        fused = F.linear(self._norm(hidden, layer.norm_in), layer.qkv, layer.qkv_bias)
        rows = fused.shape[0]
        fused = fused.view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        turned = fused[:, : c.heads + c.kv_heads]
        half = c.head_dim // 2
        rotated = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
        turned = turned * cos[:, None] + rotated * sin[:, None]
        queries, keys = turned[:, : c.heads], turned[:, c.heads :]
        values = fused[:, c.heads + c.kv_heads :]
        result = torch.zeros(rows, c.heads * c.head_dim, dtype=self.dtype, device=self.device)
        for segment, mask in zip(segments, masks, strict=True):
            part = slice(segment.first, segment.first + segment.rows)
            where = slice(segment.start, segment.start + segment.rows)
            segment.kv.keys[index, :, where] = keys[part].transpose(0, 1)
            segment.kv.values[index, :, where] = values[part].transpose(0, 1)
            # The queries of a group share their key head: the group is laid out as more rows.
            asked = queries[part].transpose(0, 1).reshape(c.kv_heads, -1, c.head_dim)
            seen = F.scaled_dot_product_attention(
                asked[None],
                segment.kv.keys[None, index, :, : mask.shape[1]],
                segment.kv.values[None, index, :, : mask.shape[1]],
                attn_mask=mask,
            )
            seen = seen.view(c.heads, segment.rows, c.head_dim).transpose(0, 1)
            result[part] = seen.reshape(segment.rows, -1)
        return result
