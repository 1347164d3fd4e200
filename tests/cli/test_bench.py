"""sdcpctl bench: the real command against real roles, and against APIs that fail."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pty
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sdcpd.metrics import text_of_process
from sdcpd.roles.generation import GenerationError
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import Http1Server
from tests.kit.api import FOX, NAME, STORY, Scripted, cluster_api, served, tokenizer
from tests.kit.by_hand import sdcpctl
from tests.kit.dev import dev
from tests.kit.metrics import metrics_of

SCRIPT = tokenizer().encode(STORY).ids
SHORT = ("--concurrency", "1,2", "--requests", "2", "--repeats", "3", "--max-tokens", "12")
ONCE = ("--concurrency", "2", "--requests", "4", "--repeats", "1", "--max-tokens", "4")


async def begin(url: str, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SDCPCTL_", "XDG_RUN"))}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "bench", *(("--url", url) if url else ()), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean | environment,
    )


async def bench(url: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    process = await begin(url, *arguments, **environment)
    async with asyncio.timeout(50):
        out, err = await process.communicate()
    assert process.returncode is not None
    assert b"Traceback" not in err, err.decode()
    return process.returncode, out.decode(), err.decode()


async def measured(url: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = await bench(url, *arguments, "-o", "json")
    assert not err, "where it is no terminal no progress is shown"
    return code, json.loads(out)


def at(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1"


async def test_a_cluster_is_measured_with_speculation_and_without(tmp_path: Path) -> None:
    drawn = tmp_path / "curve.svg"
    async with cluster_api(SCRIPT, pass_time_s=0.002) as (api, cluster):

        async def metrics(_: Request) -> Response:
            return Response(200, (), text_of_process(metrics_of(cluster)))

        server = Http1Server(metrics, refuse=lambda *_: Response(400), body_bytes_max=1)
        there = f"http://127.0.0.1:{await server.start()}/metrics"
        options = (*SHORT, "--chart", str(drawn), "--metrics", there)
        code, found = await measured(at(api.port), *options)
        await server.aclose()
    assert code == 0
    assert (found["schema"], found["model"], found["complete"]) == ("sdcpctl/v1", NAME, True)
    assert (found["failures"], found["missing"]) == ([], [])
    assert [one["concurrency"] for one in found["points"]] == [1, 2]
    for point in found["points"]:
        for way in ("speculation", "self_decode"):
            assert (point[way]["blocks"], point[way]["texts"]) == (3, 6)
            assert point[way]["tokens"] == 6 * 12, "as the API counts them"
            assert point[way]["first_token_ms"]["p50"] > 0
        rounds = point["rounds"]
        assert rounds["tokens_per_pass"] > 1.5, "the drafter is a perfect one"
        assert rounds["accepted"] <= rounds["m"]
        rest = rounds["round_ms"] - rounds["target_ms"] - rounds["drafting_ms"]
        assert rounds["overhead_ms"] == pytest.approx(rest, abs=0.002)
        assert point["verdict"] in ("helps", "hurts", "no_difference")
        assert point["ratio"]["least"] <= point["ratio"]["median"] <= point["ratio"]["most"]
    assert found["cache"]["prompt_tokens"] > 0
    assert found["cache"]["from_cache"] is None, "engines of tests keep no keys and values"
    texts = [one.text or "" for one in ElementTree.parse(drawn).iter() if one.tag.endswith("text")]
    assert any("2 sessions" in one for one in texts)


@pytest.mark.slow
async def test_an_open_loop_and_the_table() -> None:
    async with cluster_api(SCRIPT) as (api, _):
        options = ("--rate", "60/s", "--duration", "150ms", "--repeats", "3", "--max-tokens", "8")
        code, out, _ = await bench(at(api.port), *options, "-o", "wide", NO_COLOR="1")
    assert code == 0
    assert "open loop" in out and "60 requests/s" in out
    assert "ms after they were due" in out
    assert "speculation " in out.splitlines()[-1] and "at 60 requests/s: " in out.splitlines()[-1]
    assert "missing: target pass, drafting" in out and "--endpoint" in out
    assert "cache hits: not known" in out
    assert "TEXT ms p50" in out and "OVERHEAD ms" in out and "\x1b" not in out


@pytest.mark.slow
async def test_one_repeat_or_no_drafter_is_no_verdict() -> None:
    async with cluster_api(SCRIPT) as (api, _):
        _, found = await measured(at(api.port), *ONCE)
    assert found["points"][0]["verdict"] == "unknown"
    assert "it takes 3 pairs" in found["points"][0]["why"]
    async with served(Scripted(parts=[SCRIPT[:4]])) as api:
        _, found = await measured(at(api.port), *ONCE)
    assert found["points"][0]["why"] == "no drafter took part"
    assert found["points"][0]["rounds"]["m"] is None


@pytest.mark.slow
async def test_the_prompts_of_a_file_are_asked_once_each(tmp_path: Path) -> None:
    """With the file at its end the run stops, unless it may go round; it is told either way."""
    generator, file = Scripted(parts=[SCRIPT[:4]]), tmp_path / "prompts.txt"
    file.write_text("".join(f"{n} {FOX}\n" for n in range(9)))
    options = (*ONCE[:-2], "--max-tokens", "4", "--repeats", "3", "--prompts", str(file))
    async with served(generator) as api:
        code, found = await measured(at(api.port), *options)
        assert code == 1 and not found["complete"]
        assert found["stopped"] == "the prompts of the file ran out"
        assert len({one.prompt for one in generator.requests}) == len(generator.requests) == 9
        code, out, _ = await bench(at(api.port), *options, "--reuse")
        assert code == 0
        # Two warm-ups of two texts, and six blocks of four.
        assert "prompts asked again: 19" in out


# ---- what fails


async def failing(port: int, *more: str) -> tuple[dict[str, int], dict[str, Any]]:
    code, found = await measured(at(port), *ONCE, *more)
    assert code == 1
    return {one["kind"]: one["count"] for one in found["failures"]}, found


async def test_a_text_that_fails_in_the_middle_is_counted() -> None:
    async with served(Scripted(parts=[SCRIPT[:2], GenerationError("it broke")])) as api:
        kinds, found = await failing(api.port)
    assert set(kinds) == {"an error within the text"}
    assert "it broke" in found["failures"][0]["said"]
    assert found["stopped"] == "no text of a whole block came to its end"
    assert found["points"][0]["speculation"]["texts"] == 0


@pytest.mark.slow
async def test_refusals_are_counted_beside_what_was_measured() -> None:
    async with cluster_api(SCRIPT, pass_time_s=0.005, max_queue=1) as (api, _):
        options = ("--concurrency", "8", "--requests", "16", "--repeats", "1", "--max-tokens", "4")
        code, out, _ = await bench(at(api.port), *options, "--no-baseline")
    assert code == 1
    assert "x status 429: " in out
    assert "texts that failed are in no figure" in out
    assert "8 sessions" in out


HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNK = 'data: {"choices": [{"text": "The"}]}\n\n'
USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'
WHOLE = f"{HEAD}{CHUNK}{USAGE}data: [DONE]\n\n"
MODELS = 'HTTP/1.0 200 OK\r\n\r\n{"data": [{"id": "m"}]}'


@asynccontextmanager
async def answering(*answers: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that gives one answer after the other, then the last one; models it knows."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            writer.write((left.pop(0) if len(left) > 1 else left[0]).encode())
        else:
            writer.write(MODELS.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


FAILURES = (
    (f"{HEAD}{CHUNK}", "the connection was cut"),
    ("", "the connection was cut"),
    (f"{HEAD}{CHUNK}data: [DONE]\n\n", "a text without its usage"),
    (f"{HEAD}data: hello\n\n", "no answer of an OpenAI-compatible API"),
    ("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "status 500"),
    ("HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n", "status 429"),
    (f'{HEAD}{CHUNK}data: {{"error": {{"message": "no"}}}}\n\n', "an error within the text"),
)


async def test_each_failure_is_counted_by_its_kind() -> None:
    warm_up = [WHOLE] * 2
    octets = [*warm_up, *(one for one, _ in FAILURES), WHOLE]
    async with answering(*octets) as port:
        options = ("--concurrency", "2", "--requests", "10", "--repeats", "1", "--no-baseline")
        code, found = await measured(at(port), *options)
    assert code == 1
    counted = {one["kind"]: one["count"] for one in found["failures"]}
    assert counted == Counter(kind for _, kind in FAILURES)
    assert found["points"][0]["speculation"]["failed"] == 7
    assert found["points"][0]["speculation"]["texts"] == 3
    assert found["missing"] == [
        "tokens per pass, M and the times of rounds: the API's usage tells nothing of them"
    ]


@pytest.mark.slow
async def test_an_api_that_speaks_https(tmp_path: Path) -> None:
    """Its authority must be known, which the command says."""
    make = ["certs", "init", "--trust-domain", "lab.example", "--out", str(tmp_path)]
    made = sdcpctl(*make, "router/r0=https://127.0.0.1:7442/")
    assert made.returncode == 0, made.stderr
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "router.r0.crt", tmp_path / "router.r0.key")
    async with answering(WHOLE, tls=tls) as port:
        url = f"https://127.0.0.1:{port}/v1"
        code, _, err = await bench(url, *ONCE)
        assert code == 4 and "--ca" in err
        code, found = await measured(url, *ONCE, "--ca", str(tmp_path / "ca.crt"))
    assert code == 0 and found["points"][0]["speculation"]["texts"] == 4


@pytest.mark.slow
async def test_a_text_without_end_is_given_up() -> None:
    endless = asyncio.Event()
    async with served(Scripted(parts=[SCRIPT[:2], endless])) as api:
        kinds, _ = await failing(api.port, "--timeout", "100ms")
    assert set(kinds) == {"no end in time"}


async def test_what_cannot_be_asked_is_a_sentence(tmp_path: Path) -> None:
    code, out, err = await bench("http://127.0.0.1:9/v1", *ONCE)
    assert (code, out) == (3, "") and "nobody answers at http://127.0.0.1:9/v1" in err
    keys, key = tmp_path / "keys", tmp_path / "key"
    keys.write_text(f"alice:sha256:{hashlib.sha256(b'sk-1').hexdigest()}\n")
    keys.chmod(0o600)
    key.write_text("sk-1\n")
    async with served(Scripted(parts=[SCRIPT[:4]]), keys_file=keys) as api:
        code, _, err = await bench(at(api.port), *ONCE)
        assert code == 4 and "key" in err
        assert (await bench(at(api.port), *ONCE, "--api-key-file", str(key)))[0] == 0
        code, _, err = await bench(at(api.port), "-m", "other", SDCPCTL_API_KEY="sk-1")
        assert code == 5 and f"the models are: {NAME}" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--url", "file:///etc/passwd"), "must look like"),
        (("--concurrency", "0,2"), "whole numbers"),
        (("--concurrency", "65"), "from 1 to 64"),
        (("--rate", "x"), "1/s,4"),
        (("--rate", "2/s", "--requests", "3"), "--duration"),
        (("--requests", "3", "--duration", "3s"), "give one"),
        (("--duration", "0s"), "longer"),
        (("--chart", "c.png"), "FILE.svg"),
    ],
)
def test_usage(options: tuple[str, ...], said: str) -> None:
    from click.testing import CliRunner

    from cli.__main__ import main

    done = CliRunner().invoke(main, ["bench", *options], prog_name="sdcpctl")
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_a_context_says_which_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from cli.__main__ import main

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    kept = ["--api", "http://127.0.0.1:9/v1", "--endpoint", f"unix:{tmp_path}/none.sock"]
    for command, code in ((["context", "add", "lab", *kept], 0), (["bench"], 3)):
        done = CliRunner().invoke(main, command, prog_name="sdcpctl")
        assert done.exit_code == code, done.output
    assert "nobody answers at http://127.0.0.1:9/v1" in done.output


async def test_ctrl_c_shows_what_was_measured_until_then() -> None:
    generator = Scripted(parts=[SCRIPT[:4]])
    async with served(generator) as api:
        process = await begin(at(api.port), *SHORT, "--repeats", "100", "-o", "json")
        async with asyncio.timeout(30):
            while len(generator.requests) < 20:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    assert process.returncode == 130 and not err
    found = json.loads(out)
    assert not found["complete"] and "Ctrl-C" in found["stopped"]
    assert found["points"][0]["speculation"]["blocks"] > 0
    assert found["points"][0]["speculation"]["texts"] < 200


async def test_progress_is_for_terminals_and_without_a_baseline_nothing_is_judged() -> None:
    master, slave = pty.openpty()
    options = (*ONCE, "--no-baseline", "--chat", "-o", "jsonl")
    async with cluster_api(SCRIPT) as (api, _):
        command = [sys.executable, "-m", "cli", "bench", "--url", at(api.port), *options]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=slave
        )
        async with asyncio.timeout(30):
            out, _ = await process.communicate()
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert process.returncode == 0, shown
    assert "[0/2] 2 sessions: warming up" in shown and "speculation, repeat 1 of 1" in shown
    assert shown.endswith("\x1b[K") and "\n" not in shown
    (point,) = map(json.loads, out.splitlines())
    assert point["self_decode"] is None and point["verdict"] is None and point["ratio"] is None
    assert point["speculation"]["tokens"] == 16


@pytest.mark.slow
def test_a_development_cluster_is_found_and_told_of_whole(tmp_path: Path) -> None:
    """By its admin sockets: all of a round is known, and no prompt was in a cache."""
    with dev(tmp_path / "state") as running:
        named = [f"--endpoint=unix:{one['admin']}" for one in running.state["instances"]]
        command = [sys.executable, "-m", "cli", "bench", *named, "--concurrency", "1,4"]
        done = subprocess.run(
            [*command, "--requests", "4", "--repeats", "3", "-o", "json"],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["api"] == running.api and found["missing"] == []
    assert found["cache"]["from_cache"] == 0
    for point in found["points"]:
        assert None not in point["rounds"].values()
        assert point["speculation"]["tokens"] == point["speculation"]["texts"] * 64
