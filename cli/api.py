"""What commands that talk to the OpenAI-compatible API say of it, and where it is by default."""

from __future__ import annotations

import json

from cli.errors import EXIT_UNREACHABLE, CtlError

API = "http://127.0.0.1:8000/v1"


def message_of(octets: bytes) -> str:
    """The sentence in the body of an error; empty where there is none."""
    try:
        return str(json.loads(octets)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def nobody_answers(api: str, why: object) -> CtlError:
    """What is said where nothing listens at a base URL."""
    return CtlError(
        f"nobody answers at {api}: {why}.  Is the router running, with [api] listen there?",
        status=EXIT_UNREACHABLE,
    )


def cannot_be_asked(api: str) -> CtlError:
    """What is said of an address that is none, of a key that no field can hold, and the like."""
    return CtlError(f"{api} can't be asked: is it the base URL of an API, and the key one?")
