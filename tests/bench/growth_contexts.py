"""What a text costs by the length of its context: first token, tokens a second, memory."""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sdcpd.admin_client import fetch
from tests.bench.growth_figures import described
from tests.bench.growth_idle import resident_kib
from tests.kit.dev import PAIR, Dev, dev

CONTEXTS = (128, 1024, 4096, 8192)
TOKENS = 64
REPEATS = 3
CONTEXT_MAX = 16_384
ORDINARY = (300, 4096)  # below lie special tokens and single octets
CACHED = re.compile(r"^sdcp_cache_bytes\{.*\} (\S+)$", re.M)
LONG = {"max_position_embeddings": CONTEXT_MAX, "dtype": "float32"}
"""The type is that in which `sdcpd dev` computes the bundled pair."""


def long_model(folder: Path) -> Path:
    """The bundled target, told that it has a longer context: its texts mean nothing there."""
    made = folder / "model"
    made.mkdir()
    for file in (PAIR / "target").iterdir():
        (made / file.name).symlink_to(file)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(config | LONG))
    return made


def one_text(cluster: Dev, prompt: Sequence[int], *, speculation: bool) -> dict[str, float]:
    """Seconds to the first text, and tokens a second from there on."""
    url = urlsplit(cluster.api)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
    wanted = {"model": "model", "prompt": list(prompt), "max_tokens": TOKENS, "stream": True}
    wanted |= {"temperature": 0, "ignore_eos": True, "speculation": speculation}
    wanted["stream_options"] = {"include_usage": True}
    headers = {"content-type": "application/json"}
    begun = time.perf_counter()
    connection.request("POST", url.path + "/completions", json.dumps(wanted), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    arrived, usage = [], {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        assert "error" not in chunk, chunk
        if any(choice["text"] for choice in chunk["choices"]):
            arrived.append(time.perf_counter())
        usage = chunk.get("usage") or usage
    connection.close()
    assert usage["prompt_tokens"] == len(prompt), usage
    # Of the text, what came first is not behind it; by which round, a chunk does not tell.
    behind = usage["completion_tokens"] * (1 - 1 / len(arrived))
    return {
        "first_s": arrived[0] - begun,
        "tokens_per_s": behind / max(1e-9, arrived[-1] - arrived[0]),
    }


def one_context(cluster: Dev, length: int, repeats: int) -> dict[str, Any]:
    """With speculation and without, in turns, each time another prompt."""
    verifier = cluster.instance("v0")
    taken: dict[bool, list[dict[str, float]]] = {True: [], False: []}

    def cached() -> float:
        return sum(map(float, CACHED.findall(fetch(Path(verifier["admin"]), "/metrics"))))

    chooser = random.Random(length)
    before, cached_before = resident_kib(verifier["pid"]), cached()
    for number in range(2 * repeats):
        prompt = [chooser.randrange(*ORDINARY) for _ in range(length)]
        speculation = number % 2 == 0
        taken[speculation].append(one_text(cluster, prompt, speculation=speculation))
    after = resident_kib(verifier["pid"])
    first_s = statistics.median(one["first_s"] for both in taken.values() for one in both)
    return {
        "context": length,
        "first_s": first_s,
        "prefill_tokens_per_s": length / first_s,
        "speculating_tokens_per_s": statistics.median(o["tokens_per_s"] for o in taken[True]),
        "plain_tokens_per_s": statistics.median(o["tokens_per_s"] for o in taken[False]),
        "rss_before_mib": before / 1024,
        "rss_after_mib": after / 1024,
        "cached_mib": (cached() - cached_before) / (1 << 20),
        "tokens": 2 * repeats * (length + TOKENS),
    }


def measure(contexts: Sequence[int] = CONTEXTS, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row a context, all in one cluster."""
    with tempfile.TemporaryDirectory() as scratch:
        options = ("--target", str(long_model(Path(scratch))), "--drafter", "ngram")
        with dev(Path(scratch) / "state", *options) as cluster:
            one_context(cluster, min(contexts), 1)  # whatever is done once is done
            return [one_context(cluster, length, repeats) for length in contexts]


def table(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Cells by row, the head first."""
    rows = [["context", "first token s", "prefill tokens/s", "tokens/s, n-gram drafter"]]
    rows[0] += ["tokens/s, none", "RSS before MiB", "RSS after MiB", "of it caches MiB more"]
    for one in found:
        row = [f"{one['context']:,}", f"{one['first_s']:.3f}"]
        names = ("prefill", "speculating", "plain")
        row += [f"{one[f'{name}_tokens_per_s']:.0f}" for name in names]
        names = ("rss_before_mib", "rss_after_mib", "cached_mib")
        rows.append([*row, *(f"{one[name]:.0f}" for name in names)])
    return rows


def sentences(found: Sequence[dict[str, Any]]) -> list[str]:
    """What grows how with the context."""
    lengths = [one["context"] for one in found]
    said = []
    for name, what in (("speculating", "with the n-gram drafter"), ("plain", "without drafter")):
        times = [1000 / one[f"{name}_tokens_per_s"] for one in found]
        said.append(
            f"A token behind the first, {what}, {described(lengths, times, 'ms', 'token')}."
        )
    firsts = [one["first_s"] for one in found]
    said.insert(0, f"The time to the first token {described(lengths, firsts, 's', 'token')}.")
    grown = 1024 * (found[-1]["rss_after_mib"] - found[0]["rss_before_mib"])
    tokens = sum(one["tokens"] for one in found)
    cached = 1024 * sum(one["cached_mib"] for one in found)
    said.append(
        f"The verifier's memory grew by {grown / tokens:.1f} KiB a token of all texts, of which "
        f"{cached / tokens:.1f} KiB are in its cache tiers; both are kept up to their bounds."
    )
    return said
