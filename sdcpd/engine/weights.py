"""A Hugging Face model directory: its config, digests and tensors (D-C9)."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sdcpd.engine.api import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": True,
}
"""Supported architectures, and whether their q, k and v projections have a bias."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.x frequency scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model, from `config.json`."""

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
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    qkv_bias: bool
    bos: int | None
    eos: tuple[int, ...]
    dtype: torch.dtype


def _require(path: Path, what: str) -> Path:
    if not path.is_file():
        raise ModelError(
            f"model directory {path.parent}: {path.name} is missing ({what}); "
            "expected a Hugging Face directory with config.json, *.safetensors and tokenizer.json"
        )
    return path


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{path}: not readable as JSON ({e}); fetch the file again") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object; fetch the file again")
    return value


def read_config(directory: Path) -> ModelConfig:
    """Read and check `config.json`; raises ModelError naming what is unsupported."""
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist; check the path")
    path = _require(directory / "config.json", "the model's shape")
    raw = _json(path)
    names = raw.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture {names[0]} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantised weights are not supported; use the bf16 original")
    if names[0] == "MistralForCausalLM" and raw.get("sliding_window"):
        raise ModelError(f"{path}: sliding-window attention is not supported by sdcpd")
    if raw.get("use_sliding_window"):
        raise ModelError(f"{path}: sliding-window attention is not supported by sdcpd")
    try:
        config = _shape(raw, names[0])
    except KeyError as e:
        raise ModelError(f"{path}: key {e} is missing; fetch the file again") from e
    except (TypeError, ValueError) as e:
        raise ModelError(f"{path}: a key has a wrong value ({e}); fetch the file again") from e
    sizes = (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim)
    if min(*sizes, config.vocab, config.context_max) < 1 or config.heads % config.kv_heads:
        raise ModelError(
            f"{path}: sizes do not fit each other (heads {config.heads}, key heads "
            f"{config.kv_heads}, hidden {config.hidden}); fetch the file again"
        )
    return config


def _shape(raw: dict[str, Any], architecture: str) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    if heads < 1:
        raise ValueError(f"num_attention_heads is {heads}")
    eos = raw.get("eos_token_id")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    return ModelConfig(
        architecture=architecture,
        layers=int(raw["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(raw["intermediate_size"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        vocab=int(raw["vocab_size"]),
        context_max=int(raw.get("max_position_embeddings", 2048)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(rope),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bool(raw.get("attention_bias", ARCHITECTURES[architecture])),
        bos=raw.get("bos_token_id"),
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        dtype={
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
        }.get(name, torch.float32),
    )


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r}")
    return RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def weight_files(directory: Path) -> list[Path]:
    """The `*.safetensors` files, in ascending octet order of name; raises ModelError."""
    files = sorted(directory.glob("*.safetensors"), key=lambda p: p.name.encode())
    if not files:
        _require(directory / "model.safetensors", "the weights")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        for name in sorted(set(_json(index).get("weight_map", {}).values())):
            _require(directory / name, "a weight file named in model.safetensors.index.json")
    return files


def digest_files(paths: list[Path], label: str) -> bytes:
    """SHA-256 of one file, or of the names and digests of several (D-C9)."""
    digests = []
    for path in paths:
        with path.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").digest())
    if len(paths) == 1:
        return digests[0]
    total = hashlib.sha256(label.encode() + b"\0")
    for path, digest in zip(paths, digests, strict=True):
        name = path.name.encode()
        total.update(struct.pack(">I", len(name)) + name + digest)
    return total.digest()


def model_digest(directory: Path) -> bytes:
    """The contract's `target` (or drafter) digest of a directory's weights."""
    return digest_files(weight_files(directory), "SDCP-WEIGHTS-1")


def tokenizer_digest(directory: Path) -> bytes:
    """The contract's `tokenizer` digest."""
    path = _require(directory / "tokenizer.json", "the tokenizer")
    return digest_files([path], "SDCP-TOKENIZER-1")


def load_tensors(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors, floating ones converted to `dtype`; raises ModelError."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a dict)
                    tensor = weights.get_tensor(name)
                    tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        except (SafetensorError, OSError) as e:
            raise ModelError(f"{path}: damaged or incomplete ({e}); fetch the file again") from e
    return tensors
