"""Checks and times the engine on one GPU, in under ten minutes.

    python -m tests.device.run [DIR] [-o json]

1. Memory registered with CUDA (the pinned tier's device test).
2. The bundled pair in binary32 and bfloat16: the self-check, compiled and not; the greedy texts of
   the GPU in binary32 against those of the CPU; `sdcpctl verify-exact` over its matrix.
3. Milliseconds a pass, eager and compiled with graphs, of DIR, or of a random model of the shape of
   Llama 3.2 1B: for 1, 16, 64 and 128 rows, and for 16 sessions.

Every part is told as it ends, and one that fails does not end the others; the exit code says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sdcpd.engine.api import Prefix, Score
from sdcpd.engine.load import load_target
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.runner import Feed, Runner
from sdcpd.protocol.messages import Sampling

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "sdcpd" / "dev" / "pair"
CONTEXT, RUNS = 512, 20
GREEDY = Sampling(temperature_milli=0)
SHAPE_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


def settings(directory: Path, dtype: str, device: str, compiled: bool) -> ModelSettings:
    return ModelSettings(directory, device=device, dtype=dtype, compile=compiled)


def pinned() -> dict[str, Any]:
    """The device test of the pinned tier."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "tests/tiers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return {"said": done.stdout.strip().splitlines()[-1]}


async def _written(directory: Path, dtype: str, device: str, compiled: bool) -> dict[str, Any]:
    said: list[str] = []
    target = load_target(settings(directory, dtype, device, compiled), report=said.append)
    texts = []
    for number, prompt in enumerate(([5, 6, 7], list(range(3, 90)), [9] * 200)):
        tokens = list(prompt)
        for done in range(48):
            prefix = Prefix(tokens, len(tokens), len(prompt))
            work = Score(b"%d" % number, 1, prefix, (), 1, GREEDY, done)
            tokens.append((await target.score(work)).additional)
        texts.append(tokens)
    exact, shape = target.info.exact, target.info.fingerprint
    await target.aclose()
    return {"texts": texts, "exact": exact, "fingerprint": shape, "said": said}


def pair() -> dict[str, Any]:
    """The bundled target on the GPU: independent rows, and the CPU's texts."""
    found: dict[str, Any] = {}
    cpu = asyncio.run(_written(PAIR / "target", "float32", "cpu", False))
    for dtype in ("float32", "bfloat16"):
        for compiled in (False, True):
            name = f"{dtype} {'compiled' if compiled else 'eager'}"
            gpu = asyncio.run(_written(PAIR / "target", dtype, "cuda:0", compiled))
            same = [a == b for a, b in zip(gpu["texts"], cpu["texts"], strict=True)]
            found[name] = {
                "exact": gpu["exact"],
                "fingerprint": gpu["fingerprint"],
                "texts as on the CPU": f"{sum(same)} of {len(same)}",
            }
            assert gpu["exact"], f"{name}: rows depend on their batch"
            assert dtype != "float32" or all(same), f"{name}: other texts than the CPU's"
    return found


def matrix() -> dict[str, Any]:
    """`sdcpctl verify-exact` on the bundled target."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-m", "cli", "verify-exact", str(PAIR / "target")]
        command += ["--device", "cuda:0", "--dtype", dtype, "--m-max", "4", "--tokens", "16"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        found[dtype] = done.stdout.strip().splitlines()[-1]
    return found


def random_model(directory: Path) -> Path:
    """Weights that mean nothing, in the shape of a model that people run."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    hidden, inner, kept = 2048, 8192, 512

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": weight(128256, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    for layer in range(16):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kept, hidden),
            "self_attn.v_proj": (kept, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            tensors[f"{at}{name}.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(hidden).bfloat16()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(SHAPE_1B))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def _timed(runner: Runner, sessions: int, rows: int) -> float:
    kvs = []
    for _ in range(sessions):
        kv = runner.new_kv()
        while len(kv.tokens) < CONTEXT:
            runner.run([Feed(kv, [7] * 128)])
        kvs.append(kv)
    taken = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        runner.run([Feed(kv, [5] * rows, rows) for kv in kvs])
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - begin))
        for kv in kvs:
            kv.match([7] * CONTEXT, CONTEXT)
    for kv in kvs:
        kv.free()
    return round(median(taken), 2)


def passes(directory: Path) -> dict[str, Any]:
    """Milliseconds a pass."""
    found: dict[str, Any] = {}
    for compiled in (False, True):
        begin = time.monotonic()
        target = load_target(settings(directory, "bfloat16", "cuda:0", compiled), report=print)
        runner = target._runner
        found["compiled" if compiled else "eager"] = {
            "ready after s": round(time.monotonic() - begin, 1),
            "exact": target.info.exact,
            **{f"{rows} rows": _timed(runner, 1, rows) for rows in (1, 16, 64, 128)},
            "16 sessions": _timed(runner, 16, 1),
        }
        asyncio.run(target.aclose())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("-o", choices=["text", "json"], default="text")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; there is nothing to check")
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or random_model(Path(scratch))
        parts: dict[str, Callable[[], Any]] = {
            "pinned memory": pinned,
            "the bundled target": pair,
            "verify-exact": matrix,
            "ms a pass": lambda: passes(directory),
        }
        for name, part in parts.items():
            begin = time.monotonic()
            try:
                results[name] = part()
            except Exception as e:
                results[name], failed = {"FAILED": f"{type(e).__name__}: {e}"}, True
            print(f"{name} ({time.monotonic() - begin:.0f} s)", file=sys.stderr)
            if options.o == "text":
                print(json.dumps({name: results[name]}, indent=1), flush=True)
    if options.o == "json":
        print(json.dumps(results, indent=1))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
