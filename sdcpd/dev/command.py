"""What `sdcpd dev` prints, and how it ends."""

from __future__ import annotations

import json
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sdcpd
from sdcpd.admin_client import dev_state_path
from sdcpd.dev.cluster import DevCluster, DevError, Process
from sdcpd.dev.failover import run_failover
from sdcpd.dev.plan import DevOptions, OnceRequest

ROLES = ("verifier", "drafter")
SHORT_TOKENS, LONG_TOKENS = 64, 1500  # of the curl line; time enough to kill a verifier by hand
Say = Callable[[str], None]


class Stopped(BaseException):
    """A signal asks to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_dev(options: DevOptions, request: OnceRequest | None) -> int:
    """Run until the text is there or a signal comes; returns the exit code, raises DevError."""
    _check(options)
    say = _silent if request is not None and request.as_json else _say(request is not None)
    cluster = DevCluster(options)
    code = 0
    with _stop_signals():
        try:
            with cluster:
                code = _run(cluster, request, say)
        except Stopped as e:
            interactive = request is None and cluster.is_ready
            code = 0 if interactive else 128 + e.number
            say("\nstopped")
    say(f"kept {options.keep}" if options.keep else "nothing is left behind")
    return code


def _run(cluster: DevCluster, request: OnceRequest | None, say: Say) -> int:
    begin = time.monotonic()
    kept = "kept" if cluster.options.keep else "removed on exit; --keep DIR to keep"
    say(f"sdcpd dev {sdcpd.__version__}   state in {cluster.directory} ({kept})")
    say(_phases_before(cluster))
    cluster.wait_ready()
    for process in cluster.processes:
        say(_line(process))
    # One that writes a text and ends must not take the place of one that somebody works with.
    cluster.write_state(announce=request is None)
    say(f"ready in {time.monotonic() - begin:.1f} s")
    if request is not None:
        return _once(cluster, request)
    say(_banner(cluster))
    _watch(cluster)
    return 0


def _silent(_: str) -> None:
    """Only the result is printed."""


def _say(to_stderr: bool) -> Say:
    """Beside a result on standard output, what is said to people goes to standard error."""
    return lambda text: print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def _check(options: DevOptions) -> None:
    """What can be known to be wrong before anything is started."""
    if not options.target_path.is_dir():
        raise DevError(
            f"--target {options.target_path}: no such directory; "
            "name a Hugging Face model directory",
            status=78,
        )
    if "none" in options.drafters and len(options.drafters) > 1:
        raise DevError("--drafter none stands alone: it means that there is no drafter", status=2)
    tokenizer = options.target_path / "tokenizer.json"
    for kind in options.drafter_kinds:
        if kind == "ngram":
            continue
        own = Path(kind) / "tokenizer.json"
        if not Path(kind).is_dir():
            raise DevError(
                f"--drafter {kind}: no such directory; name a model directory, ngram or none",
                status=78,
            )
        if own.is_file() and tokenizer.is_file() and own.read_bytes() != tokenizer.read_bytes():
            raise DevError(
                f"--drafter {kind}: its tokenizer.json is not the target's; "
                "a drafter must have the target's tokenizer",
                status=78,
            )


def _phases_before(cluster: DevCluster) -> str:
    counts = [0, 0]
    for plan in cluster.plans[1:]:
        counts[plan.role == "drafter"] += 1
    nouns = [f"{n} {noun}{'s' * (n != 1)}" for n, noun in zip(counts, ROLES, strict=True)]
    instances = ", ".join(["1 router", *nouns])
    return f"  {'certificates':<14}{cluster.certs_s:5.1f} s   spiffe://dev.sdcp   {instances}"


def _line(process: Process) -> str:
    text = f"  {process.plan.label:<14}{process.ready_s or 0:5.1f} s   {process.plan.base_uri}"
    return "\n".join([text, *(f"  {'':<14}          {phase}" for phase in process.phases)])


def _banner(cluster: DevCluster) -> str:
    api = f"http://127.0.0.1:{cluster.options.port}/v1"
    name = "tiny" if cluster.options.target is None else cluster.options.target_path.name
    request = {"model": name, "prompt": "The ocean at night", "temperature": 0, "stream": True}
    kill = _kill_line(cluster)
    more = {"max_tokens": LONG_TOKENS, "ignore_eos": True} if kill else {"max_tokens": SHORT_TOKENS}
    body = json.dumps(request | more)
    return (
        f"OpenAI API: {api}   (no key, this machine only)\n"
        f"Try:  curl -N {api}/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"      {_status_command(cluster)}\n{kill}"
        "Stop: Ctrl-C"
    )


def _kill_line(cluster: DevCluster) -> str:
    """How to see a failover, where there is another verifier to go on at."""
    pids = [p.process.pid for p in cluster.processes if p.plan.role == "verifier"]
    if len(pids) < 2:
        return ""
    first, *others = (f"kill -9 {pid}" for pid in pids)
    also = ", ".join(others)
    return f"      {first}   (or {also}) while it streams: the text goes on at another verifier\n"


def _status_command(cluster: DevCluster) -> str:
    """A line that works as printed, on the path or not, with a runtime directory or not."""
    beside = Path(sys.executable).with_name("sdcpctl")
    name = "sdcpctl" if shutil.which("sdcpctl") or not beside.exists() else str(beside)
    place = "" if dev_state_path() else f" --endpoint unix:{cluster.router.admin}"
    return f"{name} status{place}"


def _once(cluster: DevCluster, request: OnceRequest) -> int:
    if request.kill_verifier:
        found = run_failover(cluster, request)
        as_json = json.dumps(found.as_json(), ensure_ascii=False) if request.as_json else None
        print(as_json or found.as_text(), flush=True)
        return 0 if found.same else 1
    answer = cluster.ask(
        "POST",
        "/generate",
        {
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        },
        timeout_s=3600,
    )
    if request.as_json:
        print(json.dumps(answer, ensure_ascii=False), flush=True)
        return 0
    print(request.prompt + answer["text"])
    print(
        f"\n{len(answer['tokens'])} tokens in {answer['rounds']} rounds, "
        f"{answer['drafted']} drafted, {answer['accepted']} accepted, "
        f"{answer['self_decoded']} self-decoded, "
        f"{answer['tokens_per_pass']:.2f} tokens per target pass, {answer['seconds']:.2f} s\n"
        f"digest {answer['digest']}",
        flush=True,
    )
    return 0


def _watch(cluster: DevCluster) -> None:
    """Say when a process ends; returns never, but by a signal or when the router is gone."""
    alive = list(cluster.processes)
    while True:
        select.select([], [], [], 0.2)
        for process in list(alive):
            if (code := process.process.poll()) is not None:
                alive.remove(process)
                rest = _where_it_goes_on(process, alive)
                print(f"{process.plan.label} ended ({code}): {process.failure()}{rest}", flush=True)
                if process is cluster.processes[0]:
                    raise DevError("the router is gone")


def _where_it_goes_on(dead: Process, alive: list[Process]) -> str:
    others = [p.plan.label for p in alive if p.plan.role == dead.plan.role]
    return f"\n  its sessions go on at {', '.join(others)}" if others else ""


@contextmanager
def _stop_signals() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises Stopped; later ones do not disturb the end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, _: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)

    old = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
