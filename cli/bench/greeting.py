"""What an API is asked before it is measured: is it there, does it let us in, has it the model."""

from __future__ import annotations

import json
from typing import Any

import click

from cli.api import API, cannot_be_asked, message_of, nobody_answers
from cli.errors import EXIT_NOT_FOUND, EXIT_REFUSED, CtlError

TIMEOUT_S = 10.0
BYTES_MAX = 1 << 20


def served_model(url: str, key: str | None, wanted: str | None) -> str:
    """The model to ask: the one wanted if it is served, else the first; raises CtlError."""
    answer = _models(url, key)
    try:
        names = [str(one["id"]) for one in answer["data"]]
    except (KeyError, TypeError) as e:
        raise cannot_be_asked(url) from e
    if not names or (wanted is not None and wanted not in names):
        raise CtlError(
            f"{url} does not serve {wanted or 'any model'}; the models are: {', '.join(names)}",
            status=EXIT_NOT_FOUND,
        )
    return wanted or names[0]


def _models(url: str, key: str | None) -> Any:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {url}: write it as {API}")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(f"{url}/models", None, headers), timeout=TIMEOUT_S) as response:
            return json.loads(response.read(BYTES_MAX))
    except HTTPError as e:
        with e:
            said = message_of(e.read(BYTES_MAX)) or f"{url}/models: status {e.code}"
        raise CtlError(said, status=EXIT_REFUSED if e.code in (401, 403) else 1) from e
    except (HTTPException, ValueError) as e:
        raise cannot_be_asked(url) from e
    except OSError as e:  # URLError is one
        raise nobody_answers(url, getattr(e, "reason", e)) from e
