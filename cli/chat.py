"""`sdcpctl chat`: talk to the model from a terminal, and see what speculation does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.api import (
    API,
    BaseUrl,
    ca_option,
    cannot_be_asked,
    nobody_answers,
    refused,
    tls_of,
)
from cli.errors import CtlError
from cli.sessions import strip
from cli.text import echo, is_terminal, remark

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPResponse

NO_API = "\nwhat answers is no OpenAI-compatible API"
LINE_BYTES_MAX = 16 << 20  # of a stream: more is no chunk


@click.command()
@click.option(
    "--api",
    type=BaseUrl(),
    default=API,
    show_default=True,
    envvar="SDCPCTL_API",
    metavar="URL",
    help="base URL",
)
@click.option("--key", envvar="SDCPCTL_API_KEY", help="API key [env: SDCPCTL_API_KEY]")
@ca_option
@click.option("-m", "--model", help="default: the one that is served")
@click.option("--once", metavar="MESSAGE", help="send one message, print the answer, and stop")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy; default: the API's")
@click.option("--max-tokens", type=click.IntRange(1))
@click.option("--strip", "as_strip", is_flag=True, help="show each round: accepted, rejected, own")
def chat(
    *,
    api: str,
    key: str | None,
    ca: Path | None,
    model: str | None,
    once: str | None,
    temperature: float | None,
    max_tokens: int | None,
    as_strip: bool,
) -> None:
    """Chat with the model; a line is a message, Ctrl-D ends."""
    options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    tls = tls_of(api, ca)
    messages: list[dict[str, str]] = []
    for line in _lines(once):
        messages.append({"role": "user", "content": line})
        answer = ""
        for chunk in _stream(api, key, tls, options | {"messages": messages}):
            try:
                answer += _show(chunk, as_strip=as_strip)
            except (LookupError, TypeError, AttributeError) as e:
                raise CtlError(NO_API) from e
        echo("")
        messages.append({"role": "assistant", "content": answer})


def _lines(once: str | None) -> Iterator[str]:
    if once is not None:
        yield once
        return
    while sys.stdin is not None:
        try:
            line = input("> " if is_terminal(sys.stdin) else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


def _show(chunk: dict[str, Any], *, as_strip: bool) -> str:
    """Print what a chunk adds; returns its text."""
    text = "".join(one["delta"].get("content") or "" for one in chunk["choices"])
    if as_strip:
        rounds = chunk.get("sdcp", {}).get("rounds", ())
        echo("".join(map(strip, rounds)), nl=False)
    else:
        click.echo("".join(c for c in text if c.isprintable() or c in "\n\t"), nl=False)
    if usage := chunk.get("usage"):
        own = usage.get("sdcp", {})
        said = f"{usage['completion_tokens']} tokens, {own.get('tokens_per_pass', '?')} per pass"
        remark(click.style(f"\n({said})", dim=True), nl=False)
    return text


def _stream(
    api: str, key: str | None, tls: ssl.SSLContext | None, body: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The chunks of an answer; raises CtlError."""
    from http.client import HTTPException

    broken = CtlError("\nthe answer broke off: the router has gone, or something between")
    options = {"include_usage": True, "include_speculation": True}
    wanted = {k: v for k, v in body.items() if v is not None}
    wanted |= {"stream": True, "stream_options": options}
    with _asked(api, key, tls, wanted) as response:
        while True:
            try:
                line = response.readline(LINE_BYTES_MAX)
            except (OSError, HTTPException) as e:
                raise broken from e
            if not line:
                raise broken
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield _chunk(line.removeprefix(b"data: "))


def _chunk(octets: bytes) -> dict[str, Any]:
    try:
        chunk: dict[str, Any] = json.loads(octets)
        error = chunk.get("error")
        said = error and str(error["message"])
        if not error and not all(isinstance(one["delta"], dict) for one in chunk["choices"]):
            raise ValueError("no choices")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as e:
        raise CtlError(NO_API) from e
    if error:
        raise CtlError(f"\n{said}")
    return chunk


def _asked(
    api: str, key: str | None, tls: ssl.SSLContext | None, body: dict[str, Any]
) -> HTTPResponse:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    url = f"{api.rstrip('/')}/chat/completions"
    try:
        request = Request(url, json.dumps(body).encode(), headers)
        response: HTTPResponse = urlopen(request, timeout=600, context=tls)
    except HTTPError as e:
        raise refused(url, e) from e
    except (HTTPException, ValueError) as e:  # also a key that no field can hold
        raise cannot_be_asked(api) from e
    except (URLError, OSError) as e:
        raise nobody_answers(api, getattr(e, "reason", e)) from e
    return response
