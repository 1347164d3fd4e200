"""What the benchmark of the engine asks for: texts that do not repeat their prompt, and that do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from sdcpd.engine.tokenizer import TextModel

VARIED = (
    "Write a short story about a tiny dragon in a teacup.",
    "Give me five facts about the desert fox.",
    "Explain how magnets work to a child.",
    "Write a letter to a friend about a week in the mountains.",
    "Describe a busy market in the early morning.",
)

_LIGHTHOUSE = (
    "The lighthouse at Carrow Point was built in 1871 by Agnes Muir, who had drawn the plans while "
    "she was ill. Its lamp burned whale oil for nine years and paraffin for thirty. The keeper "
    "climbed 214 steps every evening, wound the clockwork and wrote the weather in a green book. "
    "In 1934 a cable was laid across the bay, and the last keeper, Tom Hale, moved to the village. "
    "His daughter kept the green book, and lent it to the museum at Dunmore in 1968."
)
_TYPOS = (
    "On Munday the bakery on Elm Street opens at six. Martha, who ownes it, mixes the dough before "
    "dawn and puts forty loafs into the big oven. Her son carrys the baskets to the market, where "
    "the fishermen wait for there breakfast. By noon nothing is left but crums, and Martha sweeps "
    "the floor, closes the shuters and goes home to sleep. In the evening she writes a list of what "
    "she needs from the mill, and puts it under the dor for the driver."
)
_CODE = """def read_table(path, separator=","):
    rows = []
    with open(path) as stream:
        header = stream.readline().strip().split(separator)
        for line in stream:
            values = line.strip().split(separator)
            if len(values) != len(header):
                raise ValueError("a row has the wrong number of values")
            rows.append(dict(zip(header, values)))
    if not rows:
        raise ValueError("the table has no rows")
    return rows"""
_STOCK = (
    "copper wire 2 mm, 14 rolls; brass hinges 40 mm, 260 pieces; oak boards 18 mm, 35 pieces; "
    "linseed oil, 12 litres; sandpaper grade 120, 400 sheets; wood glue, 9 bottles; "
    "steel screws 4 by 30, 1500 pieces; felt pads, 320 pieces; white paint, 24 tins; "
    "garden twine, 45 balls"
)

REPEATING = (
    f"Repeat the following text word for word.\n\n{_LIGHTHOUSE}",
    f"Correct the spelling of this text and write the whole text again.\n\n{_TYPOS}",
    f"Rename the variable rows to records and write the whole function.\n\n```python\n{_CODE}\n```",
    f"Write this list again, one item a line, and change nothing else.\n\n{_STOCK}",
    f"Summarise this text by quoting its most important sentences.\n\n{_LIGHTHOUSE} {_TYPOS}",
)
SETS = {"varied": VARIED, "repeating": REPEATING}

_HEROES = ("a clockmaker", "a lost penguin", "two sisters", "an old ferry")
_PLACES = ("on an island", "in a library", "under a bridge", "at the edge of a forest")
SESSIONS = tuple(f"Write a story about {hero} {place}." for hero in _HEROES for place in _PLACES)
"""One for each of the sessions that run at the same time."""

ARRIVING_TOKENS = 7500
_ORDINARY = 300  # below it lie special tokens and single octets


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message, as the chat template renders it, and its tokens."""

    message: str
    rendered: str
    ids: tuple[int, ...]


def prompt(text: TextModel, message: str) -> Prompt:
    """As the router makes it of a chat."""
    rendered = text.chat_prompt([{"role": "user", "content": message}])
    return Prompt(message, rendered, tuple(text.encode(rendered, special=False)))


def prompts(text: TextModel, messages: Sequence[str]) -> list[Prompt]:
    """All of them."""
    return [prompt(text, message) for message in messages]


@cache
def arriving(vocab: int, round_: int) -> list[int]:
    """The tokens of a long prompt; another one in each round."""
    chooser = random.Random(round_)
    return [chooser.randrange(_ORDINARY, vocab) for _ in range(ARRIVING_TOKENS)]
