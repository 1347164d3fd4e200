"""What a cold start takes by the size of the model: a verifier of its own, from exec to READY."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from sdcpd.dev.plan import free_ports
from tests.bench.growth_figures import described
from tests.kit.by_hand import Sdcpd, sdcpctl, tls_lines, write_config
from tests.kit.dev import PAIR

SHAPES = {"30M": (384, 1152, 16, 6, 3), "135M": (576, 1536, 38, 9, 3)}
"""Hidden and intermediate size, layers, heads, heads of keys and values."""
SIZES = ("bundled", *SHAPES)
PHASES = {"load": re.compile(r"weights ([\d.]+) s:"), "check": re.compile(r"self-check ([\d.]+) s")}
LEAST_S = 1.0
WEIGHTS = 0.02  # their standard deviation; what a random model writes is no matter


def random_model(directory: Path, shape: tuple[int, int, int, int, int]) -> Path:
    """A Llama of that shape in bfloat16, with the bundled tokenizer."""
    hidden, inter, layers, heads, kv_heads = shape
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(PAIR / "target" / name)
    config = json.loads((PAIR / "target" / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"head_dim": hidden // heads}
    (directory / "config.json").write_text(json.dumps(config))
    kv = kv_heads * hidden // heads
    sizes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        parts = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
        parts |= {"self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
        parts |= {"mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden)}
        parts |= {"mlp.down_proj": (hidden, inter)}
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in parts.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        sizes |= {f"model.layers.{layer}.{name}": (hidden,) for name in norms}
    tensors = {f"{name}.weight": _tensor(size) for name, size in sizes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def _tensor(size: tuple[int, ...]) -> torch.Tensor:
    random = torch.randn(size) * WEIGHTS if len(size) > 1 else torch.ones(size)
    return random.to(torch.bfloat16)


def one_start(folder: Path, config: Path) -> dict[str, float]:
    """Seconds from exec to READY, and of what the log tells."""
    begin = time.monotonic()
    process = Sdcpd(folder, "verifier-v0", config=config)
    try:
        process.wait_notified("READY=1")
        ready_s = time.monotonic() - begin
    finally:
        process.stop()
    found = {"ready_s": ready_s}
    for name, line in PHASES.items():
        (seconds,) = line.findall(process.log)
        found[f"{name}_s"] = float(seconds)
    found["rest_s"] = ready_s - found["load_s"] - found["check_s"]
    return found


def one_size(name: str) -> dict[str, Any]:
    """A first start, and a second, which knows the digest of the weights."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape = SHAPES.get(name)
        model = random_model(folder / "model", shape) if shape else PAIR / "target"
        router, own = (f"https://127.0.0.1:{port}/" for port in free_ports(2))
        made = sdcpctl(
            *("certs", "init", "--trust-domain", "bench", f"verifier/v0={own}"), cwd=folder
        )
        assert made.returncode == 0, made.stderr
        lines = [*tls_lines(made.stdout), "[admin]", f'socket = "{folder}/admin.sock"']
        lines += ["[verifier]", f'listen = "{own[8:-1]}"', f'base_uri = "{own}"']
        lines += [f'router = "{router}"', "[verifier.model]", f'path = "{model}"']
        config = write_config(folder / "sdcpd.toml", lines)
        with patch.dict(os.environ, {"XDG_CACHE_HOME": scratch}):
            starts = [one_start(folder, config) for _ in range(2)]
        octets = (model / "model.safetensors").stat().st_size
    return {"model": name, "parameters": octets // 2, "first": starts[0], "second": starts[1]}


def measure(sizes: Sequence[str] = SIZES) -> list[dict[str, Any]]:
    """One row a model."""
    return [one_size(name) for name in sizes]


def table(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Cells by row, the head first."""
    rows = [["parameters", "to READY s", "load s", "self-check, warm-up, digest s", "rest s"]]
    rows[0] += ["second start s", "its self-check s"]
    for one in found:
        times = [one["first"][name] for name in ("ready_s", "load_s", "check_s", "rest_s")]
        again = (one["second"]["ready_s"], one["second"]["check_s"])
        cells = [f"{value:.2f}" for value in (*times, *again)]
        rows.append([f"{one['parameters'] / 1e6:.1f}M", *cells])
    return rows


def sentences(found: Sequence[dict[str, Any]]) -> list[str]:
    """What grows how with the model."""
    sizes = [round(one["parameters"] / 1e6) for one in found]
    lines = []
    for name, what in (
        ("ready_s", "The time from exec to READY"),
        ("load_s", "Of it, loading"),
        ("check_s", "Of it, the self-check with warm-up and digest"),
        ("rest_s", "Of it, the rest (imports, certificates, listening)"),
    ):
        times = [one["first"][name] for one in found]
        told = described(sizes, times, "s", "million parameter")
        # The log tells tenths, of which a growth of less than a second is made of a few.
        short = max(times) < LEAST_S
        lines.append(f"{what} {f'takes at most {max(times):.1f} s' if short else told}.")
    first, second = ([one[which]["ready_s"] for one in found] for which in ("first", "second"))
    lines.append(
        f"A second start, which remembers the digest, took {second[0]:.1f} s with the smallest "
        f"model, against {first[0]:.1f} s, and {second[-1]:.1f} s with the largest, against "
        f"{first[-1]:.1f} s."
    )
    return lines
