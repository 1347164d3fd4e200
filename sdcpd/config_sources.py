"""Where the values of a configuration come from: files, the environment, the command line.

Later ones win, key by key: FILE, then the files `conf.d/*.toml` beside it in the order of their
names, then variables such as SDCPD__VERIFIER__MAX_SESSIONS=16, then --set verifier.max_sessions=16.
Entries of [[peers]] add up over the files.  Where all of them leave [api] keys_file empty, the
credential api-keys that systemd has passed is taken (LoadCredential= of the unit), unless empty.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcpd.config_problems import find_line, toml_problem

PREFIX = "SDCPD__"
DIRECTORY = "conf.d"
ADDED_UP = "peers"
CREDENTIAL = "api-keys"

Path_ = tuple[str, ...]


class SourceError(Exception):
    """Sources that can't be read; one line of text for each problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Layer:
    """One source: a file with its text, or single values that are all at one place."""

    name: str
    raw: dict[str, Any]
    text: str | None = None
    peers_before: int = 0

    def own(self, path: Path_) -> Path_ | None:
        """The path of a value as this source has it; None for an entry of another file."""
        if len(path) > 1 and path[0] == ADDED_UP and path[1].isdigit() and self.text is not None:
            index = int(path[1]) - self.peers_before
            return (path[0], str(index), *path[2:]) if index >= 0 else None
        return path

    def has(self, path: Path_) -> bool:
        """Whether a value, or what it is a part of, is from here."""
        own, here = self.own(path), self.raw
        found: Any = here
        for part in own or ("",):
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return False
        return True

    def place(self, path: Path_) -> str:
        """`FILE:LINE`, or what names the one value."""
        if self.text is None:
            return self.name
        return f"{self.name}:{find_line(self.text, self.own(path) or path)}"


class Sources:
    """All layers, the weakest first, and their values as one."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self.raw: dict[str, Any] = {}
        for layer in layers:
            _merge(self.raw, layer.raw, add_up=layer.text is not None)

    def where(self, path: Path_) -> str:
        """The place of a value, or of the nearest thing above it that is anywhere."""
        for end in range(len(path), 0, -1):
            if (found := self.origin(path[:end])) is not None:
                return found if end == len(path) else self._nearest(path, end)
        return f"{self._layers[0].name}:1" if self._layers else "the command line"

    def origin(self, path: Path_) -> str | None:
        """The place that a value was taken from; None for a default."""
        for layer in reversed(self._layers):
            if layer.has(path):
                return layer.place(path)
        return None

    def _nearest(self, path: Path_, end: int) -> str:
        layer = next(layer for layer in reversed(self._layers) if layer.has(path[:end]))
        return layer.place(path)


def read_sources(
    path: Path, *, environ: Mapping[str, str] | None = None, settings: Sequence[str] = ()
) -> Sources:
    """Read a file and what goes beside and over it; raises SourceError with every problem.

    `settings` are `section.key=value`, as --set has them.
    """
    layers: list[Layer] = []
    problems: list[str] = []
    for file in (path, *sorted((path.parent / DIRECTORY).glob("*.toml"))):
        try:
            before = sum(len(_peers(layer.raw)) for layer in layers)
            layers.append(_file_layer(file, before))
        except SourceError as e:
            problems += e.problems
    layers += _environment(environ or {})
    for setting in settings:
        try:
            layers.append(_setting(setting))
        except SourceError as e:
            problems += e.problems
    if problems:
        raise SourceError(problems)
    return Sources([*layers, *_credential(environ or {}, Sources(layers).raw.get("api"))])


def text_sources(text: str, *, name: str) -> Sources:
    """The text of one file alone; raises SourceError."""
    return Sources([_text_layer(text, name, 0)])


def _file_layer(path: Path, before: int) -> Layer:
    try:
        text = path.read_text("utf-8-sig")
    except OSError as e:
        raise SourceError([f"{path}: {e.strerror}; name a readable file with -c FILE"]) from e
    except UnicodeDecodeError as e:
        raise SourceError([f"{path}: not UTF-8 text at octet {e.start}; save it as UTF-8"]) from e
    return _text_layer(text, str(path), before)


def _text_layer(text: str, name: str, before: int) -> Layer:
    try:
        return Layer(name, tomllib.loads(text), text, before)
    except (ValueError, RecursionError) as e:
        raise SourceError([toml_problem(e, text=text, name=name)]) from e


def _environment(environ: Mapping[str, str]) -> Iterator[Layer]:
    for name in sorted(environ):
        if name.startswith(PREFIX):
            path = tuple(part.lower() for part in name.removeprefix(PREFIX).split("__"))
            yield Layer(f"environment {name}", _nested(path, _value(environ[name])))


def _credential(environ: Mapping[str, str], api: object) -> Iterator[Layer]:
    """The API keys of $CREDENTIALS_DIRECTORY; an empty file stands for none, so that it may lie
    there on every host."""
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if not directory or not isinstance(api, dict) or api.get("keys_file"):
        return
    path = Path(directory) / CREDENTIAL
    try:
        filled = path.stat().st_size > 0
    except OSError:
        return
    if filled:
        yield Layer(f"credential {CREDENTIAL}", _nested(("api", "keys_file"), str(path)))


def _setting(text: str) -> Layer:
    dotted, equals, value = text.partition("=")
    path = tuple(part.strip() for part in dotted.split("."))
    if not equals or not all(path):
        raise SourceError([f"--set {text}: write it as section.key=value"])
    return Layer(f"--set {dotted.strip()}", _nested(path, _value(value.strip())))


def _value(text: str) -> Any:
    """A value as a file would have it; text need not stand in quotes."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["v"] if parsed.keys() == {"v"} else text


def _nested(path: Path_, value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _merge(into: dict[str, Any], more: Mapping[str, Any], *, add_up: bool) -> None:
    for key, value in more.items():
        known = into.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge(known, value, add_up=False)
        elif add_up and key == ADDED_UP and isinstance(known, list) and isinstance(value, list):
            into[key] = known + value
        else:
            # What is merged into later must not be a layer's own.
            into[key] = _copied(value)


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def _peers(raw: Mapping[str, Any]) -> list[Any]:
    found = raw.get(ADDED_UP)
    return found if isinstance(found, list) else []
