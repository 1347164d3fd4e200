"""`sdcpctl bench`: whether speculation helps on a cluster, measured from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.api import BaseUrl, ca_option
from cli.asking import endpoints_option
from cli.errors import EXIT_FAILED
from cli.output import output_option

INTERRUPTED = 130


class Numbers(click.ParamType[list[float]]):
    """Numbers with commas between; `unit` may stand behind each."""

    name = "numbers"

    def __init__(self, most: float, *, whole: bool, unit: str = "") -> None:
        self._most, self._whole, self._unit = most, whole, unit

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[float]:
        """The numbers; a usage error for anything else."""
        if not isinstance(value, str):
            return list(value)
        try:
            parts = [one.strip().removesuffix(self._unit) for one in value.split(",")]
            found = [float(int(one)) if self._whole else float(one) for one in parts]
        except ValueError:
            found = []
        if not found or not all((1 if self._whole else 0.001) <= n <= self._most for n in found):
            kind = f"whole numbers from 1 to {self._most:g}" if self._whole else "rates"
            self.fail(f'"{value}" must be {kind} with commas between, as in 1{self._unit},4', param)
        return list(dict.fromkeys(found))


class Duration(click.ParamType[float]):
    """A duration with a unit, in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds; a usage error for anything else, and for none at all."""
        from sdcpd.units import duration_s

        try:
            seconds = duration_s(value)
        except ValueError as e:
            self.fail(f"{value}: {e}", param, ctx)
        if seconds <= 0:
            self.fail(f"{value}: must be longer than nothing", param, ctx)
        return seconds


@click.command()
# Its name within is that of chat's, so that a context says it for both.
@click.option(
    "--url",
    "api",
    type=BaseUrl(),
    envvar="SDCPCTL_API",
    help="base URL of the API; default: the router's",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="file with the API key alone; else the key is SDCPCTL_API_KEY, if set",
)
@ca_option
@click.option("-m", "--model", help="default: the one that is served")
@endpoints_option
@click.option(
    "--metrics",
    multiple=True,
    metavar="URL",
    help="where a verifier or drafter of another host tells its metrics; repeatable",
)
@click.option(
    "--concurrency",
    type=Numbers(64, whole=True),
    default="1,4,16",
    show_default=True,
    help="closed loop: so many clients, each with one text at a time",
)
@click.option(
    "--rate",
    type=Numbers(10_000, whole=False, unit="/s"),
    metavar="R/s,...",
    help="open loop instead: requests a second, which wait for none before them",
)
@click.option("--duration", type=Duration(), help="of each block; default: 4s")
@click.option("--requests", type=click.IntRange(1), help="texts of each block, instead")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help="one a line, or JSON objects with `prompt`; default: made up, all different",
)
@click.option("--reuse", is_flag=True, help="ask prompts of the file again when it runs out")
@click.option("--chat", is_flag=True, help="send prompts as messages of a chat")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True)
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="of prompts and texts; default: another each time, so that no cache knows them",
)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True)
@click.option("--baseline/--no-baseline", default=True, help="measure without speculation too")
@click.option("--timeout", type=Duration(), default="2min", show_default=True, help="of one text")
@click.option(
    "--chart",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="draw tokens a second over the load",
)
@output_option
def bench(**options: Any) -> None:
    """Measure a running cluster through its API: does speculation help here, and by how much?

    Blocks with speculation and without take turns at each load; medians are shown with the least
    and the most of them.  Ctrl-C shows what has been measured until then.
    """
    from cli.bench.chart import write_chart
    from cli.bench.measuring import measure
    from cli.bench.report import show
    from cli.bench.told import told

    if options["rate"] and options["requests"]:
        raise click.UsageError("--rate goes with --duration: requests come when they are due")
    if options["duration"] and options["requests"]:
        raise click.UsageError("a block ends by --duration or by --requests: give one")
    chart: Path | None = options["chart"]
    if chart is not None and chart.suffix != ".svg":
        raise click.UsageError(f"--chart {chart}: the chart is SVG, name it FILE.svg")
    measured, interrupted = measure(options)
    found = told(measured)
    show(found, output=options["output"])
    if chart is not None and found["points"]:
        write_chart(chart, found)
    if interrupted:
        raise SystemExit(INTERRUPTED)
    texts = sum(one["speculation"]["texts"] for one in found["points"])
    if found["failures"] or not found["complete"] or not texts:
        raise SystemExit(EXIT_FAILED)
