"""LiteLLM, by each of the providers that mean an API like OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.clients.said import Said, Wanted, joined


class LiteLlm:
    """litellm.completion(), which turns chats into prompts itself for completions."""

    tells_finish = True

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self.chat = not provider.startswith("text-completion")

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """See Client; imported late, since that takes seconds.

        A stream of completions raises what is beneath its own exceptions.
        """
        from litellm.exceptions import LITELLM_EXCEPTION_TYPES
        from litellm.llms.base_llm.chat.transformation import BaseLLMException

        return (*LITELLM_EXCEPTION_TYPES, BaseLLMException)

    def whole(self, wanted: Wanted) -> Said:
        """See Client."""
        (choice,) = self._ask(wanted).choices
        return Said(choice.message.content, choice.finish_reason)

    def streamed(self, wanted: Wanted) -> Said:
        """See Client."""
        return joined(self._pieces(wanted))

    def _pieces(self, wanted: Wanted) -> Iterator[tuple[str | None, str | None]]:
        for chunk in self._ask(wanted, stream=True):
            (choice,) = chunk.choices
            yield choice.delta.content, choice.finish_reason

    def _ask(self, wanted: Wanted, **more: Any) -> Any:
        import litellm

        return litellm.completion(
            model=f"{self._provider}/{wanted.model}",
            messages=[{"role": "user", "content": wanted.prompt}],
            api_base=wanted.url,
            api_key="none",
            num_retries=0,
            **wanted.options,
            **more,
        )
