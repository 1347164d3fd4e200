"""Errors as OpenAI's clients expect them: one JSON shape on every path."""

from __future__ import annotations

import json
import math
from typing import Any

from sdcpd.roles.generation import GenerationError
from sdcpd.transport.http import Headers, Response

JSON_HEADERS: Headers = (("content-type", "application/json"),)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    400: "bad_request",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    431: "headers_too_large",
    500: "internal_error",
    501: "not_implemented",
    503: "unavailable",
    505: "http_version_not_supported",
}
SESSION_FAILED = "sdcp_session_failed"


class ApiError(Exception):
    """A request that gets an error; the text is a sentence for the client's user."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code = code or _CODES.get(status)
        self.headers = headers

    def response(self) -> Response:
        """The whole response."""
        headers = (*JSON_HEADERS, *self.headers)
        return Response(self.status, headers, json.dumps(self.body()).encode())

    def body(self) -> dict[str, Any]:
        """The JSON object, which a stream sends as an event."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> ApiError:
    """The request's own fault: 400, naming the parameter."""
    return ApiError(400, message, param=param, code=code)


def not_begun(error: GenerationError) -> ApiError:
    """A text that could not be begun.

    Never a 409 or another status of the protocol between instances: clients would retry it.
    """
    if error.retry_after_s is None:
        return ApiError(502, str(error), code=SESSION_FAILED)
    return ApiError(503, str(error), headers=retry_after(error.retry_after_s))


def broken_off(error: GenerationError | str) -> ApiError:
    """A text that ended early; whoever has seen none of it may be told when to come again."""
    if isinstance(error, GenerationError) and error.retry_after_s is not None:
        return not_begun(error)
    return ApiError(502, str(error), code=SESSION_FAILED)


def retry_after(seconds: float) -> Headers:
    """The field in whole seconds, never 0 (RFC 9110 section 10.2.3)."""
    return (("retry-after", str(max(1, math.ceil(seconds)))),)


def refuse(status: int, text: str) -> Response:
    """Word what the HTTP server refuses by itself, before a request exists."""
    headers = retry_after(1) if status == 503 else ()
    return ApiError(status, text, headers=headers).response()
