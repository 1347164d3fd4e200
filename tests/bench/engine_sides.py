"""The sides of the engine's benchmark: clusters by drafter, and other engines; one alive at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.bench.engine_gguf import write_gguf
from tests.bench.engine_prompts import Prompt
from tests.kit.dev import Dev, dev

ROOT = Path(__file__).parents[2]
PLAIN, NGRAM, DRAFT = "sdcpd", "sdcpd ngram", "sdcpd draft"
TRANSFORMERS, LOOKUP = "transformers", "transformers lookup"
LLAMA, LLAMA_LOOKUP = "llama.cpp", "llama.cpp lookup"
CLUSTERS = (PLAIN, NGRAM, DRAFT)
ALL = (PLAIN, TRANSFORMERS, NGRAM, LLAMA, DRAFT, LOOKUP, LLAMA_LOOKUP)


OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # peers run with the defaults of their makers


class NotMeasured(Exception):
    """A side that cannot run here; a sentence without its full stop says why."""


@dataclass(frozen=True, slots=True)
class Models:
    """What the sides run, and where."""

    target: Path
    drafter: Path | None
    peer_python: str
    threads: int
    scratch: Path
    lookup_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A text; `digest` is of its tokens."""

    tokens: list[int]
    seconds: float
    digest: str = ""
    passes: int = 0


class Side(Protocol):
    """Whoever makes texts."""

    def check(self, prompt: Prompt) -> None:
        """Assert that the prompt's tokens are what this side makes of its text."""

    def text(self, prompt: Prompt, tokens: int) -> Made:
        """Greedy, and as long as asked."""


class Cluster:
    """A running `sdcpd dev`."""

    def __init__(self, running: Dev) -> None:
        self.running = running

    def check(self, prompt: Prompt) -> None:
        """Nothing: its tokenizer and template made the prompt."""

    def text(self, prompt: Prompt, tokens: int) -> Made:
        found = self.running.generate(prompt.message, tokens, chat=True, ignore_eos=True)
        passes = found["rounds"] + found["self_decoded"]
        return Made(found["tokens"], found["seconds"], found["digest"], passes)


class Peer:
    """A process of `tests.bench.engine_peer`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def check(self, prompt: Prompt) -> None:
        ids = self.ask({"rendered": prompt.rendered})["ids"]
        assert tuple(ids) == prompt.ids, f"other tokens of {prompt.message!r}: {ids}"

    def text(self, prompt: Prompt, tokens: int) -> Made:
        found = self.ask({"ids": prompt.ids, "tokens": tokens})
        return Made(found["tokens"], found["seconds"])

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One line for one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the peer ended; it said:\n{self._log.read_text()[-2000:]}"
        return dict(json.loads(line))


@contextmanager
def open_side(name: str, models: Models, place: Path) -> Iterator[Side]:
    """Start it, and end it; `place` is for its files alone. Raises NotMeasured."""
    place.mkdir(parents=True)
    if name in CLUSTERS:
        with _cluster(_drafter(name, models), models, place) as running:
            yield Cluster(running)
    else:
        with _peer(name, models, place) as peer:
            yield peer


def _drafter(name: str, models: Models) -> str:
    if name != DRAFT:
        return "ngram" if name == NGRAM else "none"
    if models.drafter is None:
        raise NotMeasured("--drafter names no draft model")
    return str(_with_tokenizer(models.drafter, models))


def _with_tokenizer(drafter: Path, models: Models) -> Path:
    """The draft model's directory, or one that has the target's tokenizer as well."""
    if (drafter / "tokenizer.json").is_file():
        return drafter
    whole = models.scratch / "drafter"
    if not whole.is_dir():
        whole.mkdir()
        for file in (drafter / "config.json", *drafter.glob("*.safetensors*")):
            (whole / file.name).symlink_to(file.resolve())
        (whole / "tokenizer.json").symlink_to((models.target / "tokenizer.json").resolve())
    return whole


@contextmanager
def _cluster(drafter: str, models: Models, place: Path) -> Iterator[Dev]:
    arguments = ("--target", str(models.target), "--drafter", drafter)
    with ExitStack() as stack:
        try:
            running = stack.enter_context(dev(place / "state", *arguments))
        except AssertionError as e:
            raise NotMeasured(f"the cluster does not start: {str(e).splitlines()[-1]}") from e
        yield running


@contextmanager
def _peer(name: str, models: Models, place: Path) -> Iterator[Peer]:
    log = place / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            _peer_command(name, models),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in OPENMP},
        )
    with process:  # leaving closes its input, at which it ends
        peer = Peer(process, log)
        if missing := peer.hear().get("missing"):
            raise NotMeasured(f"{missing} is not installed")
        yield peer


def _peer_command(name: str, models: Models) -> list[str]:
    python, model = sys.executable, models.target
    if name in (LLAMA, LLAMA_LOOKUP):
        python, model = models.peer_python, models.scratch / "target.gguf"
        if not model.exists():
            write_gguf(models.target, model)
    kind = name.replace("llama.cpp", "llama").replace(" ", "-")
    command = [python, "-m", "tests.bench.engine_peer", kind, str(model)]
    command += ["--threads", str(models.threads)]
    if models.lookup_tokens and name == LLAMA_LOOKUP:
        command += ["--lookup-tokens", str(models.lookup_tokens)]
    return command


def cores() -> int:
    """That this process may use, as `sdcpd dev` counts them."""
    return len(os.sched_getaffinity(0))
