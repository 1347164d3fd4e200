"""Text that a peer has chosen, made fit for people and logs."""

from __future__ import annotations

NAME_SHOWN_MAX = 120  # characters


def one_line(text: str) -> str:
    """What a peer has chosen, fit for a line of log: nothing in it can begin another line."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def shown(name: str) -> str:
    """A name in somebody's certificate, as people are shown it."""
    return one_line(name if len(name) <= NAME_SHOWN_MAX else f"{name[:NAME_SHOWN_MAX]}...")
