"""Another engine in a process of its own, asked by lines of JSON on its standard input.

    python -m tests.bench.engine_peer {transformers,transformers-lookup,llama,llama-lookup} MODEL

The first line that it says is {"missing": PACKAGE}, or {"ready": true}.  {"rendered": TEXT} is
answered by the tokens of that text, {"ids": [...], "tokens": COUNT} by a greedy continuation that
no end of text shortens, and the seconds that it took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LLAMA_CONTEXT = 2048
Encode = Callable[[str], list[int]]
Continue = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class Engine:
    """What a peer is asked for."""

    encode: Encode
    continue_: Continue


def transformers_engine(options: argparse.Namespace, *, lookup: bool) -> Engine:
    """`generate`, with prompt lookup or without."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    more = {"prompt_lookup_num_tokens": options.lookup_tokens or 5} if lookup else {}

    def encode(rendered: str) -> list[int]:
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def continue_(ids: Sequence[int], count: int) -> list[int]:
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        made = model.generate(
            given, attention_mask=mask, do_sample=False, max_new_tokens=count, **more
        )
        return [int(token) for token in made[0, len(ids) :]]

    return Engine(encode, continue_)


def llama_engine(options: argparse.Namespace, *, lookup: bool) -> Engine:
    """llama.cpp by llama-cpp-python, with its prompt lookup or without; MODEL is a GGUF file."""
    from llama_cpp import Llama  # type: ignore[import-not-found]
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]

    llama = Llama(
        options.model,
        n_ctx=LLAMA_CONTEXT,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=options.lookup_tokens or 10)
        if lookup
        else None,
        verbose=False,
    )

    def encode(rendered: str) -> list[int]:
        return list(llama.tokenize(rendered.encode(), add_bos=False, special=True))

    def continue_(ids: Sequence[int], count: int) -> list[int]:
        llama.reset()  # what the last text left would be taken for this one's beginning
        made: list[int] = []
        for token in llama.generate(list(ids), temp=0.0, repeat_penalty=1.0):
            made.append(int(token))
            if len(made) == count:
                break
        return made

    return Engine(encode, continue_)


KINDS: dict[str, tuple[Callable[..., Engine], bool]] = {
    "transformers": (transformers_engine, False),
    "transformers-lookup": (transformers_engine, True),
    "llama": (llama_engine, False),
    "llama-lookup": (llama_engine, True),
}
PACKAGES = {"llama_cpp": "llama-cpp-python"}


def answer(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """To one line."""
    if "rendered" in asked:
        return {"ids": engine.encode(asked["rendered"])}
    begin = time.perf_counter()
    made = engine.continue_(asked["ids"], asked["tokens"])
    return {"tokens": made, "seconds": time.perf_counter() - begin}


def say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("model", help="a Hugging Face directory, or a GGUF file for llama.cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lookup-tokens", type=int, help="drafted by prompt lookup at a time")
    options = parser.parse_args()
    make, lookup = KINDS[options.kind]
    try:
        engine = make(options, lookup=lookup)
    except ModuleNotFoundError as e:
        name = str(e.name).partition(".")[0]
        say({"missing": PACKAGES.get(name, name)})
        return
    say({"ready": True})
    for line in sys.stdin:
        say(answer(engine, json.loads(line)))


if __name__ == "__main__":
    main()
