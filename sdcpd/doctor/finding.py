"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` is ok, warn or FAIL; the text says what, and for the last two what to do."""

    area: str
    level: str
    text: str
