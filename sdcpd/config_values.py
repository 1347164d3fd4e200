"""The kinds of values in a configuration file, each with its check and its words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from string import Formatter
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

from sdcpd.protocol.messages import Action
from sdcpd.protocol.uris import normalize_base_uri, parse_session_id, session_path_id
from sdcpd.units import (
    duration_or_never_s,
    duration_s,
    duration_value,
    percent,
    rate_per_s,
    size_octets,
    size_value,
)
from tiers.sizes import LMDB_BYTES_MAX

SILENCE_S_MIN = 2.0
_URI = {"type": "string", "pattern": "^https://"}
_STANDS_FOR = ("role", "name", "instance")


def as_text(value: object) -> str:
    """Text as it is; what is no text is none that is allowed."""
    return value if isinstance(value, str) else ""


def _digest(value: object) -> bytes | None:
    if value == "" or value is None:
        return None
    text = as_text(value).removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError('must be "sha256:" and 64 hexadecimal digits')
    return bytes.fromhex(text)


def _base_uri(value: object) -> str:
    if not isinstance(value, str) or normalize_base_uri(value) is None:
        raise ValueError('must be a base URI such as "https://gpu1.lab:7443/"')
    return value


def _listen(value: object) -> tuple[str, int]:
    host, _, port = as_text(value).rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError('must be an address such as "0.0.0.0:7443"')
    return host.strip("[]"), int(port)


def _ladder(value: object) -> tuple[int, ...]:
    names = {"reduce": 1, "switch": 2, "self_decode": 3, "fail": 5}
    known = ", ".join(names)
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a list of {known}")
    unknown = [entry for entry in value if as_text(entry) not in names]
    if unknown:
        shown = json.dumps(unknown[0]) if isinstance(unknown[0], str) else "what is no text"
        raise ValueError(f"{shown} is none of {known}")
    return tuple(names[entry] for entry in value)


def _m(value: object) -> int | None:
    if value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
        raise ValueError('must be "auto" or a number from 1 to 64')
    return value


def _predraft(value: object) -> bool | None:
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ValueError('must be "auto", true or false')
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not (value == "" or is_name(value)):
        raise ValueError('may hold only letters, digits, dot, dash and underscore, as in "gpu1"')
    return value


def _trust_domain(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9._-]{1,255}", value):
        raise ValueError('may hold only a-z, 0-9, dot, dash and underscore, as in "lab.example"')
    return value


def _device(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise ValueError('must be "auto", "cpu", "cuda" or "cuda:0"')
    return value


def _scope(value: object) -> bytes:
    scope = parse_session_id(as_text(value))
    if scope is None:
        raise ValueError(
            "must be a scope as URIs of objects have it: 16 octets, in 22 characters of base64url"
        )
    return scope


def _path_text(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL character (\\u0000), which no path can: take it out")
    return value


def _directory_or_file(value: object) -> object:
    if value == "":
        return None
    return _path_text(value) if isinstance(value, str) else value


def _template(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a path in quotes")
    try:
        fields = [field for field in Formatter().parse(value) if field[1] is not None]
    except ValueError:
        fields = [("", None, "", None)]
    # Names alone: a format or an index would be taken of the name's text.
    if any(name not in _STANDS_FOR or form or turn for _, name, form, turn in fields):
        raise ValueError("may hold {role}, {name} and {instance}, and no other braces")
    return _path_text(value)


def _more_than_zero(value: float) -> float:
    if value <= 0:
        raise ValueError("must be more than 0")
    return value


def _longer_than_a_beat(value: float) -> float:
    if value < SILENCE_S_MIN:
        raise ValueError("must be at least 2s: an engine that is idle is heard of once a second")
    return value


def _at_least(least: int, text: str) -> Callable[[int], int]:
    def check(value: int) -> int:
        if value < least:
            raise ValueError(f"must be at least {text}")
        return value

    return check


def _in_seconds(least_s: float, most_s: float, text: str) -> Callable[[float], float]:
    def check(value: float) -> float:
        if not least_s <= value <= most_s:
            raise ValueError(f"must be {text}")
        return value

    return check


def _in_a_file(value: int) -> int:
    if value > LMDB_BYTES_MAX:
        raise ValueError("must be at most 16TiB")
    return value


def _listen_value(value: tuple[str, int]) -> str:
    host, port = value
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_name(text: str) -> bool:
    """Whether a text can name an instance: it becomes part of file names and certificates."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text) is not None


def _like(show: Callable[[Any], object], schema: dict[str, Any]) -> tuple[Any, Any]:
    """How a value is written in a file, and what JSON Schema says of that."""
    return PlainSerializer(show, when_used="json"), WithJsonSchema(schema)


def _unit(units: str, *others: str) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)?({units})$"}
    return {"anyOf": [number, {"enum": list(others)}]} if others else number


_AS_DURATION = _like(duration_value, _unit("ms|s|min|h|d"))
_AS_SIZE = _like(size_value, _unit("B|[KMGT]i?B"))
_AS_RATE = _like(lambda value: f"{value:.12g}/s", _unit("/s|/min"))
_AS_PERCENT = _like(lambda value: f"{value}%", _unit("%"))
_AS_LISTEN = _like(_listen_value, {"type": "string", "pattern": "^.+:[0-9]{1,5}$"})
_AS_LADDER = _like(
    lambda value: [Action(entry).name.lower() for entry in value],
    {"type": "array", "items": {"enum": ["reduce", "switch", "self_decode", "fail"]}},
)
_NUMBER_OR_AUTO = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 64}, {"const": "auto"}]}

Positive = AfterValidator(_more_than_zero)
Duration = Annotated[float, BeforeValidator(duration_s), Positive, *_AS_DURATION]
DurationOrZero = Annotated[float, BeforeValidator(duration_s), *_AS_DURATION]
DurationOrNever = Annotated[
    float | None,
    BeforeValidator(duration_or_never_s),
    *_like(
        lambda value: "never" if value is None else duration_value(value),
        _unit("ms|s|min|h|d", "never"),
    ),
]
Silence = Annotated[Duration, AfterValidator(_longer_than_a_beat)]
Lease = Annotated[
    Duration,
    AfterValidator(_in_seconds(1, 86400, "from 1s, within which it is renewed, to 1d")),
]
Size = Annotated[int, BeforeValidator(size_octets), Positive, *_AS_SIZE]
Rate = Annotated[float, BeforeValidator(rate_per_s), Positive, *_AS_RATE]
ObjectSize = Annotated[Size, AfterValidator(_at_least(64 << 10, "64KiB"))]
BodySize = Annotated[Size, AfterValidator(_at_least(64 << 10, "64KiB"))]
LogSize = Annotated[Size, AfterValidator(_at_least(1 << 20, "1MiB")), AfterValidator(_in_a_file)]
Percent = Annotated[int, BeforeValidator(percent), *_AS_PERCENT]
Share = Annotated[Percent, AfterValidator(_at_least(1, "1%"))]
Digest = Annotated[
    bytes | None,
    BeforeValidator(_digest),
    *_like(
        lambda value: "" if value is None else f"sha256:{value.hex()}",
        {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    ),
]
BaseUri = Annotated[str, BeforeValidator(_base_uri), WithJsonSchema(_URI)]
Listen = Annotated[tuple[str, int], BeforeValidator(_listen), *_AS_LISTEN]
Ladder = Annotated[tuple[int, ...], BeforeValidator(_ladder), *_AS_LADDER]
M = Annotated[
    int | None,
    BeforeValidator(_m),
    *_like(lambda value: "auto" if value is None else value, _NUMBER_OR_AUTO),
]
Predraft = Annotated[
    bool | None,
    BeforeValidator(_predraft),
    *_like(
        lambda value: "auto" if value is None else value,
        {"anyOf": [{"type": "boolean"}, {"const": "auto"}]},
    ),
]
Device = Annotated[str, BeforeValidator(_device)]
Name = Annotated[str, BeforeValidator(_name)]
TrustDomain = Annotated[str, BeforeValidator(_trust_domain)]
Scope = Annotated[
    bytes,
    BeforeValidator(_scope),
    *_like(session_path_id, {"type": "string", "pattern": "^[A-Za-z0-9_-]{21}[AQgw]$"}),
]
OptionalPath = Annotated[
    Path | None,
    BeforeValidator(_directory_or_file),
    *_like(lambda value: "" if value is None else str(value), {"type": "string"}),
]
Template = Annotated[str, BeforeValidator(_template)]
"""A path in which `{role}`, `{name}` and `{instance}` stand for the instance's: of
`--role drafter-d1` the role is drafter, the name d1, and the instance drafter-d1."""
