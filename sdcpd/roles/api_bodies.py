"""Request bodies of the API: what is understood, what is refused, what is ignored.

null is the same as absent. A parameter that would change the text and is not served is refused
unless it has its harmless value; a parameter that nobody here knows is ignored.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sdcpd.protocol.messages import Sampling
from sdcpd.roles.api_errors import ApiError, invalid

log = logging.getLogger("sdcpd.api")
STOPS_MAX = 4
STOP_CHARACTERS_MAX = 1024  # text is held back for as long as this, and compared
SEED_MODULUS = 1 << 64
ROLES = ("system", "developer", "user", "assistant")

# Known parameters that are not served, with the values that ask for nothing.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TOOLS = (("tools", "tool_choice"), ("functions", "function_call"))


def _stops(value: object) -> object:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > STOPS_MAX:
        raise ValueError(f"may have at most {STOPS_MAX} strings")
    if not all(0 < len(s) <= STOP_CHARACTERS_MAX for s in strings):
        raise ValueError(f"each string must have 1 to {STOP_CHARACTERS_MAX} characters")
    return strings


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


def _prompt(value: object) -> object:
    """A text or a list of tokens; lists of one prompt are unpacked."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("must be one string or one list of token ids; send one prompt a request")
    return value


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class StreamOptions(_Section):
    """`stream_options`"""

    include_usage: bool | None = None


class Message(_Section):
    """One message of a chat."""

    role: str
    content: Annotated[str | None, BeforeValidator(_content)] = None
    tool_calls: list[Any] | None = None


class TextBody(_Section):
    """What both kinds of request share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: bool | None = None
    ignore_eos: bool | None = None

    @property
    def max_new(self) -> int | None:
        """Tokens wanted, if the request says."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> Sampling:
        """The profile, rounded to the protocol's 1/1000 (Section 4.1, D-S1 to D-S4)."""
        temperature = 1.0 if self.temperature is None else self.temperature
        # Rounding must not make a text greedy that was not asked to be.
        milli = max(1, round(1000 * temperature)) if temperature > 0 else 0
        return Sampling(
            temperature_milli=milli,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p_milli=None if self.top_p is None else round(1000 * self.top_p),
            seed=None if self.seed is None else self.seed % SEED_MODULUS,
        )


class CompletionBody(TextBody):
    """`POST /v1/completions`"""

    prompt: Annotated[str | list[int] | None, BeforeValidator(_prompt)] = None


class ChatBody(TextBody):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[Message], Field(min_length=1)]

    def for_template(self) -> list[dict[str, str]]:
        """Messages as templates know them: all system messages are one, and the first."""
        system, rest = [], []
        for index, message in enumerate(self.messages):
            text = _text_of(message, f"messages[{index}]")
            if message.role in ("system", "developer"):
                system.append(text)
            else:
                rest.append({"role": message.role, "content": text})
        first = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        return first + rest


B = TypeVar("B", bound=TextBody)


def read_body(kind: type[B], octets: bytes) -> B:
    """Parse and check a body, whatever its Content-Type says; raises ApiError 400."""
    value = _json_object(octets)
    _refuse_unserved(value)
    unknown = sorted(value.keys() - kind.model_fields.keys() - _HARMLESS.keys())
    if unknown:
        log.debug("ignored parameters: %s", ascii(unknown))
    try:
        return kind.model_validate(value)
    except ValidationError as e:
        raise _first(e) from e


def _json_object(octets: bytes) -> dict[str, Any]:
    try:
        value = json.loads(octets.decode("utf-8-sig"), parse_constant=_no_constant)
        if _SURROGATE.search(octets):
            json.dumps(value, ensure_ascii=False).encode()  # half a pair is no character
    except (ValueError, RecursionError) as e:
        raise invalid(f"the body is not JSON: {e}", code="invalid_json") from e
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return value


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _refuse_unserved(value: dict[str, Any]) -> None:
    for name, choice in _TOOLS:
        if value.get(name) and value.get(choice) != "none":
            raise invalid(
                f"{name} are not served by this server; send none, or {choice} none",
                name,
                code="unsupported_parameter",
            )
    for name, harmless in _HARMLESS.items():
        given = value.get(name)
        if given is not None and not any(_same(given, one) for one in harmless):
            raise invalid(
                f"{name} = {json.dumps(given)[:80]} is not served by this server; leave it out",
                name,
                code="unsupported_parameter",
            )


def _same(a: object, b: object) -> bool:
    """Equality that tells 0 from false."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


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


def _first(error: ValidationError) -> ApiError:
    """The first of pydantic's errors, which names its place."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = _place(first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return invalid(f"{place}: {text}", place, code=code)


def _place(location: Sequence[int | str]) -> str:
    """messages[0].content, as OpenAI's errors name it; which type of a union is left out."""
    named = [one for one in location if one not in ("str", "list[int]")]
    place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in named)
    return place.removeprefix(".")
