"""What computes: all on which the bits of scores and KV depend, the weights aside.

Two engines of one fingerprint and one model compute the same bits; of others nothing is promised.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

from sdcpd.engine.runner import Runner

ARITHMETIC = 2
"""Of our own code: raised with every change after which a bit of a score or of KV may differ."""


def fingerprint(runner: Runner) -> str:
    """Device, dtype, torch, threads, the shape of passes, and that which `config.json` gives."""
    model, shape = runner.model, runner.shape
    weights = hashlib.sha256(repr(model.config).encode()).hexdigest()[:16]
    keys = "-".join(map(str, shape.keys))
    rows = "-".join(map(str, shape.buckets or (shape.rows,)))
    parts = [
        _device(model.device),
        str(model.dtype).removeprefix("torch."),
        f"torch-{torch.__version__}",
        "compiled" if runner.compiled is not None else "eager",
        f"threads-{torch.get_num_threads()}",
        f"arithmetic-{ARITHMETIC}",
        f"rows-{rows}" + (f"-keys-{keys}" if keys else ""),
        f"shape-{weights}",
        *([f"parallel-{model.shard.count}"] if model.shard.count > 1 else []),
    ]
    return ";".join(parts)


def _device(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    # Libraries choose their kernels by more than the instructions that there are.
    return f"cpu-{torch.backends.cpu.get_cpu_capability()}-{_cpu_name()}"


def _cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return "-".join(next(names, platform.processor() or platform.machine()).split())
