"""LangChain's two classes for OpenAI's API."""

from __future__ import annotations

from typing import Any

import openai

from tests.clients.said import Said, Wanted, joined


class LangChainChat:
    """ChatOpenAI"""

    failures = (openai.APIError,)
    chat = tells_finish = True

    def whole(self, wanted: Wanted) -> Said:
        """See Client."""
        answer = self._model(wanted).invoke(wanted.prompt)
        return Said(answer.text, answer.response_metadata["finish_reason"])

    def streamed(self, wanted: Wanted) -> Said:
        """See Client."""
        chunks = self._model(wanted).stream(wanted.prompt)
        return joined((c.text, c.response_metadata.get("finish_reason")) for c in chunks)

    def _model(self, wanted: Wanted) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(**_settings(wanted))


class LangChainLegacy:
    """OpenAI, for completions."""

    failures = (openai.APIError,)
    chat, tells_finish = False, True

    def whole(self, wanted: Wanted) -> Said:
        """See Client."""
        ((generation,),) = self._model(wanted).generate([wanted.prompt]).generations
        return Said(generation.text, generation.generation_info["finish_reason"])

    def streamed(self, wanted: Wanted) -> Said:
        """See Client: its stream is of strings, so why it ended is only told by a chunk's info."""
        model = self._model(wanted)
        chunks = model._stream(wanted.prompt)
        return joined((c.text, (c.generation_info or {}).get("finish_reason")) for c in chunks)

    def _model(self, wanted: Wanted) -> Any:
        from langchain_openai import OpenAI

        settings = _settings(wanted)
        if "stop" in settings:  # no parameter of the class
            settings["model_kwargs"] = {"stop": settings.pop("stop")}
        return OpenAI(**settings)


def _settings(wanted: Wanted) -> dict[str, Any]:
    return {
        "model": wanted.model,
        "base_url": wanted.url,
        "api_key": "none",
        "max_retries": 0,
        **wanted.options,
    }
