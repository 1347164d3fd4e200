"""From a checked body and its prompt's tokens to what is asked of the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdcpd.engine.tokenizer import TextModel
from sdcpd.roles.api_bodies import TextBody
from sdcpd.roles.api_errors import invalid
from sdcpd.roles.api_text import Wanted
from sdcpd.roles.generation import GenerationRequest
from sdcpd.transport.http import Request

SPECULATION_FIELD = "x-sdcp-speculation"
ECHO_VALUES_MAX = 1_000_000  # some 20 MB of JSON
SPECULATION_WORDS = ("on", "off", "rejection")


def plan(
    body: TextBody,
    prompt: Sequence[int],
    *,
    text: TextModel,
    param: str,
    max_new_default: int | None,
    request: Request,
) -> list[GenerationRequest]:
    """The texts to generate for a prompt; `param` is what it came from; raises ApiError 400.

    Without `max_new_default` a text may fill the rest of the context.
    """
    _check_prompt(prompt, text=text, param=param)
    room = text.context_max - len(prompt)
    wanted = body.max_new
    if wanted is None:
        wanted = room if max_new_default is None else min(max_new_default, room)
    if room < (0 if body.max_new == 0 else 1) or wanted > room:
        raise _too_long(body.max_new, len(prompt), context=text.context_max, param=param)
    first = GenerationRequest(
        prompt=tuple(prompt),
        max_new=wanted,
        stop=() if body.ignore_eos else text.eos,
        sampling=body.sampling(),
        speculate=(speculation := _speculation(body, request)) != "off",
        rejection=speculation == "rejection",
        logprobs=body.alternatives,
    )
    others = range(1, body.choices)
    return [first, *(replace(first, sampling=body.sampling(choice)) for choice in others)]


def check_length(plain: str, *, text: TextModel, param: str) -> None:
    """Raise ApiError 400 for a text that can't fit, without making tokens of it."""
    if (least := text.tokens_min(plain)) > text.context_max:
        raise _too_long(None, least, context=text.context_max, param=param, least=True)


def check_size(wanted: Sequence[Wanted]) -> None:
    """Raise ApiError 400 for echoes whose log-probabilities would be too many for one answer."""
    values = sum(
        len(one.request.prompt) * (1 + one.request.logprobs)
        for one in wanted
        if one.echo is not None and one.request.logprobs is not None
    )
    if values > ECHO_VALUES_MAX:
        raise invalid(
            f"prompt: {values} log-probabilities would be echoed, and an answer has at most"
            f" {ECHO_VALUES_MAX}; send fewer prompts at once, or ask for fewer alternatives",
            "prompt",
        )


def _check_prompt(prompt: Sequence[int], *, text: TextModel, param: str) -> None:
    if not prompt:
        raise invalid(f"{param} must not be empty", param)
    if min(prompt) < 0 or max(prompt) >= text.vocab:
        raise invalid(
            f"{param}: there are token ids that the model has not; its are 0 to {text.vocab - 1}",
            param,
        )


def _too_long(
    wanted: int | None, count: int, *, context: int, param: str, least: bool = False
) -> Exception:
    """Nothing is ever cut to make it fit. Some clients look for the first sentence."""
    has = f"at least {count}" if least else f"{count}"
    more = "" if wanted is None else f", and {wanted} tokens were asked for after it"
    return invalid(
        f"This model's maximum context length is {context} tokens. "
        f"However, the prompt has {has} tokens{more}. Shorten it, or ask for fewer.",
        param if count >= context else "max_tokens",
        code="context_length_exceeded",
    )


def _speculation(body: TextBody, request: Request) -> str:
    """Whether drafters may be used (D-Z6), and under which rule; either way of saying no counts."""
    field = (request.header(SPECULATION_FIELD) or "on").lower()
    if field == "rejection" and body.seed is not None:
        raise invalid("under rejection a seed does not fix the text; leave one out", "seed")
    if field not in SPECULATION_WORDS:
        words = f"{', '.join(SPECULATION_WORDS[:-1])} or {SPECULATION_WORDS[-1]}"
        raise invalid(f"{SPECULATION_FIELD} must be {words}", SPECULATION_FIELD)
    return "off" if body.speculation is False else field
