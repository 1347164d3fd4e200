"""What an API is asked before it is measured: is it there, does it let us in, has it the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.api import API, cannot_be_asked, message_of, nobody_answers
from cli.errors import EXIT_NOT_FOUND, EXIT_REFUSED, CtlError

if TYPE_CHECKING:
    import ssl

TIMEOUT_S = 10.0
BYTES_MAX = 1 << 20


def tls_of(url: str, authority: Path | None) -> ssl.SSLContext | None:
    """How an API's certificate is checked; None where it speaks HTTP.  Raises CtlError."""
    import ssl

    if not url.startswith("https://"):
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as e:  # SSLError is one
        raise CtlError(f"{authority} holds no certificates: {e.strerror}") from e


def served_model(url: str, key: str | None, wanted: str | None, tls: ssl.SSLContext | None) -> str:
    """The model to ask: the one wanted if it is served, else the first; raises CtlError."""
    answer = _models(url, key, tls)
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


def _models(url: str, key: str | None, tls: ssl.SSLContext | None) -> Any:
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {url}: write it as {API}")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(f"{url}/models", None, headers)
        with urlopen(request, timeout=TIMEOUT_S, context=tls) as response:
            return json.loads(response.read(BYTES_MAX))
    except HTTPError as e:
        with e:
            said = message_of(e.read(BYTES_MAX)) or f"{url}/models: status {e.code}"
        raise CtlError(said, status=EXIT_REFUSED if e.code in (401, 403) else 1) from e
    except (HTTPException, ValueError) as e:
        raise cannot_be_asked(url) from e
    except OSError as e:  # URLError is one
        why = getattr(e, "reason", e)
        if isinstance(why, ssl.SSLCertVerificationError):
            raise CtlError(
                f"{url}: its certificate is not to be trusted: {why.verify_message}; name who"
                " issued it with --ca",
                status=EXIT_REFUSED,
            ) from e
        raise nobody_answers(url, why) from e
