"""Commands: curl, and llm with a file that names the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.clients.said import ClientFailed, Said, Wanted, joined

PATHS = {True: "/chat/completions", False: "/completions"}
LIMIT_S = 50


class Curl:
    """curl, and what somebody who reads its output sees."""

    failures = (ClientFailed,)
    tells_finish = True

    def __init__(self, *, chat: bool) -> None:
        self.chat = chat

    def whole(self, wanted: Wanted) -> Said:
        """See Client."""
        (choice,) = json.loads(self._run(wanted))["choices"]
        return Said(
            choice["message"]["content"] if self.chat else choice["text"], choice["finish_reason"]
        )

    def streamed(self, wanted: Wanted) -> Said:
        """See Client: a stream that does not end with [DONE] is none."""
        return joined(self._pieces(self._run(wanted, stream=True)))

    def _pieces(self, said: str) -> Iterator[tuple[str | None, str | None]]:
        *events, end, _ = said.split("\n\n")
        if end != "data: [DONE]":
            raise ClientFailed(end)
        for line in events:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text = choice["delta"].get("content") if self.chat else choice["text"]
            yield text, choice["finish_reason"]

    def _run(self, wanted: Wanted, **more: Any) -> str:
        asked = {"messages": [{"role": "user", "content": wanted.prompt}]}
        body = {"model": wanted.model, **wanted.options, **more}
        body |= asked if self.chat else {"prompt": wanted.prompt}
        words = ["curl", "-q", "-sS", "-N", "--fail-with-body", "-d", json.dumps(body)]
        return _run([*words, wanted.url + PATHS[self.chat]])


class Llm:
    """The command llm; its chat model, or the one for completions."""

    failures = (ClientFailed,)
    tells_finish = False

    def __init__(self, *, chat: bool) -> None:
        self.chat = chat

    def whole(self, wanted: Wanted) -> Said:
        """See Client."""
        return Said(self._run(wanted, "--no-stream"), None)

    def streamed(self, wanted: Wanted) -> Said:
        """See Client: the pieces are not to be seen in what a command has written."""
        text = self._run(wanted)
        return Said(text, None, len(text))

    def _run(self, wanted: Wanted, *more: str) -> str:
        name = self._name_model(wanted)
        options = [w for k, v in wanted.options.items() for w in ("-o", k, _word(v))]
        words = [sys.executable, "-m", "llm", "prompt", "--no-log", "-m", name, *options, *more]
        return _run([*words, wanted.prompt]).removesuffix("\n")

    def _name_model(self, wanted: Wanted) -> str:
        entry = {
            "model_id": "ours",
            "model_name": wanted.model,
            "api_base": wanted.url,
            **({} if self.chat else {"completion": True}),
        }
        path = Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml"
        path.write_text(json.dumps([entry]))  # which is YAML too
        return "ours"


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise ClientFailed(done.stdout + done.stderr)
    return done.stdout
