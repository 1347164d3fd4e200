"""Parameters that are known and not served: refused, unless they ask for nothing.

Penalties, min_p and logit_bias would change the target's distribution.  A contract has no member
for them, so a verifier could not hold proposals to it.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from sdcpd.roles.api_errors import invalid

HARMLESS: dict[str, tuple[object, ...]] = {
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
    "truncate_prompt_tokens": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "repeat_penalty": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "json_schema": (),
    "beam_width": (1,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
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
"""Their names, with the values that ask for nothing."""
_TOOLS = (("tools", "tool_choice"), ("functions", "function_call"))


def refuse_unserved(value: dict[str, Any], served: Container[str]) -> None:
    """Raise ApiError 400 for the first that asks for something; `served` are the others' names."""
    for name, choice in _TOOLS:
        if value.get(name) and value.get(choice) != "none":
            raise invalid(
                f"{name} are not served by this server; send none, or {choice} none",
                name,
                code="unsupported_parameter",
            )
    for name, harmless in HARMLESS.items():
        given = None if name in served else value.get(name)
        if given is not None and not any(_same(given, one) for one in harmless):
            raise invalid(
                f"{name} = {json.dumps(given)[:80]} is not served by this server; leave it out",
                name,
                code="unsupported_parameter",
            )


def _same(a: object, b: object) -> bool:
    """Equality that tells 0 from false."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)
