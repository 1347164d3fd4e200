"""Many sessions of a cluster at the same time, streamed by OpenAI's API as clients would."""

from __future__ import annotations

import hashlib
import http.client
import json
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from sdcpd.engine.tokenizer import TextModel
from tests.bench.engine_prompts import SESSIONS, arriving

TIMEOUT_S = 300.0
ALONE = 2  # texts of one session, one after the other
WINDOW_S = 10.0  # of undisturbed streams before a long prompt, and again after it
STREAM_TOKENS = 3000  # more than are written while gaps are measured
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Stream:
    """What came of one request, and when; times are of perf_counter."""

    begun: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """Of the pieces of text."""
    text: str = ""
    tokens: int = 0
    """As its usage says; 0 if it was broken off."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def stream(api: str, path: str, body: dict[str, Any], stop: threading.Event) -> Stream:
    """One request until its end, or until `stop`."""
    asked = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    octets = json.dumps({**asked, "ignore_eos": True, **body}).encode()
    found, lines = Stream(time.perf_counter()), []
    with closing(http.client.HTTPConnection(urlsplit(api).netloc, timeout=TIMEOUT_S)) as link:
        link.request("POST", path, octets, {"content-type": "application/json"})
        response = link.getresponse()
        assert response.status == 200, response.read()
        while not stop.is_set() and (line := response.readline()):
            lines.append((time.perf_counter(), line))
    for at, line in lines:  # read when nobody waits for it
        _note(found, at, line)
    return found


def _note(found: Stream, at: float, line: bytes) -> None:
    if not line.startswith(b"data: {"):
        return
    found.ended = at
    event = json.loads(line.removeprefix(b"data: "))
    assert "error" not in event, event
    for choice in event["choices"]:
        piece = choice.get("text") or choice.get("delta", {}).get("content")
        if piece:
            found.times.append(at)
            found.text += piece
    if usage := event.get("usage"):
        found.tokens = usage["completion_tokens"]


def chat(message: str, tokens: int) -> dict[str, Any]:
    """The body of a request."""
    return {"messages": [{"role": "user", "content": message}], "max_tokens": tokens}


def rates(api: str, tokens: int) -> tuple[float, float, list[Stream]]:
    """Tokens a second of one session and of all SESSIONS at once; and their texts, in that order."""
    never = threading.Event()
    alone = [stream(api, CHAT, chat(one, tokens), never) for one in SESSIONS[:ALONE]]
    alone_s = sum(one.ended - one.begun for one in alone)
    with ThreadPoolExecutor(len(SESSIONS)) as pool:
        bodies = [chat(one, tokens) for one in SESSIONS]
        together = list(pool.map(lambda body: stream(api, CHAT, body, never), bodies))
    span = max(one.ended for one in together) - min(one.begun for one in together)
    made = [sum(one.tokens for one in streams) for streams in (alone, together)]
    return made[0] / alone_s, made[1] / span, [*alone, *together]


@dataclass(frozen=True, slots=True)
class Gaps:
    """99th percentiles in seconds, and how long the long prompt waited for its first token."""

    undisturbed: float
    disturbed: float
    first_token: float


def gaps(api: str, text: TextModel, round_: int) -> Gaps:
    """Time between pieces of all SESSIONS, without a long prompt and while one arrives."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(SESSIONS)) as pool:
        tokens = STREAM_TOKENS
        running = [pool.submit(stream, api, CHAT, chat(one, tokens), stop) for one in SESSIONS]
        try:
            begin = time.perf_counter() + WINDOW_S / 2  # by then all have begun
            time.sleep(1.5 * WINDOW_S)
            body = {"prompt": arriving(text.vocab, round_), "max_tokens": 1}
            long = stream(api, COMPLETIONS, body, threading.Event())
            arrived = time.perf_counter()
            time.sleep(WINDOW_S)
        finally:
            stop.set()
    return _gaps(running, begin, (long.begun, arrived))


def _gaps(running: Sequence[Future[Stream]], begin: float, arrival: tuple[float, float]) -> Gaps:
    """A gap that overlaps with the arrival is one of it."""
    within, without = [], []
    for one in running:
        times = one.result().times
        assert one.result().tokens == 0, "a text ended before the measurement: more STREAM_TOKENS"
        for before, after in pairwise(times):
            if before < arrival[1] and after > arrival[0]:
                within.append(after - before)
            elif before > begin:
                without.append(after - before)
    return Gaps(_p99(without), _p99(within), arrival[1] - arrival[0])


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
