"""What a router asks for: acceptance rule and contract of a text (sections 4.1, 6.5; D-Z7)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sdcpd.protocol.instances import Board, Permitted
from sdcpd.protocol.messages import Action, Contract, InstanceRole, Rule, Sampling
from sdcpd.protocol.router import RouterSettings
from sdcpd.roles.generation import GenerationError, GenerationRequest

LADDER_MAX = 1024  # entries of a contract's ladder


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`[router]` as the role needs it."""

    base_uri: str
    tokenizer: bytes
    machine: RouterSettings = field(default_factory=RouterSettings)
    verifiers: tuple[str, ...] = ()
    """Those that may serve; empty: all whose certificate says that they are one."""
    sampling_rule: str = "auto"
    m_max: int = 16
    low_rounds: int = 8
    low_ratio: int | None = None
    fallback: tuple[int, ...] = (Action.REDUCE, Action.SWITCH, Action.SELF_DECODE)
    """The ladder; unless it ends in fail, its last entry is taken again and again."""
    self_load: int | None = 100
    self_max: int | None = None
    permitted: Mapping[str, Permitted] = field(default_factory=dict)
    trust_drafters: bool = False
    sessions_max: int = 1024
    kv_objects: bool = False
    """Whether verifiers publish KV in this router's cache, so that a failover looks for it."""


class ContractMaker:
    """Makes contracts of the operator's settings and of who is there."""

    def __init__(self, config: RouterConfig, board: Board) -> None:
        self._config, self._board = config, board

    def rule(self, request: GenerationRequest) -> Rule:
        """Temperature 0 is rule 1; otherwise by `sampling_rule` (D-Z7)."""
        if request.sampling.temperature_milli == 0:
            return Rule.GREEDY
        if self._config.sampling_rule != "auto":
            race = self._config.sampling_rule == "race"
            return Rule.RACE if race else Rule.SPECULATIVE_SAMPLING
        if request.rejection:
            return Rule.SPECULATIVE_SAMPLING
        now = time.monotonic()
        verifier = self._board.choose_verifier(now=now)
        status = self._board.status(verifier, InstanceRole.VERIFIER) if verifier else None
        served = status is not None and Rule.RACE in (status.rules or ())
        probe = _probe()
        if served and self._board.drafters(replace(probe, rule=Rule.RACE), now=now):
            return Rule.RACE
        rejection = replace(probe, rule=Rule.SPECULATIVE_SAMPLING)
        if self._board.drafters(rejection, now=now):
            return Rule.SPECULATIVE_SAMPLING
        return Rule.RACE

    def target_of(self, verifier: str) -> bytes:
        """The digest of a verifier's model; raises GenerationError where nobody has told."""
        status = self._board.status(verifier, InstanceRole.VERIFIER)
        permitted = self._config.permitted.get(verifier, Permitted())
        target = permitted.model or (status.model if status else None)
        if target is None:
            raise GenerationError(
                f"the model of verifier {verifier} is not known; set model in its [[peers]] entry"
            )
        return target

    def make(self, request: GenerationRequest, rule: Rule, verifier: str) -> Contract:
        target = self.target_of(verifier)
        sampling: Sampling | None = None
        if rule != Rule.GREEDY:
            sampling = request.sampling
            if rule == Rule.RACE and sampling.seed is None:
                sampling = replace(sampling, seed=secrets.randbits(64))
        return Contract(
            target=target,
            tokenizer=self._config.tokenizer,
            rule=rule,
            sampling=sampling,
            m_max=self._config.m_max,
            max_new=request.max_new,
            stop=request.stop,
            low_rounds=self._config.low_rounds,
            low_ratio=self._config.low_ratio,
            fallback=self._fallback(request.max_new),
            self_load=100 if not request.speculate else self._config.self_load,
            self_max=None if not request.speculate else self._config.self_max,
        )

    def _fallback(self, max_new: int) -> tuple[int, ...]:
        """The ladder; switching is left out while there is nobody to switch to.

        The draft fails a session at the ladder's end. A text must not fail because drafters are
        bad at it, so the ladder is as long as the text may need.
        """
        drafters = self._board.drafters(_probe(), now=time.monotonic())
        ladder = tuple(
            entry for entry in self._config.fallback if entry != Action.SWITCH or len(drafters) > 1
        )
        ladder = ladder or self._config.fallback
        more = min(LADDER_MAX, max_new // self._config.low_rounds + 1) - len(ladder)
        return ladder if ladder[-1] == Action.FAIL else ladder + ladder[-1:] * max(0, more)


def _probe() -> Contract:
    """A contract that stands for any, to ask which drafters would be permitted."""
    return Contract(
        target=bytes(32),
        tokenizer=bytes(32),
        rule=Rule.GREEDY,
        m_max=1,
        max_new=1,
        stop=(),
        low_rounds=1,
        fallback=(Action.FAIL,),
    )
