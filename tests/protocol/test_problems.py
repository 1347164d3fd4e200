"""Problem documents: Section 7, D-H10, D-H11, D-H14."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol import problems
from sdcpd.protocol.messages import SessionState, State
from sdcpd.protocol.problems import (
    PROBLEM_MEDIA_TYPE,
    PROBLEMS_BY_SUFFIX,
    PlainProblem,
    Problem,
    StaleBase,
    parse_problem,
    to_json,
)

VECTOR = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())["messages"][
    "problem_stale_base"
]
TABLE_2 = {
    "sdcp-stale-epoch": (409, "Epoch is not current"),
    "sdcp-stale-base": (409, "Proposal does not extend the committed prefix"),
    "sdcp-q-unavailable": (409, "Draft probabilities required by the rule are unavailable"),
    "sdcp-bad-contract": (422, "Contract invalid or not supported"),
    "sdcp-limit": (422, "Proposal violates m_cap or m_max"),
    "sdcp-session-closed": (410, "Session has finished or failed"),
    "sdcp-bad-proposal": (422, "Proposal inconsistent with its draft distributions"),
    "sdcp-not-assigned": (403, "Drafter is not assigned to the session"),
}
STATE = SessionState(
    session=bytes(range(16)),
    epoch=1,
    round=2,
    committed=5,
    digest=bytes.fromhex("e5014e14bd89e0bb113f5f3d9301836ef1b3e3d59a3d8b651f95b6503d785e5b"),
    state=State.ASSIGNED,
)


def test_table_2_is_complete() -> None:
    """R-7-1: suffix, status and title of every registered problem type."""
    assert {
        suffix: (kind.status, kind.title) for suffix, kind in PROBLEMS_BY_SUFFIX.items()
    } == TABLE_2


def test_problem_stale_base_vector() -> None:
    problem = StaleBase(session_state=STATE)
    assert problem.status == VECTOR["status"]
    assert VECTOR["content_type"] == PROBLEM_MEDIA_TYPE
    assert json.loads(to_json(problem)) == VECTOR["body"]
    document = parse_problem(409, json.dumps(VECTOR["body"]).encode(), PROBLEM_MEDIA_TYPE)
    assert document.suffix == "sdcp-stale-base"
    assert document.session_state == STATE


@pytest.mark.parametrize("kind", [*PROBLEMS_BY_SUFFIX.values(), *PlainProblem.__subclasses__()])
def test_documents_round_trip(kind: type[Problem]) -> None:
    problem = kind("what to do", session_state=STATE, m_cap=3)
    document = parse_problem(kind.status, to_json(problem), "Application/Problem+JSON; x=y")
    assert (document.status, document.suffix) == (kind.status, kind.suffix)
    assert (document.title, document.detail) == (kind.title, "what to do")
    assert (document.session_state, document.m_cap) == (STATE, 3)
    assert str(kind.status) in str(problem) and "what to do" in str(document)


def test_plain_problems_are_about_blank() -> None:
    body = json.loads(to_json(problems.NotFound()))
    assert body == {"type": "about:blank", "title": "Not Found", "status": 404}


def test_dh11_type_uri_without_www() -> None:
    assert StaleBase().type == "https://iana.org/assignments/sdcp#sdcp-stale-base"


def test_retry_after_is_rounded_up() -> None:
    assert problems.Unavailable(retry_after_s=0.2).headers == {"retry-after": "1"}
    assert problems.MethodNotAllowed(headers={"allow": "GET"}).headers == {"allow": "GET"}


@pytest.mark.parametrize(
    "write",
    [
        lambda b: base64.urlsafe_b64encode(b).decode(),
        lambda b: base64.urlsafe_b64encode(b).decode().rstrip("="),
        lambda b: base64.b64encode(b).decode(),
        lambda b: base64.b64encode(b).decode().rstrip("="),
        lambda b: b.hex(),
        lambda b: b.hex().upper(),
    ],
)
def test_dh10_octets_are_read_in_every_likely_form(write: Any) -> None:
    for octets in (STATE.digest, b"\xfb\xff" * 16):
        body = {**VECTOR["body"]}
        body["session_state"] = {
            **body["session_state"],
            "session": write(octets[:16]),
            "digest": write(octets),
            "round": 2.0,
            "state": None,
        }
        state = parse_problem(409, json.dumps(body).encode(), PROBLEM_MEDIA_TYPE).session_state
        assert state is not None
        assert (state.session, state.digest) == (octets[:16], octets)
        assert (state.round, state.state) == (2, None)


@pytest.mark.parametrize(
    "change",
    [
        {"session": "AAECAwQFBgcICQoLDA0O"},
        {"session": "AAEC*wQFBgcICQoLDA0ODw"},
        {"session": "zz" * 16},
        {"session": "é" * 22},
        {"digest": 7},
        {"epoch": "1"},
        {"epoch": True},
        {"round": -1},
        {"round": 1.5},
        {"committed": 2**64},
        {"committed": None},
    ],
)
def test_dh10_a_state_that_cannot_be_read_is_left_out(change: dict[str, Any]) -> None:
    body = {**VECTOR["body"], "session_state": {**VECTOR["body"]["session_state"], **change}}
    document = parse_problem(409, json.dumps(body).encode(), PROBLEM_MEDIA_TYPE)
    assert document.suffix == "sdcp-stale-base"
    assert document.session_state is None


@pytest.mark.parametrize(
    "type_uri",
    [
        "about:blank",
        "https://www.iana.org/assignments/sdcp#sdcp-limit",
        "https://iana.org/assignments/sdcp#limit",
        "https://iana.org/assignments/sdcp#sdcp-limit/",
        "HTTPS://iana.org/assignments/sdcp#sdcp-limit",
        "https://iana.org/assignments/sdcp#sdcp-new",
        "sdcp-limit",
        17,
        None,
    ],
)
def test_dh14_other_types_are_treated_by_status_class(type_uri: object) -> None:
    body = json.dumps({"type": type_uri, "title": 5, "m_cap": "8"}).encode()
    document = parse_problem(422, body, PROBLEM_MEDIA_TYPE)
    assert (document.status, document.suffix) == (422, None)
    assert (document.title, document.m_cap) == ("", None)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", PROBLEM_MEDIA_TYPE),
        (b"[1]", PROBLEM_MEDIA_TYPE),
        (b"\xff\xfe", PROBLEM_MEDIA_TYPE),
        (b"[" * 100_000, PROBLEM_MEDIA_TYPE),
        (b'{"m_cap":' + b"9" * 10_000 + b"}", PROBLEM_MEDIA_TYPE),
        (b'{"title":"' + b"x" * 70_000 + b'"}', PROBLEM_MEDIA_TYPE),
        (to_json(StaleBase()), "text/html"),
        (to_json(StaleBase()), None),
    ],
)
def test_garbage_falls_back_to_the_status(body: bytes, content_type: str | None) -> None:
    document = parse_problem(502, body, content_type)
    assert document == problems.ProblemDocument(status=502)


@given(st.binary(max_size=80), st.integers(100, 599))
def test_parse_problem_never_raises(body: bytes, status: int) -> None:
    assert parse_problem(status, body, PROBLEM_MEDIA_TYPE).status == status


def test_dp7_m_cap_zero_is_no_limit() -> None:
    body = b'{"type":"https://iana.org/assignments/sdcp#sdcp-limit","m_cap":0}'
    assert parse_problem(422, body, PROBLEM_MEDIA_TYPE).m_cap is None
