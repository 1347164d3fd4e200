"""`sdcpd dev --once --kill-verifier`: a text undisturbed, and again while its verifier is killed.

The text is begun as a stream of the API.  Its tokens, with their times, are read beside that at
`/v1/sdcp/sessions/{id}/output`, as a client reads on that has lost its stream.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from sdcpd.dev.cluster import DevCluster, DevError
from sdcpd.dev.plan import OnceRequest
from sdcpd.dev.strip import longest_gap_s, strip
from sdcpd.protocol.digest import output_digest

STREAM_TIMEOUT_S = 60.0  # the API breaks every silence after 5 s


@dataclass(slots=True)
class Run:
    """One text as it came; times in seconds from its request."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    death_s: float | None = None
    dead: str = ""
    """The verifier that was killed."""

    @property
    def digest(self) -> str:
        """Of the tokens, as other runs can be compared."""
        return output_digest(self.tokens)


@dataclass(frozen=True, slots=True)
class Failover:
    """Both runs."""

    undisturbed: Run
    killed: Run

    @property
    def same(self) -> bool:
        """Whether the death changed nothing, neither tokens nor text."""
        one, other = self.undisturbed, self.killed
        return (one.tokens, one.text) == (other.tokens, other.text)

    @property
    def gap_s(self) -> float:
        """The longest silence in the run whose verifier died."""
        return longest_gap_s(self.killed.times_s)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        one, other = self.undisturbed, self.killed
        return {
            "same": self.same,
            "gap_s": round(self.gap_s, 3),
            "killed": {"verifier": other.dead, "at_s": round(other.death_s or 0.0, 4)},
            "digests": {"undisturbed": one.digest, "killed": other.digest},
            "times_s": {
                "undisturbed": [round(time_s, 4) for time_s in one.times_s],
                "killed": [round(time_s, 4) for time_s in other.times_s],
            },
            "text": other.text,
        }

    def as_text(self) -> str:
        """For a terminal."""
        one, other = self.undisturbed, self.killed
        assert other.death_s is not None, "a run without a death is refused"
        lines = strip(one.times_s, other.times_s, death_s=other.death_s)
        ordinary_s = longest_gap_s(one.times_s)
        return "\n".join(
            [
                *lines,
                f"{other.dead} killed after {other.death_s:.1f} s; longest gap {self.gap_s:.2f} s"
                f" (undisturbed {ordinary_s:.2f} s), {len(other.tokens)} tokens",
                f"same text: {'yes' if self.same else 'no'}",
                f"digest {one.digest}",
                f"digest {other.digest}",
            ]
        )


def run_failover(cluster: DevCluster, request: OnceRequest) -> Failover:
    """Write the text twice; raises DevError."""
    try:
        undisturbed = _run(cluster, request, kill=False)
        killed = _run(cluster, request, kill=True)
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise DevError(
            f"the API at 127.0.0.1:{cluster.options.port} broke off: {e}; the router's log, which"
            " --keep DIR keeps, says why"
        ) from e
    if killed.death_s is None:
        raise DevError(
            f"the text ended after {len(killed.tokens)} tokens, before a verifier could be killed; "
            "ask for more with --max-tokens"
        )
    return Failover(undisturbed, killed)


def _run(cluster: DevCluster, request: OnceRequest, *, kill: bool) -> Run:
    run, begin = Run(), time.monotonic()
    kill_at = request.max_tokens // 3 if kill else None
    with closing(_connection(cluster)) as first, closing(_connection(cluster)) as second:
        # Its stream stays open: a client that goes ends its session.
        session = _begin(first, request)
        verifier = _verifier_of(cluster, session) if kill else ""
        second.request("GET", f"/v1/sdcp/sessions/{session}/output?from=0")
        for part in _events(_checked(second.getresponse())):
            run.tokens += part["tokens"]
            run.text += part["text"]
            run.times_s += [time.monotonic() - begin] * len(part["tokens"])
            over = part["finish_reason"] is not None
            if kill_at is not None and len(run.tokens) >= kill_at and not over:
                kill_at = None
                run.dead = _kill(cluster, verifier)
                run.death_s = time.monotonic() - begin
    return run


def _connection(cluster: DevCluster) -> http.client.HTTPConnection:
    port = cluster.options.port
    assert port is not None, "the API is open for this"
    return http.client.HTTPConnection("127.0.0.1", port, timeout=STREAM_TIMEOUT_S)


def _begin(connection: http.client.HTTPConnection, request: OnceRequest) -> str:
    """Ask for the text, and return its session."""
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "ignore_eos": True,  # so that the kill is in the middle
        "stream": True,
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = _checked(connection.getresponse())
    known = response.getheader("x-request-id")  # not there where opening took its time
    return known or str(next(_events(response))["id"]).removeprefix("cmpl-")


def _checked(response: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if response.status != 200:
        raise DevError(str(json.loads(response.read())["error"]["message"]))
    return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events up to [DONE]; raises DevError for one that is an error, or for none."""
    for line in iter(response.readline, b""):
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            value = json.loads(line.removeprefix(b"data: "))
            if "error" in value:
                raise DevError(str(value["error"]["message"]))
            yield value
    raise DevError("the stream broke off")


def _verifier_of(cluster: DevCluster, session: str) -> str:
    """Base URI of who serves a session; empty where it is over already."""
    sessions = cluster.ask("GET", "/status")["sessions"]
    return next((one["verifier"] for one in sessions if one["session"] == session), "")


def _kill(cluster: DevCluster, verifier: str) -> str:
    """kill -9, and the label of the process."""
    process = next((p for p in cluster.processes if p.plan.base_uri == verifier), None)
    if process is None:
        raise DevError(
            "the text ended before its verifier could be killed; ask for more with --max-tokens"
        )
    os.kill(process.process.pid, signal.SIGKILL)
    return process.plan.label
