"""The shape of a decoder-only model, from the `config.json` of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdcpd.engine.api import ModelError
from sdcpd.engine.model_files import read_json, require
from sdcpd.engine.rope import Rope, ropes_of, unsupported_scaling

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SLIDING, WHOLE = "sliding_attention", "full_attention"
LAYERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's code does that its `config.json` does not say."""

    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    """Norms also after attention and MLP, weights counted from 1, embeddings scaled, tied heads."""
    window_named: str = "sliding_window"
    """The key that says whether layers have a window at all."""


FAMILIES = {
    "LlamaForCausalLM": Family(window_named=""),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_named="use_sliding_window"),
    "Qwen3ForCausalLM": Family(qk_norm=True, window_named="use_sliding_window"),
    "Gemma3ForCausalLM": Family(qk_norm=True, gemma=True),
}
"""Supported architectures: Llama 2 and 3.x, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3, Gemma 3."""

_GEMMA_DEFAULTS: dict[str, Any] = {
    # What the files of this family leave out, since it is what the family's code assumes.
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_max: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    """Of each layer."""
    windows: tuple[int | None, ...]
    """Of each layer: how many positions back it attends, its own included; None for all."""
    family: Family
    tied: bool
    activation: str
    attention_scale: float
    embedding_scale: float | None
    bos: int | None
    eos: tuple[int, ...]
    dtype: torch.dtype


def read_config(directory: Path) -> ModelConfig:
    """Read and check `config.json`; raises ModelError naming what is unsupported."""
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist; check the path")
    path = require(directory / "config.json", "the model's shape")
    raw = read_json(path)
    names = raw.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "(none named)"
    try:
        why, config = _unsupported(architecture, raw), None
        if why is None:
            config = _shape(raw, architecture)
    except KeyError as e:
        raise ModelError(f"{path}: key {e} is missing; fetch the file again") from e
    except (AttributeError, TypeError, ValueError, ArithmeticError) as e:
        raise ModelError(f"{path}: a key has a wrong value ({e}); fetch the file again") from e
    if config is None:
        raise ModelError(f"{path}: {why}")
    sizes = (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim)
    if (
        min(*sizes, config.vocab, config.context_max) < 1
        or config.heads % config.kv_heads
        or config.head_dim % 2
    ):
        raise ModelError(
            f"{path}: sizes do not fit each other (heads {config.heads} of {config.head_dim}, key "
            f"heads {config.kv_heads}, hidden {config.hidden}); fetch the file again"
        )
    return config


def _unsupported(architecture: str, raw: Mapping[str, Any]) -> str | None:
    """Why sdcpd cannot run a model, None if it can."""
    if "Moe" in architecture or "Mixtral" in architecture or raw.get("num_local_experts"):
        return f"{architecture} is a mixture of experts, which is not supported; take a dense model"
    if architecture == "Gemma3ForConditionalGeneration":
        return (
            f"{architecture} also takes images, which is not supported; take a directory of its "
            "text model (Gemma3ForCausalLM)"
        )
    if architecture not in FAMILIES:
        return (
            f"architecture {architecture} is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        kind = f" ({method})" if method else ""
        return f"quantised weights{kind} are not supported; use the bf16 original"
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if raw.get(key) is not None:
            return f"{key} is not supported"
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        return "heads that are turned in part only (partial_rotary_factor) are not supported"
    if raw.get("use_bidirectional_attention"):
        return "attention in both directions is not supported: this is no model that writes text"
    if (scaling := unsupported_scaling(raw)) is not None:
        return f"the rope scaling {scaling} is not supported; supported are linear and llama3"
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        return f"the activation {activation} is not supported; supported are {known}"
    return None


def _shape(raw: Mapping[str, Any], architecture: str) -> ModelConfig:
    family = FAMILIES[architecture]
    if family.gemma:
        raw = {**_GEMMA_DEFAULTS, **{key: one for key, one in raw.items() if one is not None}}
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    if heads < 1:
        raise ValueError(f"num_attention_heads is {heads}")
    layers = int(raw["num_hidden_layers"])
    if not 1 <= layers <= LAYERS_MAX:
        raise ValueError(f"num_hidden_layers is {layers}")
    head_dim = int(raw.get("head_dim") or hidden // heads)
    windows = _windows(raw, family, layers)
    whole, local = ropes_of(raw)
    eos = raw.get("eos_token_id")
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    activation = str(raw.get("hidden_activation") or raw.get("hidden_act") or "silu")
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=int(raw["intermediate_size"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab=int(raw["vocab_size"]),
        context_max=int(raw.get("max_position_embeddings", 2048)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        ropes=tuple(whole if window is None else local for window in windows),
        windows=windows,
        family=family,
        tied=bool(raw.get("tie_word_embeddings", False)),
        activation=_ACTIVATIONS[activation],
        attention_scale=float(raw["query_pre_attn_scalar"] if family.gemma else head_dim) ** -0.5,
        embedding_scale=hidden**0.5 if family.gemma else None,
        bos=raw.get("bos_token_id"),
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        dtype=DTYPES.get(name, torch.float32),
    )


def _windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    """Each layer's window: by name, by the family's pattern, or of all."""
    window = raw.get("sliding_window")
    switched_on = family.window_named == "sliding_window" or raw.get(family.window_named)
    if not switched_on or window is None:
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is None and family.gemma:
        every = int(raw["sliding_window_pattern"])
        kinds = [WHOLE if (at + 1) % every == 0 else SLIDING for at in range(layers)]
    elif kinds is None:
        # Only those whose windows are switched on by a key of its own say from which layer on.
        by_layer = family.window_named != "sliding_window"
        first = int(raw.get("max_window_layers") or 0) if by_layer else 0
        kinds = [WHOLE if at < first else SLIDING for at in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {layers}")
    if unknown := set(kinds) - {SLIDING, WHOLE}:
        raise ValueError(f"layer_types names {', '.join(map(str, unknown))}")
    if int(window) < 1:
        raise ValueError(f"sliding_window is {window}")
    return tuple(int(window) if kind == SLIDING else None for kind in kinds)
