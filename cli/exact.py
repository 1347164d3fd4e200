"""`sdcpctl verify-exact`: one text, whatever drafts, batches and failures do."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.errors import EXIT_FAILED, CtlError
from cli.text import echo

if TYPE_CHECKING:
    from sdcpd.exact.command import Held

PROMPT = (
    "The old lighthouse stood at the end of the road, and nobody in the village could say who had"
    " built it. Every evening a lamp was lit, although nobody had been seen on the stairs for"
    " years. One winter a girl with a blue scarf walked up to the door, knocked three times, and"
    " waited. She had brought bread, a candle and a letter that was addressed to the keeper. The"
    " wind came from the sea, the waves were as high as houses, and then, very slowly, the door"
)


@click.command("verify-exact")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--drafter", type=click.Path(path_type=Path), help="directory of a draft model, too")
@click.option("--device", default="auto", show_default=True, help='"auto", "cpu" or "cuda:0"')
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="auto: as stored",
)
@click.option("--tokens", type=click.IntRange(3, 4096), default=32, show_default=True)
@click.option("--m-max", type=click.IntRange(1, 64), default=16, show_default=True)
@click.option("--prompt", default=PROMPT, help="its beginning should have 64 tokens or more")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def verify_exact(
    directory: Path,
    drafter: Path | None,
    device: str,
    dtype: str,
    tokens: int,
    m_max: int,
    prompt: str,
    output: str,
) -> None:
    """Hold a target model's output to the identity matrix; exit code 1 where a text differs.

    Greedy and seeded sampling; drafters that are perfect, always wrong, random, n-gram and none;
    every M; alone and among 15 strangers; self-decoding and failover in the middle; with KV of an
    earlier text and without.  No cluster need run: it makes one in this process.
    """
    import asyncio

    try:
        from sdcpd.engine.api import ModelError
        from sdcpd.exact.command import verify
    except ImportError as e:
        raise CtlError(f"{e.name} is not installed here: pip install 'sdcpd[engine]'") from e
    shown = output == "table"
    # Verifiers and drafters are killed here on purpose, which the roles would tell of.
    logging.getLogger("sdcpd").setLevel(logging.ERROR)
    try:
        found = asyncio.run(
            verify(
                directory,
                drafter,
                device=device,
                dtype=dtype,
                tokens=tokens,
                ms=range(1, m_max + 1),
                prompt=prompt,
                report=echo if shown else lambda _: None,
                told=_tell if shown else lambda _: None,
            )
        )
    except ModelError as e:
        raise CtlError(str(e)) from e
    differing = sum(not one.same for one in found)
    missing = sum(not one.outcome.took_place for one in found)
    if output == "json":
        cases = [_as_json(one) for one in found]
        echo(json.dumps({"cases": cases, "differ": differing, "did_not_happen": missing}))
    elif differing or missing:
        text = f"of {len(found)} texts {differing} differ; {missing} events did not happen"
        echo(click.style(text, fg="red"))
    else:
        echo(click.style(f"all {len(found)} texts are the same", fg="green"))
    if differing or missing:
        raise SystemExit(EXIT_FAILED)


def _tell(held: Held) -> None:
    """A line for a case, as it is known."""
    outcome = held.outcome
    mark = click.style("same", fg="green")
    if not held.same:
        mark = click.style(f"DIFFERS from token {held.parts_at} on", fg="red")
    elif not outcome.took_place:
        mark = click.style(f"NO {outcome.case.event.upper()}", fg="yellow")
    what = ", ".join(f"{name} {count}" for name, count in outcome.happened.items() if count)
    echo(f"{mark}  {outcome.case}  ({what}; {outcome.digest[:16]})")


def _as_json(held: Held) -> dict[str, Any]:
    outcome = held.outcome
    return {
        "case": str(outcome.case),
        "same": held.same,
        "parts_at": held.parts_at,
        "took_place": outcome.took_place,
        "digest": outcome.digest,
        "happened": dict(outcome.happened),
    }
