"""What is wrong with a configuration file: on which line, and what to write instead."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_WORDS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "path_type": "must be a path in quotes",
    "string_type": "must be text in quotes",
}
_ADD = {
    "base_uri": 'base_uri = "https://HOST:PORT/", what peers call this instance',
    "kind": 'kind = "pinned", "host", "lmdb", "remote" or "s3"',
    "router": 'router = "https://HOST:7442/", the router\'s base_uri',
    "size": 'size = "1GiB"',
}
# A value that is wrong there may be a key or hold a password, so it is not shown.
_UNSHOWN = ("endpoint", "access_key_id_file", "secret_access_key_file")
_SHOWN_MAX = 80
_TOML_HINTS = {
    "Invalid value": 'text, durations and sizes stand in quotes, as in name = "r0"',
    "Cannot overwrite": "the key stands twice; keep one",
    "Cannot declare": "the section stands twice; put its keys into one",
    "Unterminated": "close the quotes on the same line",
    'Expected "\'"': "close the quotes on the same line",
    "Illegal character": "close the quotes on the same line",
    "Expected '='": "a line is key = value, or a [section]",
    "Expected newline": 'one key a line, and text in quotes, as in name = "r0"',
}
_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"({_PART}(?:\s*\.\s*{_PART})*)"
_HEADER = re.compile(rf"\s*\[+\s*{_DOTTED}\s*\]+")
_KEY = re.compile(rf"\s*{_DOTTED}\s*=")


def toml_problem(error: ValueError | RecursionError, *, text: str, name: str) -> str:
    """One line for a file that is no TOML, or none that can be read."""
    if isinstance(error, RecursionError):
        lines = text.split("\n")
        deepest = max(range(len(lines)), key=lambda at: lines[at].count("[") + lines[at].count("{"))
        return f"{name}:{deepest + 1}: lists or tables nest too deeply; take the inner ones away"
    if not isinstance(error, tomllib.TOMLDecodeError):
        number = re.search(r"[0-9_]{4000,}", text)
        line = text.count("\n", 0, number.start() if number else 0) + 1
        return f"{name}:{line}: a number has too many digits; write it shorter"
    reason = str(error)
    match = re.search(r"\(at line (\d+)", reason)
    line = int(match[1]) if match else len(text.rstrip("\n").split("\n"))
    hint = next((hint for begin, hint in _TOML_HINTS.items() if reason.startswith(begin)), "")
    return f"{name}:{line}: not valid TOML: {reason}; {hint or 'correct this line'}"


def value_problem(
    error: Any, *, model: type[BaseModel], at: Callable[[tuple[str, ...]], str]
) -> str:
    """One line for one of pydantic's errors about `model`; `at` tells the place of a value."""
    path = tuple(str(part) for part in error["loc"])
    where = at(path)
    section = f"[{'.'.join(path[:-1])}]" if len(path) > 1 else "the file"
    given = error["input"]
    if error["type"] == "extra_forbidden":
        shown = _shown(path[-1])
        what = f"section [{shown[1:-1]}]" if isinstance(given, dict) else f"key {shown}"
        return f"{where}: unknown {what} in {section}{_did_you_mean(model, path)}"
    if error["type"] == "missing":
        add = _ADD.get(path[-1], f"{path[-1]} = ...")
        return f'{where}: key "{path[-1]}" is missing in {section}; add {add}'
    showable = isinstance(given, str | int | float | bool) and path[-1] not in _UNSHOWN
    shown = f" = {_shown(given)}" if showable else ""
    return f"{where}: {'.'.join(path)}{shown}: {_reason(error, model, path)}"


def _shown(given: str | float) -> str:
    """A value as the file has it, or its beginning."""
    # Python writes no number of thousands of digits.
    huge = isinstance(given, int) and given.bit_length() > 200
    text = hex(int(given)) if huge else json.dumps(given)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def _is_index(part: str) -> bool:
    """Whether a part of a path is the place in a list."""
    return re.fullmatch("[0-9]{1,6}", part) is not None


def in_order(problem: str) -> tuple[str, int]:
    """By source, then by line."""
    match = re.match(r"(.*?):(\d+): ", problem)
    return (match[1], int(match[2])) if match else ("\uffff", 0)


def find_line(text: str, path: tuple[str, ...]) -> int:
    """The line of a key, or of the nearest thing above it that is found; tomllib does not tell."""
    index = next((int(part) for part in path if _is_index(part)), 0)
    keys = [part for part in path if not _is_index(part)]
    lines = _index_lines(text)
    for end in range(len(keys), 0, -1):
        for table, key in ((".".join(keys[: end - 1]), keys[end - 1]), (".".join(keys[:end]), "")):
            for occurrence in (index, 0):
                if (table, occurrence, key) in lines:
                    return lines[table, occurrence, key]
    return 1


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `RouterSection | None` or `list[PeerSection]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := section_type(inner)) is not None:
            return found
    return None


def _reason(error: Any, model: type[BaseModel], path: tuple[str, ...]) -> str:
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    dotted = ".".join(path)
    match kind:
        case "value_error":
            return str(error["msg"]).removeprefix("Value error, ")
        case "greater_than_equal" | "less_than_equal":
            return _range(model, path, context)
        case "multiple_of":
            return f"must be a multiple of {context['multiple_of']}"
        case "literal_error":
            return f"must be {str(context['expected']).replace(chr(39), chr(34))}"
        case "list_type" if isinstance(given, dict):
            return f"head each entry with [[{dotted}]]"
        case "list_type":
            return "must be a list, in [ ]"
        case "model_type" | "model_attributes_type":
            return f"must be a section: a line [{dotted}] and its keys below"
        case _:
            message = str(error["msg"])
            return _WORDS.get(kind, f"{message[:1].lower()}{message[1:]}")


def _range(model: type[BaseModel], path: tuple[str, ...], context: Mapping[str, Any]) -> str:
    """Both ends of a key's range, where the model has both."""
    info = _fields_above(model, path).get(path[-1])
    ends = {"ge": None, "le": None, **context}
    for bound in info.metadata if info else ():
        for end in ("ge", "le"):
            ends[end] = getattr(bound, end, ends[end])
    if ends["ge"] is not None and ends["le"] is not None:
        return f"must be from {ends['ge']} to {ends['le']}"
    return f"must be at least {ends['ge']}" if ends["le"] is None else f"at most {ends['le']}"


def _did_you_mean(model: type[BaseModel], path: tuple[str, ...]) -> str:
    fields = _fields_above(model, path)
    close = difflib.get_close_matches(path[-1], list(fields), n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known are {', '.join(fields)}" if fields else ""


def _fields_above(model: type[BaseModel], path: tuple[str, ...]) -> dict[str, FieldInfo]:
    """The fields of the section that a key stands in."""
    for part in path[:-1]:
        if _is_index(part):
            continue
        info = model.model_fields.get(part)
        inner = section_type(info.annotation) if info else None
        if inner is None:
            return {}
        model = inner
    return dict(model.model_fields)


def _index_lines(text: str) -> dict[tuple[str, int, str], int]:
    """Line numbers by (table, which one of its name, key); the key of a header is empty."""
    lines: dict[tuple[str, int, str], int] = {}
    table, counts = "", dict[str, int]()
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            table = ".".join(_parts(header[1]))
            counts[table] = counts.get(table, -1) + 1
            lines.setdefault((table, counts[table], ""), number)
        elif key := _KEY.match(line):
            *inner, last = _parts(key[1])
            place = ".".join([table, *inner] if table else inner)
            lines.setdefault((place, counts.get(table, 0), last), number)
            if inner:
                lines.setdefault((place, 0, ""), number)
    return lines


def _parts(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(_PART, dotted)]
