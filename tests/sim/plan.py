"""What a seed means: a cluster, the texts asked of it, and everything that goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sdcpd.protocol.messages import Action, Rule

STORE, ROUTER = "store", "r0"
FAULTS_UNTIL_S = 1.5  # after the first request; what begins later hits nobody
MESSAGES_HIT = 100  # faults hit one of the first so many messages, statuses not counted


ALL = ("message",) * 5 + ("crash",) * 2 + ("cut",) * 3 + ("silence",) * 2
FULL = ("message", "cut", "full", "full")  # a router that forgets must not be killed as well


@dataclass(frozen=True, slots=True)
class MessageFault:
    """One message, by its number: dropped, unanswered, sent twice or late."""

    number: int
    what: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"message {self.number}: {self.what}" + (
            f" by {self.seconds:.3f} s" if self.seconds else ""
        )


@dataclass(frozen=True, slots=True)
class Crash:
    """An instance is killed, and comes back with nothing in memory."""

    node: str
    at_s: float
    down_s: float

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s: {self.node} is killed, back after {self.down_s:.3f} s"


@dataclass(frozen=True, slots=True)
class Cut:
    """No message passes between two nodes for a while; "*" is everybody else."""

    one: str
    other: str
    at_s: float
    for_s: float

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s: no message between {self.one} and {self.other} for {self.for_s:.3f} s"


@dataclass(frozen=True, slots=True)
class Silence:
    """The statuses of an instance are lost for a while, so that they expire."""

    node: str
    at_s: float
    for_s: float

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s: no status of {self.node} for {self.for_s:.3f} s"


@dataclass(frozen=True, slots=True)
class Full:
    """The router's records cannot be written for a while."""

    at_s: float
    for_s: float

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s: the router's disk is full for {self.for_s:.3f} s"


Fault = MessageFault | Crash | Cut | Silence | Full


@dataclass(frozen=True, slots=True)
class Text:
    """One text asked for."""

    prompt: tuple[int, ...]
    max_new: int
    stop: tuple[int, ...]
    temperature_milli: int
    seed: int
    cancel_after: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that distinguishes one simulated world from another."""

    seed: int
    rule: Rule
    verifiers: int
    noise: tuple[float, ...]
    """Of each drafter's model: 0 drafts like the target, 1 unlike it."""
    texts: tuple[Text, ...]
    m_max: int
    low_rounds: int
    fallback: tuple[int, ...]
    self_load: int | None
    self_max: int | None
    enforcing: bool
    token_s: float
    """To draft a token."""
    predraft: bool | None
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: rule {int(self.rule)}, {self.verifiers} verifiers, drafters with "
            f"noise {self.noise}, m_max {self.m_max}, low_rounds {self.low_rounds}, fallback "
            f"{[int(entry) for entry in self.fallback]}, self_load {self.self_load}, self_max {self.self_max}, "
            f"{'enforcing' if self.enforcing else 'plain'} store, {self.token_s} s to draft a token, "
            f"predraft {self.predraft}"
        ]
        lines += [f"  text {index}: {text}" for index, text in enumerate(self.texts)]
        lines += [f"  {fault}" for fault in self.faults]
        return "\n".join(lines)


def make_plan(seed: int) -> Plan:
    """The world of a seed."""
    rng = random.Random(f"plan {seed}")
    drafting = random.Random(f"drafting {seed}")
    rule = rng.choice((Rule.GREEDY, Rule.RACE, Rule.SPECULATIVE_SAMPLING))
    verifiers = rng.choice((1, 1, 2, 2, 3))
    noise = tuple(rng.choice((0.0, 0.1, 0.3, 1.0)) for _ in range(rng.choice((0, 1, 2, 2, 3))))
    nodes = [f"v{i}" for i in range(verifiers)] + [f"d{i}" for i in range(len(noise))]
    kinds = rng.choice((ALL, ALL, ("message",), ("message", "silence"), ("late", "crash"), FULL))
    return Plan(
        seed=seed,
        rule=rule,
        verifiers=verifiers,
        noise=noise,
        texts=tuple(_text(rng, rule) for _ in range(rng.choice((1, 1, 2, 3)))),
        m_max=rng.choice((1, 4, 8, 16)),
        low_rounds=rng.choice((1, 2, 3, 8)),
        fallback=tuple(
            rng.choice((Action.REDUCE, Action.SWITCH, Action.SELF_DECODE))
            for _ in range(rng.choice((1, 3, 6)))
        )
        + rng.choice(((), (Action.FAIL,))),
        self_load=rng.choice((None, 0, 100, 100, 100)) if noise else 100,
        self_max=rng.choice((None, None, 1, 5)),
        enforcing=rng.random() < 0.5,
        token_s=drafting.choice((0.0, 0.0, 0.002, 0.02)),
        predraft=drafting.choice((None, True, True, False)),
        faults=tuple(_fault(rng, nodes, kinds) for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 12)))),
    )


def _text(rng: random.Random, rule: Rule) -> Text:
    vocab = 32
    return Text(
        prompt=tuple(rng.randrange(vocab) for _ in range(rng.choice((0, 1, 4)))),
        max_new=rng.choice((1, 6, 16, 30)),
        stop=tuple(rng.randrange(vocab) for _ in range(rng.choice((0, 0, 1)))),
        temperature_milli=0 if rule == Rule.GREEDY else rng.choice((300, 1000)),
        seed=rng.getrandbits(64),
        cancel_after=rng.choice((None,) * 9 + (4,)),
        at_s=rng.uniform(0, 0.2),
    )


def _fault(rng: random.Random, nodes: list[str], kinds: tuple[str, ...]) -> Fault:
    at_s = rng.uniform(0, FAULTS_UNTIL_S)
    kind = rng.choice(kinds)
    if kind in ("message", "late"):
        what = rng.choice(("dropped", "unanswered", "twice", "late", "answered late"))
        what = kind if kind == "late" else what
        return MessageFault(
            rng.randrange(MESSAGES_HIT), what, rng.choice((0.02, 0.2, 1.0, 5.0, 9.0))
        )
    node = rng.choice(nodes) if rng.random() < 0.6 else "v0"
    for_s = rng.choice((0.05, 0.3, 1.0, 5.0, 9.0))
    if kind == "crash":
        return Crash(rng.choice((node, node, ROUTER)), at_s, for_s)
    if kind == "full":
        return Full(at_s, for_s)
    if kind == "silence":
        return Silence(node, at_s, rng.choice((1.0, 4.0, 6.0)))
    other = rng.choice([n for n in (*nodes, ROUTER, STORE, STORE, "*") if n != node])
    return Cut(node, other, at_s, for_s)
