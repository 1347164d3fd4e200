"""sdcpd.toml.example names every key, and what it says of defaults is so."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sdcpd.config import Config, load_config, parse_config
from sdcpd.config_problems import find_line, section_type

EXAMPLE = Path(__file__).parents[1] / "sdcpd.toml.example"
TEXT = EXAMPLE.read_text("utf-8")
# "#key = ..." and "#[section]" are the file; "# words" are for people.
WHOLE = re.sub(r"(?m)^#(?=[\[a-z])", "", TEXT)


def keys(model: type[BaseModel] = Config, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the file, as a path."""
    for name, info in model.model_fields.items():
        inner = section_type(info.annotation)
        if inner is None or (*path, name) == ("mlc", "tiers"):
            yield (*path, name)
        else:
            yield from keys(inner, (*path, name))


def field(path: tuple[str, ...]) -> FieldInfo:
    model: type[BaseModel] = Config
    for part in path[:-1]:
        inner = section_type(model.model_fields[part].annotation)
        assert inner is not None
        model = inner
    return model.model_fields[path[-1]]


def value(root: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        root = root[0] if isinstance(root, list) else root
        root = root[part] if isinstance(root, dict) else getattr(root, part)
    return root


def line(path: tuple[str, ...]) -> str:
    return WHOLE.split("\n")[find_line(WHOLE, path) - 1]


def test_it_is_valid_as_it_stands() -> None:
    assert load_config(EXAMPLE) == Config()


def test_it_is_valid_with_every_key_set() -> None:
    config = parse_config(WHOLE, name="example")
    assert config.router and config.verifier and config.drafter and config.api and config.peers


@pytest.mark.parametrize("path", list(keys()), ids=".".join)
def test_every_key_is_there_with_its_default(path: tuple[str, ...]) -> None:
    """What differs from the default, or has none, says so on its line."""
    value(tomllib.loads(WHOLE), path)  # KeyError: the example does not name the key
    comment = line(path).partition("  # ")[2]
    info = field(path)
    if info.is_required():
        assert comment == "REQUIRED"
        return
    if comment:
        assert comment.startswith(("default: ", "REQUIRED"))
        return
    shown = value(parse_config(WHOLE, name="example"), path)
    assert shown == info.get_default(call_default_factory=True)


def test_every_key_of_a_tier_is_there() -> None:
    section = TEXT[TEXT.index("#[mlc]") : TEXT.index("#[api]")]
    tier = section_type(Config.model_fields["mlc"].annotation)
    assert tier is not None
    entry = section_type(tier.model_fields["tiers"].annotation)
    assert entry is not None
    for key in entry.model_fields:
        assert f"{key} = " in section, key


def test_each_line_fits_a_terminal() -> None:
    assert max(map(len, TEXT.split("\n"))) <= 100
