"""What `sdcpctl bench` computes: prompts, schedules, quantiles, rates, verdicts, the chart."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.bench.answers import Answer, NotHttp
from cli.bench.chart import chart
from cli.bench.client import Text
from cli.bench.figures import (
    PAIRS_MIN,
    Verdict,
    first_token_s,
    per_token_s,
    quantile,
    tokens_per_s,
    usage_of,
    verdict,
)
from cli.bench.load import Block, arrivals
from cli.bench.prompts import BUILT_IN, SIZE, STEP, Prompts, built_in, read_prompts
from cli.bench.rounds import SHOWN, Sources, rounds_of
from cli.bench.run import grown
from cli.errors import CtlError

# ---- prompts


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.integers(0, 200), st.integers(1, SIZE - 1))
def test_prompts_near_each_other_begin_with_different_words(seed: int, at: int, apart: int) -> None:
    prompts = Prompts(None, seed=seed)
    taken = [prompts.take() or "" for _ in range(at + apart + 1)]
    assert taken[at].split()[0] != taken[at + apart].split()[0]


@given(st.integers(0, 2**31), st.integers(0, BUILT_IN - 1), st.integers(0, BUILT_IN - 1))
def test_no_two_prompts_share_more_than_a_few_words(seed: int, one: int, other: int) -> None:
    first, second = (built_in(number * STEP, seed).split() for number in (one, other))
    assert (first[:7] == second[:7]) == (one == other)


def test_all_numbers_are_different_prompts() -> None:
    assert math.gcd(STEP, BUILT_IN) == 1


def test_a_seed_repeats_the_prompts() -> None:
    runs = [[Prompts(None, seed=seed).take() for _ in range(5)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\n two \none\n")
    assert read_prompts(lines) == (["one", "two"], 1)
    objects.write_text('{"prompt": "a\\nb", "more": 1}\n{"prompt": "c"}\n')
    assert read_prompts(objects) == (["a\nb", "c"], 0)
    for text, said in (
        ("", "no prompt"),
        ('{"prompt": "a"}\n{"x": 1}', "line 2"),
        ('{"prompt": 3}', "must be a text"),
    ):
        objects.write_text(text)
        with pytest.raises(CtlError, match=said):
            read_prompts(objects)
    with pytest.raises(CtlError, match="No such file"):
        read_prompts(tmp_path / "none")


def test_a_file_runs_out_or_is_told_to_go_round() -> None:
    once, again = Prompts(["a", "b"], seed=0), Prompts(["a", "b"], seed=0, reuse=True)
    assert [once.take() for _ in range(3)] == ["a", "b", None]
    assert once.out and once.repeated == 0
    assert [again.take() for _ in range(5)] == ["a", "b", "a", "b", "a"]
    assert not again.out and again.repeated == 3


# ---- load


@settings(max_examples=15)
@given(st.floats(0.1, 500), st.floats(0.1, 20), st.integers(0, 2**32))
def test_an_open_loops_schedule(rate: float, duration_s: float, seed: int) -> None:
    due = arrivals(rate, duration_s, seed)
    assert due == sorted(due) == arrivals(rate, duration_s, seed)
    assert all(0 <= at < duration_s for at in due)
    # A Poisson count lies within seven deviations of its mean, as good as always.
    assert abs(len(due) - rate * duration_s) < 7 * math.sqrt(rate * duration_s) + 7


# ---- figures


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_the_least_value_that_covers_its_share(
    values: list[float], share: float
) -> None:
    found = quantile(values, share)
    assert found is not None and found in values
    need = share * len(values) - 1e-9
    assert sum(one <= found for one in values) >= need
    assert sum(one < found for one in values) < need


def test_quantiles_of_known_values() -> None:
    hundred = [float(one) for one in range(1, 101)]
    assert [quantile(hundred, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert quantile([], 0.5) is None


@given(st.lists(st.floats(0.1, 10), min_size=PAIRS_MIN))
def test_a_verdict_needs_all_pairs_to_agree(ratios: list[float]) -> None:
    said = verdict(ratios)
    assert (said is Verdict.HELPS) == (min(ratios) > 1)
    assert (said is Verdict.HURTS) == (max(ratios) < 1)
    # Whoever swaps the two ways gets the other verdict.
    other = {Verdict.HELPS: Verdict.HURTS, Verdict.HURTS: Verdict.HELPS}.get(said, said)
    if all(1 / one != 1 or one == 1 for one in ratios):
        assert verdict([1 / one for one in ratios]) is other
    assert verdict(ratios[: PAIRS_MIN - 1]) is Verdict.UNKNOWN


def text(*came: tuple[float, int], tokens: int, due_s: float = 0.0, **own: int) -> Text:
    details = {"accepted_prediction_tokens": own.pop("accepted", 0)}
    details["rejected_prediction_tokens"] = own.pop("rejected", 0)
    usage = {"completion_tokens": tokens, "completion_tokens_details": details, "sdcp": own}
    return Text(due_s, due_s, came[-1][0], list(came), usage)


def test_times_of_a_text_count_tokens_not_arrivals() -> None:
    one = text((2.0, 8), (3.0, 16), (6.0, 16), tokens=10, due_s=0.5)
    assert first_token_s(one) == 1.5
    # A fifth of the text came first, so that the 4 s later brought 8 tokens.
    assert per_token_s(one) == pytest.approx(0.5)
    assert per_token_s(text((2.0, 8), tokens=10)) is None
    assert first_token_s(Text(0.0)) is None


def test_a_rate_counts_what_came_while_the_load_was_whole() -> None:
    failed = text((1.0, 10), tokens=99)
    failed.failure = "status 500"
    texts = [text((1.0, 10), tokens=10), text((3.0, 5), (9.0, 15), tokens=8), failed]
    assert tokens_per_s(Block(0.0, 4.0, texts)) == pytest.approx((10 + 2) / 4)
    assert tokens_per_s(Block(0.0, math.inf, texts)) == 0.0


METRICS = """\
# HELP x y
sdcp_rounds_total{action="continue",role="verifier"} ROUNDS
sdcp_rounds_total{action="continue",role="drafter"} ROUNDS
sdcp_prepared_proposals_total{result="used",role="drafter"} USED
sdcp_kv_adopted_tokens_total{role="verifier"} 7.0
sdcp_round_duration_seconds_sum{stage="score",role="verifier"} SCORE
sdcp_round_duration_seconds_count{stage="score",role="verifier"} ROUNDS
sdcp_draft_token_seconds_sum{role="drafter"} DRAFT
sdcp_draft_token_seconds_count{role="drafter"} UNPREPARED
"""


def test_the_overhead_of_a_round_is_what_neither_target_nor_drafter_took() -> None:
    values = {"UNPREPARED": ("4", "34"), "ROUNDS": ("10", "50"), "USED": ("2", "12")}
    values |= {"SCORE": ("1", "3"), "DRAFT": ("0", "0.3")}
    looks = []
    for at in range(2):
        shown = METRICS
        for name, both in values.items():
            shown = shown.replace(name, both[at])
        looks.append(Sources({"v0": lambda shown=shown: shown}).look())
    texts = [text((1.0, 1), (5.0, 39), tokens=100, rounds=41, accepted=60, rejected=20)]
    found = rounds_of(usage_of(texts), grown(*looks))
    assert found.round_s == pytest.approx(4 / 40)
    assert found.target_s == pytest.approx(2 / 40)
    # 0.01 s a token, of three in four rounds: the others were drafted during the wait.
    assert found.m == pytest.approx(80 / 41)
    assert found.drafting_s == pytest.approx(0.01 * 80 / 41 * 0.75)
    assert found.overhead_s == pytest.approx(0.1 - 0.05 - found.drafting_s)
    assert found.waiting_s is None and found.network_s is None
    assert found.told == 40
    nobody = rounds_of(usage_of(texts), Counter())
    assert nobody.overhead_s is nobody.target_s is nobody.drafting_s is None


def test_metrics_that_are_read_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    for name in SHOWN:
        assert f"`{name.removesuffix('_sum').removesuffix('_count')}`" in page


def test_a_source_that_fails_is_told_of_once() -> None:
    asked = []

    def fail() -> str:
        asked.append(1)
        raise CtlError("there is no admin socket")

    sources = Sources({"unix:/x": fail})
    assert not sources.look() and not sources.look()
    assert sources.failed == {"unix:/x": "there is no admin socket"} and asked == [1]


# ---- answers

EVENTS = "".join(
    f"data: {json.dumps(one, ensure_ascii=False)}\n\n: ping\n\n"
    for one in (
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"text": "The 中文"}]},
        {"choices": [{"delta": {"content": " sea"}}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    )
).encode()
EVENTS += b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX: y\r\n"
PIECES = [EVENTS[:70], EVENTS[70:75], EVENTS[75:]]
CHUNKED = b"".join(b"%x;e=1\r\n%s\r\n" % (len(one), one) for one in PIECES) + b"0\r\nT: t\r\n\r\n"
ANSWERS = [
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    HEAD + b"\r\n" + EVENTS,
]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 900)))
def test_any_split_of_an_answer_is_read_alike(octets: bytes, cuts: list[int]) -> None:
    answer, begin = Answer(), 0
    for cut in [*sorted(cuts), len(octets)]:
        answer.feed(octets[begin:cut], 1.0)
        begin = max(begin, cut)
    answer.eof()
    assert answer.done and answer.status == 200 and answer.events.ended
    assert sum(count for _, count in answer.events.arrivals) == len("The 中文 sea")
    assert answer.events.usage == {"completion_tokens": 3}
    assert answer.keep == (octets != ANSWERS[2])


def test_a_refusal_is_read_with_what_it_says() -> None:
    body = b'{"error": {"message": "too many"}}'
    answer = Answer()
    answer.feed(
        b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: %d\r\n\r\n" % len(body), 1.0
    )
    assert not answer.done
    answer.feed(body, 1.0)
    assert (answer.done, answer.status, answer.message) == (True, 429, "too many")
    assert answer.retry_after_s == 3


@pytest.mark.parametrize(
    "octets",
    [
        b"hello\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"x" * 70_000,
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"\r\ndata: hello\n\n",
        HEAD + b"\r\ndata: [1]\n\n",
    ],
)
def test_what_is_no_answer_is_noticed(octets: bytes) -> None:
    with pytest.raises(NotHttp):
        Answer().feed(octets, 1.0)


# ---- the chart


def point(load: float, rate: float, *, baseline: bool) -> dict[str, object]:
    spread = {"median": rate, "least": rate / 2, "most": rate * 2}
    way = {"tokens_per_s": spread}
    return {
        "concurrency": load,
        "name": f"{load:g} sessions",
        "speculation": way,
        "self_decode": way if baseline else None,
        "ratio": {"median": 1.0, "least": 0.9, "most": 1.1} if baseline else None,
        "verdict": "no_difference" if baseline else None,
    }


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.floats(1e-3, 1e6)),
        min_size=1,
        unique_by=lambda one: one[0],
    ),
    st.booleans(),
    st.sampled_from(["tiny", 'a<b>&"c"']),
)
def test_any_chart_is_well_formed(
    loads: list[tuple[int, float]], baseline: bool, model: str
) -> None:
    told = {"model": model, "loop": "closed", "duration_s": 4.0, "requests": None, "repeats": 3}
    told |= {"max_tokens": 64, "temperature": 0.0, "complete": True}
    told["points"] = [point(*one, baseline=baseline) for one in loads]
    drawn = ElementTree.fromstring(chart(told))
    name = "{http://www.w3.org/2000/svg}"
    assert model in (drawn.findtext(f"{name}title") or "")
    texts = ["".join(one.itertext()) for one in drawn.iter(f"{name}text")]
    assert "tokens a second" in texts and "with speculation" in texts
    assert all(f"{load} sessions" in texts for load, _ in loads)
    height = float(drawn.attrib["height"])
    for circle in drawn.iter(f"{name}circle"):
        assert 0 < float(circle.attrib["cy"]) < height
        assert 0 < float(circle.attrib["cx"]) < float(drawn.attrib["width"])
