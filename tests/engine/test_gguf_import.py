"""`sdcpctl models import`: a GGUF file becomes the directory that it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from sdcpd.engine.api import ModelError
from sdcpd.engine.gguf_import import import_gguf
from sdcpd.engine.runner import Feed
from sdcpd.engine.tokenizer import TextModel
from tests.engine.conftest import COMMON, runner_of
from tests.kit.dev import PAIR

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a projection as that format has them for this family: halves of a head in turns."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def written(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama") -> Path:
    """The model and the bundled tokenizer as a GGUF file, unquantised."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = json.loads((PAIR / "target" / "tokenizer.json").read_text())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    merges = [" ".join(one) if isinstance(one, list) else one for one in vocabulary["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = {name: one.numpy() for name, one in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for name, other in NAMES.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            if (count := heads.get(name.rpartition(".")[2])) is not None:
                weight = interleaved(weight, count)
            writer.add_tensor(f"blk.{layer}.{other}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(4)
    vocabulary = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json")).get_vocab_size()
    config = LlamaConfig(**{**COMMON, "vocab_size": vocabulary}, tie_word_embeddings=False)
    return LlamaForCausalLM(config).eval()


@pytest.mark.slow
def test_the_directory_is_the_model(tmp_path: Path, model: LlamaForCausalLM) -> None:
    file, out = written(tmp_path / "tiny.gguf", model), tmp_path / "models" / "tiny"
    told: list[str] = []
    import_gguf(file, out, dtype="float32", report=told.append)
    assert told[0] == "reading tiny.gguf" and told[1].startswith("writing ")
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]
    text = TextModel.load(out)
    ids = text.encode("The old lighthouse stood at the end of the road.")
    assert text.decode(ids) == "The old lighthouse stood at the end of the road."
    assert text.chat_prompt([{"role": "user", "content": "hello"}]) == "<user>hello"
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    runner = runner_of(out)
    got = runner.run([Feed(runner.new_kv(), ids, len(ids))])[0]
    assert torch.allclose(got, wanted, rtol=2e-4, atol=2e-4 * float(wanted.abs().max()))
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    with pytest.raises(ModelError, match="exists already"):
        import_gguf(file, out, dtype="float32", report=told.append)


@pytest.mark.parametrize(
    ("octets", "told"),
    [(None, "not readable"), (b"", "no GGUF file"), (b"PK\3\4", "no GGUF file")],
)
def test_what_is_no_gguf_file_leaves_nothing(
    tmp_path: Path, octets: bytes | None, told: str
) -> None:
    file = tmp_path / "x.gguf"
    if octets is not None:
        file.write_bytes(octets)
    with pytest.raises(ModelError, match=told):
        import_gguf(file, tmp_path / "out", dtype="bfloat16", report=lambda _: None)
    assert list(tmp_path.iterdir()) == ([] if octets is None else [file])


@pytest.mark.slow
@pytest.mark.parametrize("cut", [8, 400, 20_000])
def test_a_file_that_is_cut_short_leaves_nothing(
    tmp_path: Path, model: LlamaForCausalLM, cut: int
) -> None:
    file = written(tmp_path / "tiny.gguf", model)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ModelError, match="cannot be read") as raised:
        import_gguf(file, tmp_path / "out", dtype="bfloat16", report=lambda _: None)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == [file]
