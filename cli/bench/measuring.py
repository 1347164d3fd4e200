"""From the command's options to a run: which API, which sockets, and what is shown meanwhile."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import click

from cli.api import API, tls_of
from cli.asking import ask_instance
from cli.bench.client import Client, Wanted
from cli.bench.greeting import served_model
from cli.bench.prompts import Prompts, read_prompts
from cli.bench.rounds import Sources
from cli.bench.run import Plan, Runner
from cli.bench.told import Measured
from cli.endpoint import default_endpoints
from cli.errors import CtlError
from cli.text import shows_progress

DURATION_S = 4.0
CLEAR_LINE = "\r\x1b[K"


def measure(options: dict[str, Any]) -> tuple[Measured, bool]:
    """Measure as options say; also whether Ctrl-C ended it.  Raises CtlError, UsageError."""
    url, sockets = _places(options["api"], options["endpoint"])
    key = _key(options["api_key_file"])
    tls = tls_of(url, options["ca"])
    model = served_model(url, key, options["model"], tls)
    seed = secrets.randbelow(1 << 31) if options["seed"] is None else options["seed"]
    given, again = read_prompts(options["prompts"]) if options["prompts"] else (None, 0)
    prompts = Prompts(given, seed=seed, reuse=options["reuse"])
    plan = plan_of(options)
    wanted = Wanted(
        url=_parsed(url),
        key=key,
        model=model,
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        seed=seed,
        chat=options["chat"],
        ignore_eos=options["ignore_eos"],
        timeout_s=options["timeout"],
        tls=tls,
    )
    sources = Sources.of(sockets, options["metrics"])
    about = _about(plan, wanted, url) | {"prompts_left_out": again}
    progress = Progress(plan)
    runner, interrupted = _run(plan, wanted, prompts, sources, progress)
    progress.end()
    return Measured(runner.run, sources, prompts, about), interrupted


def plan_of(options: dict[str, Any]) -> Plan:
    """What is to be measured."""
    is_open = options["rate"] is not None
    duration_s = options["duration"] or (None if options["requests"] else DURATION_S)
    if not is_open and (least := options["requests"]) and least < max(options["concurrency"]):
        raise click.UsageError(
            f"--requests {least} are fewer than {max(options['concurrency']):g} clients"
        )
    return Plan(
        loads=options["rate"] if is_open else options["concurrency"],
        open_loop=is_open,
        duration_s=duration_s,
        requests=options["requests"],
        repeats=options["repeats"],
        baseline=options["baseline"],
    )


def _about(plan: Plan, wanted: Wanted, url: str) -> dict[str, Any]:
    return {
        "api": url,
        "model": wanted.model,
        "loop": "open" if plan.open_loop else "closed",
        "duration_s": plan.duration_s,
        "requests": plan.requests,
        "repeats": plan.repeats,
        "baseline": plan.baseline,
        "max_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "chat": wanted.chat,
        "ignore_eos": wanted.ignore_eos,
        "seed": wanted.seed,
    }


def _places(url: str | None, sockets: Sequence[Path]) -> tuple[str, list[Path]]:
    """The API's base, and the admin sockets to look at: those named, else of this host.

    An API that is named need not be that of this host's router, whose sockets then tell of others.
    """
    if url is not None:
        own = sockets or _of_the_same(url)
        return url.rstrip("/"), list(own)
    found = list(sockets) or default_endpoints()
    for socket in found:
        status = ask_instance(socket, "GET", "/status")
        if status["role"] == "router" and status["api"]:
            return str(status["api"]).rstrip("/"), found
    if not found:
        return API, []
    raise CtlError("no router with an API is among the admin sockets; name it with --url")


def _of_the_same(url: str) -> list[Path]:
    """This host's admin sockets where its router is the one with that API."""
    found = default_endpoints()
    for socket in found:
        try:
            status = ask_instance(socket, "GET", "/status")
        except CtlError:
            continue
        if status["role"] == "router" and _place(status["api"] or "") == _place(url):
            return found
    return []


def _place(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return ("127.0.0.1" if host == "localhost" else host), parts.port


def _parsed(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"--url {url}: write it as {API}")
    return parts


def _key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("SDCPCTL_API_KEY")
    try:
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise CtlError(f"{path} can't be read: {getattr(e, 'strerror', None) or e}") from e
    if not key or not key.isascii() or not key.isprintable():
        raise CtlError(f"{path} must have one API key on one line")
    return key


def _run(
    plan: Plan, wanted: Wanted, prompts: Prompts, sources: Sources, progress: Progress
) -> tuple[Runner, bool]:
    """Run to the end, or to Ctrl-C."""

    async def whole() -> tuple[Runner, bool]:
        runner = Runner(plan, Client(wanted), prompts, sources, progress.tell)
        task = asyncio.ensure_future(runner.measure())
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            runner.run.stopped = "Ctrl-C ended it; the block at hand is left out"
            return runner, True
        return runner, False

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(whole())


class Progress:
    """One line on a terminal's standard error, written anew; nothing elsewhere."""

    def __init__(self, plan: Plan) -> None:
        self._shown = shows_progress()
        blocks = len(plan.loads) * plan.repeats * (2 if plan.baseline else 1)
        # A warm-up of each load is a step too.
        self._steps, self._done, self._begin = blocks + len(plan.loads), 0, time.monotonic()

    def tell(self, what: str) -> None:
        """Something else begins."""
        if self._shown:
            passed = time.monotonic() - self._begin
            left = passed / self._done * (self._steps - self._done) if self._done > 1 else None
            more = "" if left is None else f", some {left:.0f} s to go"
            click.echo(f"{CLEAR_LINE}[{self._done}/{self._steps}] {what}{more}", err=True, nl=False)
        self._done += 1

    def end(self) -> None:
        """Leave the line empty."""
        if self._shown:
            click.echo(CLEAR_LINE, err=True, nl=False)
