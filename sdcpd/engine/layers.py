"""The weights of a model's layers, taken from a directory's tensors and laid out for passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sdcpd.engine.api import ModelError
from sdcpd.engine.linear import Linear
from sdcpd.engine.model_config import ModelConfig
from sdcpd.engine.shard import Shard


class Tensors(Protocol):
    """Where tensors are taken from, by their names in Hugging Face's files."""

    def __contains__(self, name: str) -> bool: ...

    def pop(self, name: str) -> torch.Tensor:
        """Take one out; raises KeyError."""
        ...

    def names(self) -> Sequence[str]:
        """Those that were not taken."""
        ...


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


class Loader:
    """Takes a model's tensors, checks their shapes, and keeps the part that is this process's."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        *,
        device: torch.device,
        shard: Shard,
        lay_out: bool,
    ) -> None:
        """`config` is the whole model's; `lay_out` as Linear has it."""
        self._lay_out = lay_out
        self._config, self._tensors, self._device, self._shard = config, tensors, device, shard

    def take(self, name: str) -> torch.Tensor:
        """A tensor of any shape; raises ModelError if there is none."""
        try:
            return self._tensors.pop(name).to(self._device)
        except KeyError:
            raise ModelError(
                f"the weights hold no tensor {name!r}, which {self._config.architecture} with "
                f"{self._config.layers} layers needs; config.json and weights do not belong "
                "together"
            ) from None

    def whole(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of that shape; raises ModelError."""
        tensor = self.take(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name!r} has the shape {list(tensor.shape)}, config.json asks for "
                f"{list(shape)}; config.json and weights do not belong together"
            )
        return tensor

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A linear layer, laid out as this model's are."""
        return Linear(weight, bias, lay_out=self._lay_out)

    def check_nothing_left(self) -> None:
        """Raise ModelError for tensors that were not taken and mean something."""
        if left := [name for name in self._tensors.names() if not _is_known_extra(name)]:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"the weights also hold {left[0]!r}{others}, for which "
                f"{self._config.architecture} as it is known here has no use: it would not write "
                "what it was trained to"
            )

    def layer(self, index: int) -> Layer:
        """A layer's weights; raises ModelError."""
        c = self._config
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        rows, kept = c.heads * c.head_dim, c.kv_heads * c.head_dim
        gemma, normed = c.family.gemma, c.family.qk_norm

        def norm(name: str, *, there: bool = True, size: int = c.hidden) -> torch.Tensor | None:
            return self.whole(f"{at}{name}.weight", size) if there else None

        before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        return Layer(
            norm_in=self.whole(at + "input_layernorm.weight", c.hidden),
            norm_q=norm("self_attn.q_norm", there=normed, size=c.head_dim),
            norm_k=norm("self_attn.k_norm", there=normed, size=c.head_dim),
            norm_attended=norm("post_attention_layernorm", there=gemma),
            norm_out=norm("post_feedforward_layernorm", there=gemma),
            qkv=self._outputs(
                attention,
                {"q_proj": rows, "k_proj": kept, "v_proj": kept},
                biased=c.family.qkv_bias,
            ),
            out=self._inputs(attention, "o_proj", rows),
            norm_mlp=self.whole(f"{at}{before_mlp}.weight", c.hidden),
            gate_up=self._outputs(mlp, dict.fromkeys(("gate_proj", "up_proj"), c.intermediate)),
            down=self._inputs(mlp, "down_proj", c.intermediate),
        )

    def _outputs(self, at: str, sizes: dict[str, int], *, biased: bool = False) -> Linear:
        """Linear layers side by side, divided along their outputs."""
        cut, hidden = self._shard.slice, self._config.hidden
        weights = [
            cut(self.whole(f"{at}{name}.weight", size, hidden), 0) for name, size in sizes.items()
        ]
        if not biased and f"{at}{next(iter(sizes))}.bias" not in self._tensors:
            return self.linear(torch.cat(weights))
        biases = [cut(self.whole(f"{at}{name}.bias", size), 0) for name, size in sizes.items()]
        return self.linear(torch.cat(weights), torch.cat(biases))

    def _inputs(self, at: str, name: str, size: int) -> Linear:
        """A linear layer divided along its inputs: one process adds the bias."""
        hidden = self._config.hidden
        weight = self._shard.slice(self.whole(f"{at}{name}.weight", hidden, size), 1)
        if f"{at}{name}.bias" not in self._tensors:
            return self.linear(weight)
        bias = self.whole(f"{at}{name}.bias", hidden)
        return self.linear(weight, bias if self._shard.rank == 0 else None)


def _is_known_extra(name: str) -> bool:
    """Whether a tensor may be there and says nothing that the others or the shape do not."""
    return name in ("lm_head.weight", "t2d") or name.endswith(("inv_freq", "masked_bias"))
