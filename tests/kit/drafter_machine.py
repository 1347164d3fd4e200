"""The drafter's machine with a contract, and verdicts for what it proposes."""

from __future__ import annotations

from sdcpd.protocol.digest import extend
from sdcpd.protocol.drafter import DrafterSession, DrafterSettings
from sdcpd.protocol.drafter_io import DrafterAction, DrafterEvent, DraftTokens
from sdcpd.protocol.messages import Action, Assignment, Verdict
from sdcpd.protocol.preparation import Payoff
from tests.kit.verifier_machine import SESSION, contract

DIGEST = b"\x07" * 32


def session(
    predraft: bool | None = False, payoff: Payoff | None = None, **changes: object
) -> tuple[DrafterSession, DraftTokens]:
    """A machine that has started, and the draft it asks for; `changes` are of its assignment."""
    members: dict[str, object] = {
        "session": SESSION,
        "epoch": 1,
        "contract": contract(),
        "verifier": "https://v0.test/",
        "drafter": "https://d0.test/",
        "prompt": (1, 2),
        "round": 0,
        "committed": 0,
        "digest": DIGEST,
        "m_init": 4,
        **changes,
    }
    machine = DrafterSession(
        Assignment(**members),  # type: ignore[arg-type]
        prompt=(1, 2),
        committed=(5,) * int(members["committed"]),  # type: ignore[call-overload]
        settings=DrafterSettings(predraft=predraft),
        verify_s=0.03,
        payoff=payoff,
    )
    (draft,) = machine.start(now=0.0)
    assert isinstance(draft, DraftTokens)
    return machine, draft


def one(machine: DrafterSession, event: DrafterEvent, *, now: float = 0.0) -> DrafterAction:
    """The one action that an event leads to."""
    (action,) = machine.step(event, now=now)
    return action


def verdict_for(machine: DrafterSession, emitted: tuple[int, ...], **changes: object) -> Verdict:
    """The verdict that commits these tokens, all but the last of them proposed."""
    members: dict[str, object] = {
        "session": SESSION,
        "epoch": 1,
        "round": machine.round + 1,
        "accepted": len(emitted) - 1,
        "emitted": emitted,
        "committed": machine.committed + len(emitted),
        "digest": extend(machine.digest, emitted),
        "action": Action.CONTINUE,
        "m_cap": 4,
        "low": 0,
        "load": 0,
        **changes,
    }
    return Verdict(**members)  # type: ignore[arg-type]
