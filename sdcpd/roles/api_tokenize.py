"""`/tokenize`, `/detokenize` and `/version`, in the shapes that vLLM gave them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

import sdcpd
from sdcpd.engine.tokenizer import TextModel
from sdcpd.roles.api_errors import invalid
from sdcpd.roles.api_messages import Body, ChatMessages
from sdcpd.roles.api_texts import chat_tokens, encode, run_beside

CHARACTERS_MAX = 1 << 20  # others' prompts wait for the tokens of it


class TokenizeBody(ChatMessages):
    """`POST /tokenize`: of a text or of a chat."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """See Body."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("send either prompt or messages", "prompt")
        if self.prompt is not None and len(self.prompt) > CHARACTERS_MAX:
            raise invalid(f"prompt: at most {CHARACTERS_MAX} characters at once", "prompt")


class DetokenizeBody(Body):
    """`POST /detokenize`"""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


async def tokenize(body: TokenizeBody, text: TextModel) -> dict[str, Any]:
    """The tokens of what was sent, as a request with it would have them; raises ApiError 400.

    Without `add_special_tokens` a text gets those of its tokenizer, and a chat none but its
    template's.
    """
    if body.prompt is not None:
        tokens = await encode(text, body.prompt, special=body.add_special_tokens is not False)
    else:
        tokens = await chat_tokens(text, body, special=body.add_special_tokens is True)
    names = None
    if body.return_token_strs:
        names = [text.tokenizer.id_to_token(token) for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": text.context_max,
        "tokens": list(tokens),
        "token_strs": names,
    }


async def detokenize(body: DetokenizeBody, text: TextModel) -> dict[str, Any]:
    """The text of tokens, special ones included; raises ApiError 400."""
    if any(token >= text.vocab for token in body.tokens):
        raise invalid(f"tokens: the model's are 0 to {text.vocab - 1}", "tokens")
    shown = await run_beside(len(body.tokens), text.decode_all, body.tokens)
    return {"prompt": shown}


def version() -> dict[str, Any]:
    """What this is."""
    return {"version": sdcpd.__version__, "server": "sdcpd"}
