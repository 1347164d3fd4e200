"""OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import openai

from tests.clients.said import Said, Wanted, joined


@contextmanager
def _client(wanted: Wanted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=wanted.url, api_key="none", max_retries=0) as client:
        yield client


class OpenAiChat:
    """client.chat.completions"""

    failures = (openai.APIError,)
    chat = tells_finish = True

    def whole(self, wanted: Wanted) -> Said:
        """See Client."""
        with _client(wanted) as client:
            (choice,) = client.chat.completions.create(**self._body(wanted)).choices
        return Said(choice.message.content, choice.finish_reason)

    def streamed(self, wanted: Wanted) -> Said:
        """See Client."""
        with _client(wanted) as client:
            chunks = client.chat.completions.create(**self._body(wanted), stream=True)
            return joined(
                (chunk.choices[0].delta.content, chunk.choices[0].finish_reason) for chunk in chunks
            )

    def _body(self, wanted: Wanted) -> dict[str, object]:
        messages = [{"role": "user", "content": wanted.prompt}]
        return {"model": wanted.model, "messages": messages, **wanted.options}


class OpenAiCompletions:
    """client.completions"""

    failures = (openai.APIError,)
    chat, tells_finish = False, True

    def whole(self, wanted: Wanted) -> Said:
        """See Client."""
        with _client(wanted) as client:
            (choice,) = client.completions.create(**self._body(wanted)).choices
        return Said(choice.text, choice.finish_reason)

    def streamed(self, wanted: Wanted) -> Said:
        """See Client."""
        with _client(wanted) as client:
            chunks = client.completions.create(**self._body(wanted), stream=True)
            return joined(
                (chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks
            )

    def _body(self, wanted: Wanted) -> dict[str, object]:
        return {"model": wanted.model, "prompt": wanted.prompt, **wanted.options}
