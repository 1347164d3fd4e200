"""`sdcpctl top`: what a cluster does now, second by second, as its router sees it."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cli.asking import ask_router, endpoint_option, metrics_of
from cli.errors import CtlError
from cli.exposition import samples
from cli.output import output_option, show_json
from cli.text import duration, echo, is_terminal, table

BAR = 10
HOME_AND_CLEAR = "\x1b[H\x1b[2J"
TTFT, PER_TOKEN = "sdcp_api_time_to_first_token_seconds", "sdcp_api_time_per_output_token_seconds"
HEADER = ("INSTANCE", "ROLE", "STATE", "LOAD", "", "QUEUE", "ACCEPT", "SESS")


@dataclass
class Sample:
    """One look at a router."""

    at: float
    status: dict[str, Any]
    values: dict[str, float] = field(default_factory=dict)
    """Sums over all labels."""
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)

    def rate(self, name: str, before: Sample) -> float:
        """How fast a counter grew since an earlier look."""
        grown = self.values.get(name, 0.0) - before.values.get(name, 0.0)
        return grown / max(self.at - before.at, 1e-9)

    def quantile_ms(self, name: str, share: float, before: Sample) -> float | None:
        """The bound of the bucket in which a share of what came since then lies; None: nothing."""
        mine, old = self.buckets.get(name, {}), before.buckets.get(name, {})
        grown = sorted((le, count - old.get(le, 0.0)) for le, count in mine.items())
        if not grown or grown[-1][1] <= 0:
            return None
        return 1000 * next(le for le, count in grown if count >= share * grown[-1][1])


@click.command()
@endpoint_option
@click.option("--once", is_flag=True, help="look twice, an interval apart, print, and stop")
@click.option("--interval", type=click.FloatRange(0.1, 60), default=1.0, show_default=True)
@output_option
def top(endpoint: Path | None, *, once: bool, interval: float, output: str) -> None:
    """Show load, tokens per second and times, again and again; q ends."""
    if output == "json" and not once:
        raise click.UsageError("-o json goes with --once; jsonl has a line for each look")
    if sys.stdout is None:
        raise CtlError("standard output is closed: there is nowhere to show anything")
    first = last = look(endpoint)
    with _keys(active=not once and is_terminal(sys.stdin)) as pressed:
        while True:
            if pressed(interval) == "q":
                return
            now = look(endpoint)
            if not show_json(figures(now, last, since=first), output=output):
                # Times over the whole of it while little happens, rates over the last interval.
                screen = "\n".join(lines(now, last, since=first))
                echo((HOME_AND_CLEAR if not once and is_terminal(sys.stdout) else "") + screen)
            if once:
                return
            last = now


def look(endpoint: Path | None) -> Sample:
    """Ask a router; raises CtlError."""
    status = ask_router(endpoint)
    return read(metrics_of(endpoint), status, at=time.monotonic())


def read(text: str, status: dict[str, Any], *, at: float) -> Sample:
    """Take in metrics in Prometheus' text format."""
    sample = Sample(at, status)
    for name, labels, value in samples(text):
        sample.values[name] = sample.values.get(name, 0.0) + value
        if name.endswith("_bucket") and "le" in labels:
            into = sample.buckets.setdefault(name.removesuffix("_bucket"), {})
            le = float(labels["le"])
            into[le] = into.get(le, 0.0) + value
    return sample


def lines(now: Sample, before: Sample, *, since: Sample) -> Iterator[str]:
    """What is on the screen."""
    status = now.status
    state = "ready" if status["ready"] else "NOT READY: " + "; ".join(status["reasons"])
    yield (
        f"sdcp router {status['name']}   {state}   up {duration(status['up_s'])}   model"
        f" {status['model']}"
    )
    yield (
        f"{len(status['sessions'])} sessions   "
        f"{now.rate('sdcp_api_completion_tokens_total', before):.0f} tok/s   "
        f"{now.rate('sdcp_api_requests_total', before):.1f} requests/s   "
        f"queue {now.values.get('sdcp_api_queue_depth', 0):.0f}   "
        f"TTFT p50 {_ms(now, TTFT, 0.5, since)} p95 {_ms(now, TTFT, 0.95, since)}   "
        f"per token p95 {_ms(now, PER_TOKEN, 0.95, since)}   "
        f"failovers {now.values.get('sdcp_failovers_total', 0):.0f}"
    )
    rows = [_row(one) for one in sorted(status["instances"], key=lambda one: one["instance"])]
    yield from table([HEADER, *rows], right=(4, 5, 6, 7))


def figures(now: Sample, before: Sample, *, since: Sample) -> dict[str, Any]:
    """The same for scripts; what lies over all buckets, or of which there is nothing, is null."""

    def ms(name: str, share: float) -> float | None:
        value = now.quantile_ms(name, share, since)
        return None if value == float("inf") else value

    status = now.status
    return {
        **{name: status[name] for name in ("name", "ready", "reasons", "up_s", "model")},
        "sessions": len(status["sessions"]),
        "tokens_per_s": round(now.rate("sdcp_api_completion_tokens_total", before), 3),
        "requests_per_s": round(now.rate("sdcp_api_requests_total", before), 3),
        "queue": now.values.get("sdcp_api_queue_depth", 0.0),
        "ttft_p50_ms": ms(TTFT, 0.5),
        "ttft_p95_ms": ms(TTFT, 0.95),
        "token_p95_ms": ms(PER_TOKEN, 0.95),
        "failovers": now.values.get("sdcp_failovers_total", 0.0),
        "instances": status["instances"],
    }


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    full = round(BAR * min(100, one["load"]) / 100)
    accept = one["accept"]
    return (
        one["instance"],
        one["role"],
        one["state"],
        f"[{'#' * full}{'.' * (BAR - full)}]",
        f"{one['load']}%",
        str(one["queue"]),
        "-" if accept is None else f"{accept:.2f}",
        str(one["sessions"]),
    )


def _ms(now: Sample, name: str, share: float, since: Sample) -> str:
    value = now.quantile_ms(name, share, since)
    if value is None:
        return "-"
    return f"<= {value:g} ms" if value != float("inf") else "over all buckets"


@contextmanager
def _keys(*, active: bool) -> Iterator[Any]:
    """Waits for a key, at most so long; the terminal is as it was afterwards."""
    if not active:
        yield lambda seconds: time.sleep(seconds)  # between two looks
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)

        def pressed(seconds: float) -> str:
            ready, _, _ = select.select([sys.stdin], [], [], seconds)
            return sys.stdin.read(1) if ready else ""

        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
