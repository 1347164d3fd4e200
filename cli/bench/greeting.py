"""What an API is asked before it is measured: is it there, does it let us in, has it the model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cli.api import BYTES_MAX, cannot_be_asked, nobody_answers, refused
from cli.errors import EXIT_NOT_FOUND, CtlError

if TYPE_CHECKING:
    import ssl

TIMEOUT_S = 10.0


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
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(f"{url}/models", None, headers)
        with urlopen(request, timeout=TIMEOUT_S, context=tls) as response:
            return json.loads(response.read(BYTES_MAX))
    except HTTPError as e:
        raise refused(f"{url}/models", e) from e
    except (HTTPException, ValueError, RecursionError) as e:
        raise cannot_be_asked(url) from e
    except OSError as e:  # URLError is one
        raise nobody_answers(url, getattr(e, "reason", e)) from e
