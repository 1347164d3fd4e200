"""Model directories as people have them: older keys, shards, other dtypes, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdcpd.engine.api import ModelError
from sdcpd.engine.model_config import FAMILIES, ModelConfig, read_config
from sdcpd.engine.rope import LinearScaling, Rope
from sdcpd.engine.runner import Feed
from sdcpd.engine.self_check import choose_shape
from sdcpd.engine.weights import Weights
from tests.engine.conftest import FAMILIES as MADE
from tests.engine.conftest import WINDOW, runner_of

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 160,
}


def read(folder: Path, architecture: str, **members: Any) -> ModelConfig:
    (folder / "config.json").write_text(
        json.dumps({**SHAPE, "architectures": [architecture], **members})
    )
    return read_config(folder)


def test_every_supported_architecture_is_held_against_transformers() -> None:
    made = {type(make()).__name__ for make in MADE.values()}
    assert made == set(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma3", "mistral-sliding", "qwen3"])
def test_rows_do_not_depend_on_their_batch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With windows and norms of heads too; beyond a window and a block of keys."""
    torch.manual_seed(3)
    model = MADE[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    assert choose_shape(runner_of(tmp_path, dtype))


def test_shards_are_one_model(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model, whole = tiny
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    text = list(range(3, 60))
    one, other = (
        runner_of(directory).run([Feed(runner_of(directory).new_kv(), text, 4)])[0]
        for directory in (whole, tmp_path)
    )
    assert torch.equal(one, other)


def test_half_precision_is_that_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = MADE["qwen3"]().half().eval()
    model.save_pretrained(tmp_path)
    assert read_config(tmp_path).dtype == torch.float16
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        wanted = model(ids).logits[0, -1].float()
    runner = runner_of(tmp_path, torch.float16)
    got = runner.run([Feed(runner.new_kv(), ids[0].tolist(), 1)])[0][0]
    assert torch.allclose(got, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def test_weights_are_copies_and_are_taken_once(tiny: tuple[Any, Path]) -> None:
    told: list[str] = []
    weights = Weights(tiny[1], torch.float32, report=told.append)
    weights._reported -= 60
    name = "model.norm.weight"
    assert name in weights
    norm = weights.pop(name)
    assert name not in weights and told and told[0].startswith("weights ")
    again = Weights(tiny[1], torch.float32).pop(name)
    assert torch.equal(norm, again)
    norm.zero_()
    assert torch.equal(Weights(tiny[1], torch.float32).pop(name), again)
    with pytest.raises(KeyError):
        weights.pop(name)


def test_tensors_that_nobody_uses_are_refused(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    """A bias or a norm that is left out changes every token, and no message would say so."""
    extra = {"model.layers.0.mlp.extra.bias": torch.zeros(4), "sinks": torch.zeros(4)}
    tensors = {name: one.contiguous() for name, one in tiny[0].state_dict().items()}
    tensors.pop("lm_head.weight", None)
    shutil.copy(tiny[1] / "config.json", tmp_path)
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file({**tensors, **rotary}, tmp_path / "model.safetensors")
    runner_of(tmp_path)
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model.layers.0.mlp.extra.bias' and 1 more, for which"):
        runner_of(tmp_path)


def test_json_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="not readable as JSON"):
        read_config(tmp_path)


def test_keys_of_older_files(tmp_path: Path) -> None:
    """Before `rope_parameters` and `layer_types`, and without what Gemma's code assumes."""
    gemma = read(
        tmp_path,
        "Gemma3ForCausalLM",
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=512,
        head_dim=16,
    )
    assert gemma.windows == (512,) * 5 + (None,)
    assert gemma.ropes[0] == Rope(10000.0) and gemma.ropes[5] == Rope(1e6, LinearScaling(8.0))
    assert (gemma.attention_scale, gemma.embedding_scale, gemma.tied) == (1 / 16, 8.0, True)
    assert gemma.activation == "gelu_tanh" and gemma.norm_eps == 1e-6
    qwen = read(
        tmp_path,
        "Qwen2ForCausalLM",
        rope_theta=1e6,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=4,
    )
    assert qwen.windows == (None,) * 4 + (WINDOW,) * 2
    off = read(tmp_path, "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=WINDOW)
    assert off.windows == (None,) * 6
    mistral = read(tmp_path, "MistralForCausalLM", sliding_window=None)
    assert mistral.windows == (None,) * 6
    llama = read(tmp_path, "LlamaForCausalLM", sliding_window=WINDOW)
    assert llama.windows == (None,) * 6, "its code knows no window"


@pytest.mark.parametrize(
    ("architecture", "members", "told"),
    [
        ("MixtralForCausalLM", {}, "a mixture of experts"),
        ("Qwen3MoeForCausalLM", {}, "a mixture of experts"),
        ("LlamaForCausalLM", {"num_local_experts": 8}, "a mixture of experts"),
        ("Gemma3ForConditionalGeneration", {}, "takes images"),
        ("GPT2LMHeadModel", {}, "architecture GPT2LMHeadModel is not supported; supported are"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "weights (gptq)"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scaling yarn"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "in both directions"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "the activation relu"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0"),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "layer_types": []},
         "layer_types names 0 layers of 6"),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True,
                              "layer_types": ["chunked_attention"] * 6}, "names chunked_attention"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("LlamaForCausalLM", {"rope_parameters": ["default"]}, "a key has a wrong value"),
        ("LlamaForCausalLM", {"hidden_size": float("inf")}, "a key has a wrong value"),
        ("LlamaForCausalLM", {"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776"),
        ("LlamaForCausalLM", {"head_dim": 7}, "sizes do not fit each other (heads 4 of 7"),
        ("LlamaForCausalLM", {"num_key_value_heads": -4}, "sizes do not fit"),
        ("LlamaForCausalLM", {"architectures": {"0": "LlamaForCausalLM"}}, "(none named)"),
    ],
)  # fmt: skip
def test_what_is_unsupported_is_named(
    architecture: str, members: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as raised:
        read(tmp_path, architecture, **members)
    text = str(raised.value)
    assert told in text and text.count("\n") == 0 and str(tmp_path / "config.json") in text
