"""One exchange with the API in octets, and what must be true of whatever comes back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from tests.attacks.api_inputs import Asked
from tests.kit.api import events_of, unchunked

LIMIT_S = 5.0
FIELD_NAMES = {"message", "type", "param", "code"}
NOT_HTTP_1 = {501, 505}
"""A transfer coding or a version of HTTP that is not spoken here."""


class Broken(AssertionError):
    """The API did what it must not do."""


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    fields: dict[str, str]
    body: bytes


async def exchange(port: int, asked: Asked) -> list[Answer]:
    """Send, and read whatever comes; raises Broken if that is no answer of this API, or none."""
    try:
        async with asyncio.timeout(LIMIT_S):
            octets = await _talk(port, asked)
    except TimeoutError as e:
        raise Broken("there was no end to it") from e
    answers = parsed(octets or b"", asked.method)
    if octets is not None and not answers and not asked.cut:
        raise Broken("there was no answer")
    for answer in answers:
        check(answer)
    return answers


async def _talk(port: int, asked: Asked) -> bytes | None:
    """What came; None where the server had closed while the client was still sending."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(asked.octets)
        if asked.cut:
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return None
    finally:
        writer.transport.abort()


def parsed(octets: bytes, method: str) -> list[Answer]:
    """All responses in what came until the end; those of 1xx are passed over."""
    found = []
    while octets:
        head, end, octets = octets.partition(b"\r\n\r\n")
        if not end or not head.startswith(b"HTTP/1.1 "):
            raise Broken(f"this is no response: {head[:200]!r}")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value for name, _, value in (li.partition(": ") for li in lines)}
        status = int(first.split()[1])
        bare = status < 200 or status == 204 or (method == "HEAD" and octets[:1] in (b"", b"H"))
        body, octets = (b"", octets) if bare else _body(fields, octets)
        if status >= 200:
            found.append(Answer(status, fields, body))
    return found


def _body(fields: dict[str, str], octets: bytes) -> tuple[bytes, bytes]:
    if fields.get("transfer-encoding") == "chunked":
        end = octets.find(b"0\r\n\r\n") + 5
        return unchunked(octets[:end]), octets[end:]
    if "content-length" not in fields:
        return octets, b""
    length = int(fields["content-length"])
    if len(octets) < length:
        raise Broken(f"the body is cut: {octets[:200]!r}")
    return octets[:length], octets[length:]


def check(answer: Answer) -> None:
    """Good, or an error of the one shape that is the client's own fault or says when to retry."""
    status = answer.status
    if 200 <= status < 300:
        if "event-stream" in answer.fields.get("content-type", "") and answer.body:
            _check_events(answer.body)
        return
    if status == 503 and "retry-after" not in answer.fields:
        raise Broken("a 503 does not say when to come back")
    if not (400 <= status < 500 or status == 503 or status in NOT_HTTP_1):
        raise Broken(f"{status}: {answer.body[:300]!r}")
    if answer.body:
        check_error(json.loads(answer.body))
    if answer.fields.get("content-type") != "application/json":
        raise Broken(f"{status} of {answer.fields.get('content-type')}")


def check_error(value: object) -> None:
    """The one shape."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict) or set(error) != FIELD_NAMES:
        raise Broken(f"no error of the one shape: {value!r:.300}")
    texts = error["message"], error["type"], error["param"] or "", error["code"] or ""
    if not all(isinstance(one, str) for one in texts) or not error["message"]:
        raise Broken(f"an error of the wrong types: {error!r:.300}")


def _check_events(octets: bytes) -> None:
    *events, last = events_of(octets)
    if last != "[DONE]":
        raise Broken(f"a stream ended with {last!r:.300}")
    if any("error" in event for event in events):
        raise Broken("a stream has an error and an end")
