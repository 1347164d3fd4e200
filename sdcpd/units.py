"""Values with units, as configuration files and command lines write them."""

from __future__ import annotations

import math
import re

_DURATIONS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# What is more is a slip of the keyboard, and would overflow somewhere.
_DURATION_S_MAX = 3650 * 86400.0
_SIZE_BYTES_MAX = 1 << 50
_RATE_MAX = 1e6
_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%/]*)\s*$")


def _scaled(
    value: object, units: dict[str, float], example: str, *, most: tuple[float, str]
) -> float:
    """The number in the unit that stands for 1; `most` is the largest, and how to write it."""
    if not isinstance(value, str):
        raise ValueError(f'needs a unit, for example "{example}"')
    match = _NUMBER.match(value)
    if match is None or match[2] not in units:
        known = ", ".join(units)
        raise ValueError(f'must be a number with a unit ({known}), as in "{example}"')
    number = float(match[1]) * units[match[2]]
    if number > most[0]:
        raise ValueError(f"must be at most {most[1]}")
    return number


def duration_s(value: object) -> float:
    """A duration in seconds from text such as "500ms"; raises ValueError."""
    return _scaled(value, _DURATIONS, "3s", most=(_DURATION_S_MAX, "3650d"))


def duration_text(seconds: float) -> str:
    """A duration as people write it, in the largest unit of which there is one."""
    for unit, scale in reversed(_DURATIONS.items()):
        if seconds >= scale:
            return f"{seconds / scale:.3g}{unit}"
    return "0s"


def duration_value(seconds: float) -> str:
    """A duration as a file would have it, exactly, in the largest unit that has a whole number."""
    for unit, scale in reversed(_DURATIONS.items()):
        if seconds and math.isclose(seconds / scale, round(seconds / scale), rel_tol=1e-12):
            return f"{round(seconds / scale)}{unit}"
    return f"{seconds:.12g}s"


def size_value(octets: int) -> str:
    """A size as a file would have it, exactly."""
    units = sorted(_SIZES.items(), key=lambda one: (-one[1], one[0]))
    unit, scale = next(one for one in units if octets % one[1] == 0)
    return f"{octets // scale}{unit}" if octets else "0B"


def duration_or_never_s(value: object) -> float | None:
    """A duration in seconds, or None for "never"; raises ValueError."""
    return None if value == "never" else duration_s(value)


def size_octets(value: object) -> int:
    """A size in octets from text such as "8GiB"; raises ValueError."""
    return int(_scaled(value, dict(_SIZES), "8GiB", most=(_SIZE_BYTES_MAX, "1024TiB")))


def rate_per_s(value: object) -> float:
    """A rate a second from text such as "200/s"; raises ValueError."""
    units = {"/s": 1.0, "/min": 1 / 60}
    return _scaled(value, units, "200/s", most=(_RATE_MAX, "1000000/s"))


def percent(value: object) -> int:
    """A percentage from text such as "70%"; raises ValueError."""
    number = _scaled(value, {"%": 1.0}, "70%", most=(math.inf, ""))
    if not 0 <= number <= 100 or number != int(number):
        raise ValueError("must be a whole percentage from 0% to 100%")
    return int(number)
