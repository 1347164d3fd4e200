"""What requests share: the name of a model, and the messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sdcpd.roles.api_errors import invalid

MESSAGES_MAX = 4096
ROLES = ("system", "developer", "user", "assistant")


def _content(value: object) -> object:
    """The text of a message: a string, or the text parts of a list, a line each."""
    if not isinstance(value, list):
        if isinstance(value, str) or value is None:
            return value
        raise ValueError("must be a string or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"parts of type {kind!r} are not served; only text is")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part must have a string as its text")
        texts.append(part["text"])
    return "\n".join(texts)


class Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class Message(Section):
    """One message of a chat."""

    role: str
    content: Annotated[str | None, BeforeValidator(_content)] = None
    tool_calls: list[Any] | None = None


class Body(Section):
    """What every request may have."""

    model: str | None = None

    def check(self) -> None:
        """Raise ApiError 400 for parameters that contradict each other."""


# Whoever sends a million that are wrong is told of the first, and nobody waits meanwhile.
Messages = Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]


class ChatMessages(Body):
    """What has the messages of a chat."""

    messages: Messages | None = None

    def for_template(self) -> list[dict[str, str]]:
        """Messages as templates know them: all system messages are one, and the first."""
        system, rest = [], []
        for index, message in enumerate(self.messages or ()):
            text = _text_of(message, f"messages[{index}]")
            if message.role in ("system", "developer"):
                system.append(text)
            else:
                rest.append({"role": message.role, "content": text})
        first = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        return first + rest


def _text_of(message: Message, place: str) -> str:
    if message.role not in ROLES:
        raise invalid(
            f"{place}.role: {message.role!r} is not served; expected one of {', '.join(ROLES)}",
            f"{place}.role",
        )
    if message.tool_calls:
        raise invalid(f"{place}.tool_calls are not served", f"{place}.tool_calls")
    if message.content is None and message.role != "assistant":
        raise invalid(f"{place}.content must be a string or a list of parts", f"{place}.content")
    return message.content or ""
