"""Problem documents that the transport itself answers with (RFC 9457, D-H9, D-H10)."""

from __future__ import annotations

import json
from http import HTTPStatus

from sdcpd.transport.http import Response

PROBLEM_TYPE = "application/problem+json"


def problem(status: int, detail: str) -> Response:
    """A plain problem without a registered type; `detail` must reveal no prompt, token or key."""
    document = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    headers = (("content-type", PROBLEM_TYPE), ("cache-control", "no-store"))
    return Response(status, headers, json.dumps(document).encode())
