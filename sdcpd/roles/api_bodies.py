"""Request bodies of the API: what is understood, what is refused, what is ignored.

null is the same as absent. A parameter that would change the text and is not served is refused
unless it has its harmless value; a parameter that nobody here knows is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from sdcpd.protocol.logprobs import ALTERNATIVES_MAX
from sdcpd.protocol.messages import Sampling
from sdcpd.roles.api_errors import ApiError, invalid
from sdcpd.roles.api_messages import Body, ChatMessages, Messages, Section
from sdcpd.roles.api_unserved import HARMLESS, refuse_unserved

log = logging.getLogger("sdcpd.api")
STOPS_MAX = 4
STOP_CHARACTERS_MAX = 1024  # text is held back for as long as this, and compared
SEED_MODULUS = 1 << 64
CHOICES_MAX = 8
TEXTS_MAX = 128

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _stops(value: object) -> object:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > STOPS_MAX:
        raise ValueError(f"may have at most {STOPS_MAX} strings")
    if not all(0 < len(s) <= STOP_CHARACTERS_MAX for s in strings):
        raise ValueError(f"each string must have 1 to {STOP_CHARACTERS_MAX} characters")
    return strings


def _prompts(value: object) -> object:
    """A list of prompts, each a text or a list of tokens, of what may be one alone."""
    if value is None:
        return None
    one = isinstance(value, str) or (isinstance(value, list) and _are_tokens(value))
    prompts = [value] if one else value
    if isinstance(prompts, list) and len(prompts) > TEXTS_MAX:
        raise ValueError(f"{len(prompts)} texts in a request; there may be {TEXTS_MAX}")
    if not isinstance(prompts, list) or not all(
        isinstance(prompt, str) or (isinstance(prompt, list) and _are_tokens(prompt))
        for prompt in prompts
    ):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    return prompts


def _are_tokens(value: list[object]) -> bool:
    return bool(value) and set(map(type, value)) == {int}


def _whether(value: object) -> object:
    """Some clients say false where they mean none."""
    return None if value is False else value


_Alternatives = Annotated[int, Field(ge=0, le=ALTERNATIVES_MAX)]


class StreamOptions(Section):
    """`stream_options`"""

    include_usage: bool | None = None
    include_speculation: bool | None = None
    """Whether chunks tell what the rounds were like that their text came from."""


class TextBody(Body):
    """What both kinds of request for a text share."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: bool | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None

    @property
    def choices(self) -> int:
        """How many texts are wanted for a prompt."""
        return self.n or 1

    @property
    def max_new(self) -> int | None:
        """Tokens wanted, if the request says."""
        given = (self.max_completion_tokens, self.max_tokens)
        return next((count for count in given if count is not None), None)

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def rounds_in_stream(self) -> bool:
        """Whether a stream tells what the rounds were like."""
        return bool(self.stream_options and self.stream_options.include_speculation)

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to each token are wanted; None: no log-probabilities are."""
        raise NotImplementedError

    def check(self) -> None:
        """See Body."""
        if self.max_new == 0:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise invalid(f"{name} must be at least 1, or 0 with echo", name)

    def sampling(self, choice: int = 0) -> Sampling:
        """The profile, rounded to the protocol's 1/1000 (Section 4.1, D-S1 to D-S4)."""
        temperature = 1.0 if self.temperature is None else self.temperature
        # Rounding must not make a text greedy that was not asked to be.
        milli = max(1, round(1000 * temperature)) if temperature > 0 else 0
        return Sampling(
            temperature_milli=milli,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p_milli=None if self.top_p is None else round(1000 * self.top_p),
            seed=None if self.seed is None else _seed(self.seed % SEED_MODULUS, choice),
        )


class CompletionBody(TextBody):
    """`POST /v1/completions`"""

    # Checked by `_prompts`; pydantic would look at each of a million tokens once more.
    prompt: Annotated[Any, BeforeValidator(_prompts)] = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[_Alternatives | None, BeforeValidator(_whether)] = None

    @property
    def alternatives(self) -> int | None:
        """See TextBody."""
        return self.logprobs

    def check(self) -> None:
        """See Body."""
        if not self.echo:
            super().check()
        if self.best_of is not None and self.best_of != self.choices:
            raise invalid(
                f"best_of = {self.best_of} is not served: it must be n, which is {self.choices}",
                "best_of",
                code="unsupported_parameter",
            )
        texts = len(self.prompt or ()) * self.choices
        if texts > TEXTS_MAX:
            raise invalid(f"prompt: {texts} texts in a request; there may be {TEXTS_MAX}", "prompt")


class ChatBody(TextBody, ChatMessages):
    """`POST /v1/chat/completions`"""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None

    @property
    def alternatives(self) -> int | None:
        """See TextBody."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """See Body."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs = true", "top_logprobs")


B = TypeVar("B", bound=Body)


def read_body(kind: type[B], octets: bytes) -> B:
    """Parse and check a body, whatever its Content-Type says; raises ApiError 400."""
    value = _json_object(octets)
    refuse_unserved(value, kind.model_fields)
    unknown = sorted(value.keys() - kind.model_fields.keys() - HARMLESS.keys())
    if unknown:
        log.debug("ignored parameters: %s", ascii(unknown))
    try:
        body = kind.model_validate(value)
    except ValidationError as e:
        raise _first(e) from e
    body.check()
    return body


def _seed(seed: int, choice: int) -> int:
    """The seed of one of several choices (D-Z7)."""
    if choice == 0:
        return seed
    octets = seed.to_bytes(8, "big") + choice.to_bytes(4, "big")
    return int.from_bytes(hashlib.sha256(octets).digest()[:8], "big")


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
