"""Prompts that no cache can know: each begins with four words that no other begins with."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from cli.errors import CtlError


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Bruno Clara David Elena Felix Greta Hugo Irene Jonas Klara Leo Marta Nina Oskar Paula "
    "Quentin Rosa Samuel Tessa Ulrich Vera Walter Yara Zoe Anton Bella Cecil Dora Emil Flora "
    "Gustav Helen Ivan Julia Karl Lena Max Nora Otto Peter Ruth Simon Tom Ursula Victor Wanda "
    "Albert Betty Carlos Diana Edgar Frieda George Hanna Isaac Jane Kevin Lucy Martin Nelly "
    "Owen Philip Rita"
)
TRADES = _words(
    "baker sailor doctor farmer painter teacher tailor miner gardener clerk singer hunter "
    "weaver potter smith judge nurse pilot lawyer dancer cook writer builder barber banker "
    "actor guard driver fisher brewer butcher carpenter mason plumber printer porter shepherd "
    "soldier student surgeon trader waiter engineer chemist librarian merchant monk mayor thief "
    "king queen prince captain messenger beekeeper jeweller locksmith florist translator "
    "astronomer violinist carter cooper miller"
)
PLACES = _words(
    "Oslo Paris Rome Lisbon Vienna Berlin Madrid Dublin London Athens Prague Warsaw Cairo Lima "
    "Quito Delhi Tokyo Seoul Hanoi Manila Sydney Perth Boston Denver Dallas Chicago Toronto "
    "Havana Tunis Lagos Nairobi Dakar Riga Tallinn Vilnius Zagreb Sofia Minsk Kyiv Bern Geneva "
    "Milan Naples Turin Venice Genoa Porto Seville Bilbao Lyon Nice Ghent Bruges Bonn Bremen "
    "Leipzig Dresden Graz Linz Basel Cork Leeds York Bath"
)
THINGS = _words(
    "letter key map lamp coin book ring clock mirror flute basket candle stone feather rope "
    "drum kettle ladder wheel anchor bell bridge box brush button cage carpet chain chair coat "
    "cup curtain door drawer fan fence flag glove hammer harp hat hook jar knife lens lock mask "
    "needle net oar pen pipe plate quilt rake saddle scarf shell shoe spoon sword table tent "
    "trumpet"
)
WHERE = (
    "under the stairs",
    "behind the old mill",
    "in the harbour",
    "on the roof",
    "beside the river",
    "at the end of the garden",
    "in a drawer that had been locked for years",
    "between two walls",
)
THEN = (
    "Nobody in the house had seen it before.",
    "The rain had not stopped for a week.",
    "It was late, and the others were asleep.",
    "A neighbour said that it was worth nothing.",
    "There was a date on it, and half a name.",
    "The dog would not go near it.",
    "It had to be gone before the morning.",
    "Three people wanted it, and one of them lied.",
)
SIZE = 64
BUILT_IN = SIZE**4
# An odd number far from any small fraction of BUILT_IN: neighbours differ in their first words.
STEP = 10_368_889


class Prompts:
    """Hands out prompts one by one: the built-in ones, or those of a file."""

    def __init__(self, given: list[str] | None, *, seed: int, reuse: bool = False) -> None:
        """`reuse`: whether those of a file may be asked again once all were."""
        self._given, self._reuse, self._seed = given, reuse, seed
        self._start = random.Random(seed).randrange(BUILT_IN)
        self.taken = 0
        self.out = False
        """Whether one was wanted that there was not."""

    @property
    def repeated(self) -> int:
        """How many were handed out that had been before."""
        return 0 if self._given is None else max(0, self.taken - len(self._given))

    def take(self) -> str | None:
        """The next one; None where there is none any more."""
        if self._given is None:
            prompt = built_in(self._start + self.taken * STEP, self._seed)
        elif self._reuse or self.taken < len(self._given):
            prompt = self._given[self.taken % len(self._given)]
        else:
            self.out = True
            return None
        self.taken += 1
        return prompt


def built_in(number: int, seed: int) -> str:
    """The prompt of a number; two share their first four words only at a distance of BUILT_IN."""
    rest, words = number % BUILT_IN, []
    for of in (NAMES, TRADES, PLACES, THINGS):
        rest, at = divmod(rest, SIZE)
        words.append(of[at])
    name, trade, place, thing = words
    more = random.Random(f"{seed} {number}")
    first, second = more.sample(THEN, 2)
    return (
        f"{name} the {trade} of {place} kept one {thing}, found {more.choice(WHERE)} one winter"
        f" evening. {first} {second} What happened next was this:"
    )


def read_prompts(path: Path) -> tuple[list[str], int]:
    """The different prompts of a file, in its order, and how many stood there again.

    One a line, or JSON objects with `prompt`; raises CtlError, with the line.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise CtlError(f"{path} can't be read as text: {getattr(e, 'strerror', None) or e}") from e
    found = list(_prompts(path, text))
    if not found:
        raise CtlError(f"{path} has no prompt: write one a line, or JSON objects with `prompt`")
    different = list(dict.fromkeys(found))
    return different, len(found) - len(different)


def _prompts(path: Path, text: str) -> Iterator[str]:
    lines = [(at, line.strip()) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    as_json = path.suffix == ".jsonl" or bool(lines and lines[0][1].startswith('{"'))
    for at, line in lines:
        if not as_json:
            yield line
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as e:
            raise CtlError(f"{path}, line {at}: no JSON object with `prompt`") from e
        if not isinstance(prompt, str) or not prompt:
            raise CtlError(f"{path}, line {at}: `prompt` must be a text")
        yield prompt
