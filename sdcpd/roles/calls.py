"""Calls of other roles' resources: encode, send, decode; errors are problems or silence."""

from __future__ import annotations

from typing import TypeVar

from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode
from sdcpd.protocol.messages import Message
from sdcpd.protocol.problems import Problem, ProblemDocument, parse_problem
from sdcpd.transport.http import Client, Response

M = TypeVar("M", bound=Message)
ACCEPT = ("accept", f"{MEDIA_TYPE}, application/problem+json")


class Declined(Exception):
    """The peer answered with an error."""

    def __init__(self, problem: ProblemDocument) -> None:
        super().__init__(str(problem))
        self.problem = problem


class BadAnswer(Exception):
    """The peer answered 2xx with something that is not the message expected."""


async def call(
    client: Client,
    method: str,
    uri: str,
    *,
    message: Message | None = None,
    body: bytes | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    timeout_s: float = 30.0,
) -> Response:
    """Send a message; raises Declined for an error answer and TransportError for none."""
    own: tuple[tuple[str, str], ...] = (ACCEPT,)
    if message is not None:
        body = encode(message)
    if body is not None:
        own += (("content-type", MEDIA_TYPE),)
    response = await client.request(
        method, uri, headers=own + headers, body=body or b"", timeout_s=timeout_s
    )
    if not 200 <= response.status < 300:
        raise Declined(
            parse_problem(response.status, response.body, response.header("content-type"))
        )
    return response


def read_answer(kind: type[M], response: Response) -> M:
    """Decode the message of a 2xx answer; raises BadAnswer."""
    try:
        return decode(kind, response.body)
    except Problem as problem:
        raise BadAnswer(f"the answer is not a {kind.__name__}: {problem.detail}") from problem
