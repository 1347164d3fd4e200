"""What keeps an instance from its work, in sentences for a person.

Some of it is asked for when somebody looks (a thread that hangs says nothing by itself), the rest
is noted by whoever meets it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tiers.api import TierStats

log = logging.getLogger("sdcpd.health")

CACHE_TROUBLE_S = 60.0  # since a tier's last error

Check = Callable[[], str | None]
"""Says in one sentence what is wrong now, None if nothing is."""


class Level(IntEnum):
    """How much of its work an instance cannot do, from little to all."""

    DEGRADED = 1
    """It serves, with less."""
    UNREADY = 2
    """It cannot serve now."""
    WEDGED = 3
    """The process cannot do its work any more; a restart may help."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong; `since` in monotonic seconds."""

    name: str
    level: Level
    text: str
    since: float


class Health:
    """The named troubles of one instance, used from its event loop."""

    def __init__(self, label: str = "") -> None:
        """`label` is the instance as people write it."""
        self.label = label
        self._checks: dict[str, tuple[Level, Check]] = {}
        self._troubles: dict[str, Trouble] = {}

    def watch(self, name: str, level: Level, check: Check) -> None:
        """Ask `check` whenever somebody looks."""
        self._checks[name] = (level, check)

    def note(self, name: str, level: Level, text: str) -> None:
        """Something is wrong until it is cleared; noted again, its sentence is the latest."""
        if name not in self._troubles:
            log.warning("%s: %s: %s", self.label, level.name.lower(), text)
        self._set(name, level, text)

    def clear(self, name: str) -> None:
        """What was noted is over; nothing happens if nothing was."""
        if (trouble := self._troubles.pop(name, None)) is not None:
            spent = time.monotonic() - trouble.since
            log.warning("%s: over after %.1f s: %s", self.label, spent, trouble.text)

    def troubles(self) -> list[Trouble]:
        """All that is wrong now, the worst first, then what is wrong for longest."""
        for name, (level, check) in self._checks.items():
            if (text := check()) is None:
                self._troubles.pop(name, None)
            else:
                self._set(name, level, text)
        return sorted(self._troubles.values(), key=lambda one: (-one.level, one.since))

    @property
    def ready(self) -> bool:
        """Whether the instance can serve."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why it is not ready."""
        return [one.text for one in self.troubles() if one.level >= Level.UNREADY]

    @property
    def degraded(self) -> list[str]:
        """What it does without."""
        return [one.text for one in self.troubles() if one.level is Level.DEGRADED]

    @property
    def wedged(self) -> str | None:
        """Why the process cannot do this instance's work any more; None while it can."""
        return next((one.text for one in self.troubles() if one.level is Level.WEDGED), None)

    def _set(self, name: str, level: Level, text: str) -> None:
        known = self._troubles.get(name)
        since = time.monotonic() if known is None else known.since
        self._troubles[name] = Trouble(name, level, text, since)


def engine_check(silence_s: Callable[[], float], limit_s: float) -> Check:
    """Whether an engine's thread has been silent for longer than `limit_s` seconds."""

    def check() -> str | None:
        silent_s = silence_s()
        if silent_s < limit_s:
            return None
        return (
            f"the engine's thread has shown no sign of life for {silent_s:.0f} s: its device or "
            "driver hangs, or a pass takes longer than engine_silence; restart the instance if it "
            "does not come back"
        )

    return check


def cache_check(
    stats: Callable[[], TierStats], *, clock: Callable[[], float] = time.monotonic
) -> Check:
    """Which tiers of a cache have failed within the last minute, as far as anybody looked."""
    seen: dict[int, tuple[int, float]] = {}

    def check() -> str | None:
        now, failing = clock(), []
        whole = stats()
        for number, tier in enumerate(whole.parts or (whole,), 1):
            count, since = seen.get(number, (0, 0.0))
            if tier.failures != count:
                seen[number] = tier.failures, (since := now)
            if tier.failures and now < since + CACHE_TROUBLE_S:
                failing.append(f"entry {number}, {tier.kind}, {tier.failures} times in all")
        if not failing:
            return None
        return (
            f"[mlc] tiers fail ({'; '.join(failing)}): what they keep is computed anew; see their "
            "disk, server or network"
        )

    return check
