"""As much of PromQL as tells which metrics and labels an expression asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*") | (?P<range>\[[^\]]*\]) | (?P<name>[A-Za-z_:][\w:]*)
    | (?P<number>\d[\w.]*) | (?P<operator>=~|!~|!=|==|>=|<=|[-+*/%^=<>(){},]) | (?P<space>\s+)""",
    re.VERBOSE,
)
_WORDS = {"and", "or", "unless", "bool", "offset"}
_LABELS_FOLLOW = {"by", "without", "on", "ignoring", "group_left", "group_right"}


@dataclass(frozen=True)
class Selector:
    """A metric, and what is asked of its labels: (label, operator, value)."""

    name: str
    matchers: list[tuple[str, str, str]] = field(default_factory=list)


def tokens(expression: str) -> list[tuple[str, str]]:
    """Kind and text of each; raises ValueError for what is none."""
    found, at = [], 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"no PromQL at {at}: {expression[at:]}")
        at = match.end()
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match.group()))
    return found


def selectors(expression: str) -> Iterator[Selector]:
    """The metrics of an expression."""
    found = tokens(expression)
    texts = [text for _, text in found]
    assert texts.count("(") == texts.count(")") and texts.count("{") == texts.count("}")
    at = 0
    while at < len(found):
        kind, text = found[at]
        after = texts[at + 1] if at + 1 < len(texts) else ""
        at += 1
        if kind != "name" or text in _WORDS:
            continue
        if text in _LABELS_FOLLOW:
            at = texts.index(")", at) + 1
        elif after == "{":
            end = texts.index("}", at)
            yield Selector(text, list(_matchers(texts[at + 1 : end])))
            at = end + 1
        elif after != "(" and after not in _LABELS_FOLLOW:
            yield Selector(text)


def _matchers(texts: list[str]) -> Iterator[tuple[str, str, str]]:
    wanted = [text for text in texts if text != ","]
    for label, operator, value in zip(wanted[::3], wanted[1::3], wanted[2::3], strict=True):
        yield label, operator, value.strip('"')


def grouped_by(expression: str) -> set[str]:
    """Every label that an expression groups or joins by."""
    clauses = re.findall(rf"\b(?:{'|'.join(_LABELS_FOLLOW)})\s*\(([^)]*)\)", expression)
    return {label for clause in clauses for label in clause.replace(" ", "").split(",") if label}
