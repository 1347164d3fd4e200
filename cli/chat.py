"""`sdcpctl chat`: talk to the model from a terminal, and see what speculation does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from cli.api import API, cannot_be_asked, message_of, nobody_answers
from cli.errors import EXIT_REFUSED, CtlError
from cli.sessions import strip
from cli.text import echo

if TYPE_CHECKING:
    from http.client import HTTPResponse


@click.command()
@click.option("--api", default=API, show_default=True, envvar="SDCPCTL_API", help="base URL")
@click.option("--key", envvar="SDCPCTL_API_KEY", help="API key [env: SDCPCTL_API_KEY]")
@click.option("-m", "--model", help="default: the one that is served")
@click.option("--once", metavar="MESSAGE", help="send one message, print the answer, and stop")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy; default: the API's")
@click.option("--max-tokens", type=click.IntRange(1))
@click.option("--strip", "as_strip", is_flag=True, help="show each round: accepted, rejected, own")
def chat(
    *,
    api: str,
    key: str | None,
    model: str | None,
    once: str | None,
    temperature: float | None,
    max_tokens: int | None,
    as_strip: bool,
) -> None:
    """Chat with the model; a line is a message, Ctrl-D ends."""
    options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    messages: list[dict[str, str]] = []
    for line in _lines(once):
        messages.append({"role": "user", "content": line})
        answer = ""
        for chunk in _stream(api, key, options | {"messages": messages}):
            answer += _show(chunk, as_strip=as_strip)
        echo("")
        messages.append({"role": "assistant", "content": answer})


def _lines(once: str | None) -> Iterator[str]:
    if once is not None:
        yield once
        return
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


def _show(chunk: dict[str, Any], *, as_strip: bool) -> str:
    """Print what a chunk adds; returns its text."""
    text = "".join(one["delta"].get("content") or "" for one in chunk["choices"])
    if as_strip:
        rounds = chunk.get("sdcp", {}).get("rounds", ())
        click.echo("".join(map(strip, rounds)), nl=False, color=_colour())
    else:
        click.echo("".join(c for c in text if c.isprintable() or c in "\n\t"), nl=False)
    if usage := chunk.get("usage"):
        own = usage.get("sdcp", {})
        said = f"{usage['completion_tokens']} tokens, {own.get('tokens_per_pass', '?')} per pass"
        click.echo(click.style(f"\n({said})", dim=True), nl=False, err=True, color=_colour())
    return text


def _stream(api: str, key: str | None, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of an answer; raises CtlError."""
    options = {"include_usage": True, "include_speculation": True}
    wanted = {k: v for k, v in body.items() if v is not None}
    with _asked(api, key, wanted | {"stream": True, "stream_options": options}) as response:
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield _chunk(line.removeprefix(b"data: "))
    raise CtlError("\nthe answer broke off: the router has gone, or something between")


def _chunk(octets: bytes) -> dict[str, Any]:
    try:
        chunk: dict[str, Any] = json.loads(octets)
        error = chunk.get("error")
        if error is None and not isinstance(chunk["choices"], list):
            raise ValueError("no choices")
    except (ValueError, KeyError, AttributeError) as e:
        raise CtlError("\nwhat answers is no OpenAI-compatible API") from e
    if error is not None:
        raise CtlError(f"\n{error['message']}")
    return chunk


def _asked(api: str, key: str | None, body: dict[str, Any]) -> HTTPResponse:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    if not api.startswith(("http://", "https://")):
        raise click.UsageError(f"--api {api}: write it as {API}")
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    url = f"{api.rstrip('/')}/chat/completions"
    request = Request(url, json.dumps(body).encode(), headers)  # checked above
    try:
        response: HTTPResponse = urlopen(request, timeout=600)
    except HTTPError as e:
        status = EXIT_REFUSED if e.code in (401, 403) else 1
        raise CtlError(message_of(e.read()) or f"{url}: status {e.code}", status=status) from e
    except (HTTPException, ValueError) as e:  # also a key that no field can hold
        raise cannot_be_asked(api) from e
    except (URLError, OSError) as e:
        raise nobody_answers(api, getattr(e, "reason", e)) from e
    return response


def _colour() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None
