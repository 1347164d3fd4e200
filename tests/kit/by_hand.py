"""What an operator does by hand: a model directory, files, commands, processes and their ends."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

START_S = 40.0
STOP_S = 10.0
VOCAB = 272
_HIDDEN, _INTER = 32, 64
_PR_SET_MDWE, _PR_MDWE_REFUSE_EXEC_GAIN = 65, 1


def write_model(directory: Path, *, architecture: str = "LlamaForCausalLM") -> Path:
    """A random Llama of one layer with a tokenizer that knows octets only."""
    directory.mkdir(parents=True)
    config = {
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTER,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": VOCAB - 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> Any:
        return rng.normal(0.0, 0.5, (rows, columns)).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, _HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCAB, _HIDDEN),
        f"{layer}input_layernorm.weight": ones,
        f"{layer}post_attention_layernorm.weight": ones,
        f"{layer}mlp.gate_proj.weight": matrix(_INTER, _HIDDEN),
        f"{layer}mlp.up_proj.weight": matrix(_INTER, _HIDDEN),
        f"{layer}mlp.down_proj.weight": matrix(_HIDDEN, _INTER),
    }
    for name in ("q", "k", "v", "o"):
        tensors[f"{layer}self_attn.{name}_proj.weight"] = matrix(_HIDDEN, _HIDDEN)
    save_file(tensors, directory / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    vocab |= {f"<{i}>": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def sdcpctl(
    *arguments: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the real command."""
    clean = {k: v for k, v in os.environ.items() if k not in ("SDCPCTL_ENDPOINT", "NO_COLOR")}
    root = str(Path(__file__).parents[2])
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [root, clean.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        cwd=cwd,
        env=clean | (environment or {}),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


class Sdcpd:
    """One `sdcpd` process, as its supervisor sees it."""

    def __init__(
        self, directory: Path, *roles: str, config: Path, refuse_executable_memory: bool = False
    ) -> None:
        label = "+".join(roles)
        self.config = config
        self.log_path = directory / f"{config.stem}.{label}.log"
        self.notified: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify = directory / f"{config.stem}.{label}.notify"
        notify.unlink(missing_ok=True)  # of one that was killed
        self._socket.bind(str(notify))
        self._socket.setblocking(False)
        arguments = [part for role in roles for part in ("--role", role)]
        environment = {k: v for k, v in os.environ.items() if k != "JOURNAL_STREAM"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sdcpd", *arguments, "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | {"NOTIFY_SOCKET": str(notify)},
                preexec_fn=_refuse_executable_memory if refuse_executable_memory else None,
            )

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.log_path.read_text()

    def wait_notified(self, message: str, *, count: int = 1) -> None:
        """Wait until it has told its supervisor something `count` times."""
        deadline = time.monotonic() + START_S
        while sum(line.startswith(message) for line in self.notified) < count:
            select.select([self._socket], [], [], 0.1)
            self._read()
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no {message} from {self.log_path.name}:\n{self.log}")

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        finally:
            self.process.kill()
            self.process.wait()
        self._read()
        self._socket.close()
        return code

    def kill(self) -> None:
        """SIGKILL: it has no say in it."""
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def end(self) -> int:
        """Wait for a process that ends by itself."""
        code = self.process.wait(START_S)
        self._socket.close()
        return code

    def _read(self) -> None:
        while True:
            try:
                self.notified += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = START_S) -> None:
    """Ask again and again until something that others do has come about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        select.select([], [], [], 0.05)


def tls_lines(printed: str) -> list[str]:
    """The part of the configuration that `sdcpctl certs init` tells an operator to write."""
    lines = [line.strip() for line in printed.splitlines()]
    begin = lines.index("[node]")
    return lines[begin : begin + 6]


def write_config(path: Path, sections: Sequence[str]) -> Path:
    """A configuration file."""
    path.write_text("\n".join(sections) + "\n")
    return path


def _refuse_executable_memory() -> None:
    """What MemoryDenyWriteExecute= does; kernels before 6.3 cannot, and then nothing is tested."""
    ctypes.CDLL(None).prctl(_PR_SET_MDWE, _PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0)
