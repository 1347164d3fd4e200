"""A GGUF file in bf16 of the same weights as a Hugging Face directory of a small Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from safetensors import deserialize

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Path, file: Path) -> None:
    """For a byte-level tokenizer that splits as SmolLM's does; other models are not understood."""
    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(file, "llama")
    _add_config(writer, config)
    _add_tokenizer(writer, config, json.loads((model / "tokenizer.json").read_text()))
    for part in sorted(model.glob("*.safetensors")):
        for name, tensor in deserialize(part.read_bytes()):  # type: ignore[no-untyped-call]
            _add_tensor(writer, name.removesuffix(".weight"), tensor, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_name("benchmark")
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    model = tokenizer["model"]
    special = {one["id"] for one in tokenizer["added_tokens"] if one["special"]}
    tokens = {**model["vocab"], **{one["content"]: one["id"] for one in tokenizer["added_tokens"]}}
    ordered = sorted(tokens, key=lambda token: int(tokens[token]))
    assert [tokens[token] for token in ordered] == list(range(config["vocab_size"])), "gaps"
    kinds = [TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(len(ordered))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(ordered)
    writer.add_token_types(kinds)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _add_tensor(
    writer: GGUFWriter, name: str, tensor: dict[str, Any], config: dict[str, Any]
) -> None:
    assert tensor["dtype"] == "BF16", f"{name} is {tensor['dtype']}"
    halves = np.frombuffer(tensor["data"], dtype=np.uint16).reshape(tensor["shape"])
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    inside = name.startswith("model.layers.")
    target = f"blk.{layer}.{_NAMES[rest]}.weight" if inside else f"{_NAMES[name]}.weight"
    if halves.ndim == 1:  # llama.cpp wants norms in binary32
        writer.add_tensor(target, (halves.astype(np.uint32) << 16).view(np.float32))
        return
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if inside and _NAMES[rest] in heads:
        halves = _interleaved(halves, config[heads[_NAMES[rest]]])
    octets = np.ascontiguousarray(halves).view(np.uint8)
    writer.add_tensor(target, octets, raw_dtype=GGMLQuantizationType.BF16)


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring rows of a head together; Hugging Face row i and i + half."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)
