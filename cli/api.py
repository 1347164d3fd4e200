"""What commands that talk to the OpenAI-compatible API say of it, and where it is by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.endpoint import Kept
from cli.errors import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNREACHABLE, CtlError

if TYPE_CHECKING:
    import ssl
    from urllib.error import HTTPError

API = "http://127.0.0.1:8000/v1"
BYTES_MAX = 1 << 20  # of an answer that is not a text


class BaseUrl(click.ParamType[str]):
    """The base URL of an API."""

    name = "url"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text; a usage error, or CtlError where a context says it, for anything else."""
        from urllib.parse import urlsplit

        try:
            if value.startswith(("http://", "https://")) and urlsplit(value).hostname:
                return value
        except ValueError:
            pass
        why = f"must look like {API}"
        if isinstance(value, Kept):
            raise CtlError(value.wrong("api", why))
        self.fail(f'"{value}" {why}', param, ctx)


ca_option = click.option(
    "--ca",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="authorities of an API that speaks HTTPS; default: the system's, or SSL_CERT_FILE",
)


def tls_of(url: str, authority: Path | None) -> ssl.SSLContext | None:
    """How an API's certificate is checked; None where it speaks HTTP.  Raises CtlError."""
    import ssl

    if not url.startswith("https://"):
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as e:  # SSLError is one
        raise CtlError(f"{authority} holds no certificates: {e.strerror}") from e


def message_of(octets: bytes) -> str:
    """The sentence in the body of an error; empty where there is none."""
    try:
        return str(json.loads(octets)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def refused(url: str, error: HTTPError) -> CtlError:
    """What is said of an answer with the status of an error."""
    with error:
        said = message_of(error.read(BYTES_MAX)) or f"{url}: status {error.code}"
    statuses = {401: EXIT_REFUSED, 403: EXIT_REFUSED, 404: EXIT_NOT_FOUND}
    return CtlError(said, status=statuses.get(error.code, EXIT_FAILED))


def nobody_answers(api: str, why: object) -> CtlError:
    """What is said where nothing listens at a base URL, or something that is not trusted."""
    import ssl

    if isinstance(why, ssl.SSLCertVerificationError):
        return CtlError(
            f"{api}: its certificate is not trusted: {why.verify_message}.  Name the authority that"
            " issued it with --ca FILE, or by the variable SSL_CERT_FILE",
            status=EXIT_REFUSED,
        )
    return CtlError(
        f"nobody answers at {api}: {why}.  Is the router running, with [api] listen there?",
        status=EXIT_UNREACHABLE,
    )


def cannot_be_asked(api: str) -> CtlError:
    """What is said of an address that is none, of a key that no field can hold, and the like."""
    return CtlError(f"{api} can't be asked: is it the base URL of an API, and the key one?")
