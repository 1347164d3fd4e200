"""Small random models in Hugging Face directories, one a family."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sdcpd.engine.api import Draft, EngineInfo
from sdcpd.engine.drafters import ModelDrafter
from sdcpd.engine.load import load_target
from sdcpd.engine.model import LlamaModel
from sdcpd.engine.model_config import read_config
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.runner import Runner
from sdcpd.engine.weights import Weights
from sdcpd.protocol.sparse import SparseRows
from tests.kit.spied_target import Spied

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
WINDOW = 33  # shorter than the texts of the tests
GEMMA = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True)),
    "llama3-untied": lambda: LlamaForCausalLM(
        LlamaConfig(**COMMON, tie_word_embeddings=False, rope_parameters=LLAMA3)
    ),
    "llama-linear": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters=LINEAR)),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**COMMON, sliding_window=None, head_dim=24)
    ),
    "mistral-sliding": lambda: MistralForCausalLM(
        MistralConfig(**COMMON, sliding_window=WINDOW, head_dim=16)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, tie_word_embeddings=False)),
    "qwen2-sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "llama-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True)
    ),
    "qwen3-biased": lambda: Qwen3ForCausalLM(
        Qwen3Config(**COMMON, head_dim=32, attention_bias=True)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON,
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=GEMMA,
        )
    ),
}


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(transformers model, its directory)"""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = FAMILIES[request.param]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Llama whose scores are far apart, so that greedy choices are clear."""
    torch.set_num_threads(1)
    torch.manual_seed(6)
    model = FAMILIES["llama"]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    directory = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")  # only its digest is asked for
    return model, directory


def drafter_of(directory: Path, *, model: bytes = b"m", fingerprint: str = "here") -> ModelDrafter:
    """A drafter with a directory's weights; its digests are made up."""
    runner = runner_of(directory)
    info = EngineInfo("tiny", model, b"t", runner.model.config.vocab, 512, fingerprint, True)
    return ModelDrafter(runner, info)


def dense(draft: Draft) -> bytes:
    """The rows that a drafter sampled from, as the object that they are."""
    assert isinstance(draft.q_rows, SparseRows)
    return bytes(draft.q_rows.dense())


def runner_of(directory: Path, dtype: torch.dtype = torch.float32) -> Runner:
    """A runner over a directory's weights on the CPU."""
    config = read_config(directory)
    return Runner(LlamaModel(config, Weights(directory, dtype), device=torch.device("cpu")))


@pytest.fixture
async def spied(tiny: tuple[Any, Path]) -> AsyncIterator[Spied]:
    """A target of the small model, looked at."""
    engine = load_target(ModelSettings(tiny[1], threads=1), report=lambda _: None)
    yield Spied(engine)
    await engine.aclose()
