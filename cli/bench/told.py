"""A run as plain values: what `-o json` shows, and what the table and the chart are made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cli.bench.client import Text
from cli.bench.figures import (
    SHARES,
    Spread,
    Verdict,
    first_token_s,
    per_token_s,
    quantile,
    tokens_per_s,
    usage_of,
    whole,
)
from cli.bench.load import Block
from cli.bench.prompts import Prompts
from cli.bench.rounds import Rounds, Sources, adopted
from cli.bench.run import Point, Run, judged, ratios, texts_of
from cli.output import SCHEMA

BUSY = 0.7  # of a core: from there on the client may be what limits
OTHERS = 0.05  # rounds more, or fewer, than the texts' own
ROUND_PARTS = ("round", "target", "drafting", "overhead", "waiting", "commit", "network")


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, and all that is said beside it."""

    run: Run
    sources: Sources
    prompts: Prompts
    about: dict[str, Any]
    """The API, the model and what was asked for."""


def told(measured: Measured) -> dict[str, Any]:
    """Everything, in the stable form of `schema`; what is not known is null."""
    run = measured.run
    points = [_point(run, one) for one in run.points if one.on or one.off]
    return {
        "schema": SCHEMA,
        **measured.about,
        "complete": run.stopped is None,
        "stopped": run.stopped,
        "points": points,
        "failures": [
            {"kind": kind, "count": count, "said": run.said(kind)}
            for kind, count in run.failures().most_common()
        ],
        "cache": _cache(run),
        "prompts_asked_again": measured.prompts.repeated,
        "client_core_share": _busy(run),
        "missing": missing(measured),
        "notes": list(notes(measured)),
    }


def _point(run: Run, point: Point) -> dict[str, Any]:
    is_open = run.plan.open_loop
    found = Spread.of(ratios(point, open_loop=is_open))
    said, why = judged(point, open_loop=is_open)
    return {
        "rate" if is_open else "concurrency": point.load,
        "name": run.plan.name(point.load),
        "speculation": _way(point.on),
        "self_decode": _way(point.off) if run.plan.baseline else None,
        "rounds": _rounds(point.rounds),
        "ratio": _spread(found),
        "verdict": said.name.lower() if run.plan.baseline else None,
        "why": why or None,
    }


def _way(blocks: Sequence[Block]) -> dict[str, Any]:
    texts = texts_of(blocks)
    good = whole(texts)
    return {
        "tokens_per_s": _spread(Spread.of([tokens_per_s(one) for one in blocks])),
        "blocks": len(blocks),
        "texts": len(good),
        "failed": len(texts) - len(good),
        "tokens": sum(one.tokens for one in good),
        "first_token_ms": _quantiles(good, first_token_s),
        "per_token_ms": _quantiles(good, per_token_s),
        "text_ms": _quantiles(good, lambda one: one.end_s - one.due_s),
    }


def _quantiles(texts: Sequence[Text], of: Callable[[Text], float | None]) -> dict[str, Any]:
    values = [value for one in texts if (value := of(one)) is not None]
    return {f"p{100 * share:.0f}": _ms(quantile(values, share)) for share in SHARES}


def _rounds(rounds: Rounds) -> dict[str, Any]:
    times = {f"{one}_ms": _ms(getattr(rounds, f"{one}_s")) for one in ROUND_PARTS}
    named = {"tokens_per_pass": rounds.tokens_per_pass, "m": rounds.m, "accepted": rounds.accepted}
    return {**{key: _short(value) for key, value in named.items()}, **times}


def _spread(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    names = ("median", "least", "most")
    return {name: round(getattr(spread, name), 4) for name in names}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _cache(run: Run) -> dict[str, Any]:
    texts = [one for point in run.points for one in texts_of([*point.on, *point.off])]
    asked = sum(int(one.usage.get("prompt_tokens", 0)) for one in texts)
    return {"prompt_tokens": asked, "from_cache": _hits(run, texts)}


def _hits(run: Run, texts: Sequence[Text]) -> int | None:
    """Prompt tokens from a cache: as verifiers count them, else as an API's usage tells them."""
    if (seen := adopted(run.all_grown)) is not None:
        return seen
    details = [one.usage.get("prompt_tokens_details") or {} for one in texts]
    known = [int(one["cached_tokens"]) for one in details if one.get("cached_tokens") is not None]
    return sum(known) if known else None


def _busy(run: Run) -> float | None:
    blocks = [block for point in run.points for block in (*point.on, *point.off)]
    shares = [one.cpu_s / one.wall_s for one in blocks if one.wall_s]
    return round(max(shares), 3) if shares else None


def missing(measured: Measured) -> list[str]:
    """Which figures there are none of, and why."""
    run, sources = measured.run, measured.sources
    usage = usage_of([text for point in run.points for text in texts_of(point.on)])
    if not any(one.texts for point in run.points for one in point.on):
        return []
    if not usage.texts:
        return ["tokens per pass, M and the times of rounds: the API's usage tells nothing of them"]
    if not usage.rounds:
        return ["M and the times of rounds: no round had a drafter"]
    parts = [point.rounds for point in run.points]
    lacking = {
        "target pass": all(one.target_s is None for one in parts),
        "drafting": all(one.drafting_s is None for one in parts),
    }
    if not any(lacking.values()):
        return []
    names = [name for name, lacks in lacking.items() if lacks]
    who = {"target pass": "verifier", "drafting": "drafter"}
    why = "; ".join(sources.failed.values()) or (
        f"no {' and no '.join(who[name] for name in names)} that had a round is among what"
        " --endpoint (admin sockets) and --metrics (ports for monitoring) name"
    )
    return [f"{', '.join(names)}, and so the overhead of a round: {why}"]


def notes(measured: Measured) -> list[str]:
    """What whoever reads the figures must know."""
    run = measured.run
    return [one for one in (*_of_texts(measured), *_of_rounds(run), *_of_client(run)) if one]


def _of_texts(measured: Measured) -> list[str]:
    run, again = measured.run, measured.prompts.repeated
    cache = _cache(run)
    hits = cache["from_cache"]
    unique = "some prompts were asked again" if again else "no prompt was asked twice"
    said = {
        None: f"cache hits: not known, nobody who is read tells of them; {unique}",
        0: f"cache hits: 0 of {cache['prompt_tokens']} tokens of prompts",
    }.get(hits, f"cache hits: {hits} tokens of prompts came from a cache: TTFT is too good")
    ways = [way for point in run.points for way in (point.on, point.off) if way]
    few = min((len(whole(texts_of(way))) for way in ways), default=0)
    return [
        said,
        f"prompts asked again: {again}, since the file has no more" if again else "",
        f"p99 of fewer than 100 texts is that of the slowest (least: {few})" if few < 100 else "",
    ]


def _of_rounds(run: Run) -> list[str]:
    usage = usage_of([text for point in run.points for text in texts_of(point.on)])
    told_of = sum(point.rounds.told for point in run.points)
    found = []
    if usage.rounds and usage.self_decoded:
        share = usage.self_decoded / max(1, usage.tokens)
        found.append(
            f"{share:.1%} of the tokens with speculation were decoded without a drafter;"
            " the round time is an average over those passes too"
        )
    if told_of > usage.rounds * (1 + OTHERS) and not run.failures():
        found.append(
            f"verifiers had {told_of} rounds meanwhile, these texts {usage.rounds}: others used the"
            " cluster, which is in all figures"
        )
    elif 0 < told_of < usage.rounds * (1 - OTHERS):
        found.append(f"only {told_of} of {usage.rounds} rounds are of verifiers that are read")
    return found


def _of_client(run: Run) -> list[str]:
    share = _busy(run)
    found = []
    if share is not None:
        more = ": it may be what limits, run it on another machine" if share > BUSY else ""
        found.append(f"this client took at most {share:.0%} of a core{more}")
    if run.plan.open_loop:
        texts = [one for point in run.points for one in texts_of([*point.on, *point.off])]
        late = max((one.sent_s - one.due_s for one in texts if one.sent_s), default=0.0)
        found.append(f"requests were sent at most {1000 * late:.1f} ms after they were due")
    if run.failures():
        found.append("texts that failed are in no figure but the counts of failures")
    return found


def sentence(point: dict[str, Any]) -> str:
    """The verdict of a point, for people."""
    said, ratio, at = Verdict[point["verdict"].upper()], point["ratio"], point["name"]
    if said is Verdict.UNKNOWN:
        begin = f"speculation at {at} {said.value}: {point['why']}"
        return begin if ratio is None else f"{begin} ({ratio['median']:.2f} x)"
    here = " here" if said in (Verdict.HELPS, Verdict.HURTS) else ""
    times = f"{ratio['median']:.2f} x ({ratio['least']:.2f} to {ratio['most']:.2f})"
    return f"speculation {said.value}{here} at {at}: {times}"
