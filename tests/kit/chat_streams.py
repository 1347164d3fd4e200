"""Streamed chats as a server writes them, for what the page makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Round = tuple[str, str, str]
"""Accepted, rejected, the verifier's own; the first two are empty where it decoded alone."""
DONE = "data: [DONE]\n\n"


def event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def chunk(content: str, *rounds: Round, alone: bool = False) -> str:
    """A piece of the text, with the rounds that it came of, if they are told."""
    told = [
        {"accepted": accepted, "rejected": rejected, "own": own, "self_decoded": alone}
        for accepted, rejected, own in rounds
    ]
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
    return event({"choices": [choice]} | ({"sdcp": {"rounds": told}} if told else {}))


def usage(tokens: int, accepted: int, rejected: int, sdcp: dict[str, Any]) -> str:
    """The chunk that ends a stream."""
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    whole = {"completion_tokens": tokens, "completion_tokens_details": details, "sdcp": sdcp}
    return event({"choices": [], "usage": whole})


def stream(*events: str, done: bool = True) -> dict[str, Any]:
    """The response."""
    return {
        "status": 200,
        "content_type": "text/event-stream; charset=utf-8",
        "body": "".join(events) + (DONE if done else ""),
    }


def refusal(status: int, message: str, *, code: str = "invalid_value") -> dict[str, Any]:
    """A response with the error shape."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {
        "status": status,
        "content_type": "application/json",
        "body": json.dumps({"error": error}),
    }


def texts(rounds: Sequence[Round]) -> str:
    """The answer that rounds come to."""
    return "".join(accepted + own for accepted, _, own in rounds)
