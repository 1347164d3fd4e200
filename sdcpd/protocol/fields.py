"""The vocabulary of the CDDL: what a member's value must be, and tables of members.

A reader takes a decoded value and returns the one that a message holds, or raises `Invalid` with a
text that names what is wrong and not the value (D-H10). Types are exact (D-E2): a bool, a float, a
bignum or null is never a uint.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sdcpd.protocol.limits import UINT_MAX
from sdcpd.protocol.messages import Message

Reader = Callable[[object], Any]
M = TypeVar("M", bound=Message)
_ABSENT = object()


class Invalid(ValueError):
    """A value that its CDDL rule does not allow; the text is a path and a reason."""


def uint(value: object) -> int:
    """Read `uint`."""
    if type(value) is not int or not 0 <= value <= UINT_MAX:
        raise Invalid("is not a uint")
    return value


def uint_between(low: int, high: int) -> Reader:
    """Return a reader of `uint` with both bounds included."""

    def read(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Invalid(f"is not a uint from {low} to {high}")
        return value

    return read


def text(value: object) -> str:
    """Read `tstr`."""
    if type(value) is not str:
        raise Invalid("is not text")
    return value


def boolean(value: object) -> bool:
    """Read `bool`."""
    if type(value) is not bool:
        raise Invalid("is not a boolean")
    return value


def octets(size: int) -> Reader:
    """Return a reader of `bstr .size`."""

    def read(value: object) -> bytes:
        if type(value) is not bytes or len(value) != size:
            raise Invalid(f"is not a byte string of {size} octets")
        return value

    return read


def uints(value: object) -> tuple[int, ...]:
    """Read `[* uint]`; a prompt may be long, so the checks run over the list as a whole."""
    if type(value) is not list:
        raise Invalid("is not an array")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > UINT_MAX):
        raise Invalid("has an element that is not a uint")
    return tuple(value)


def array_of(item: Reader, *, least: int = 0) -> Reader:
    """Return a reader of an array of `item` with at least `least` elements."""

    def read(value: object) -> tuple[Any, ...]:
        if type(value) is not list:
            raise Invalid("is not an array")
        if len(value) < least:
            raise Invalid("is empty")
        try:
            return tuple([item(element) for element in value])
        except Invalid as error:
            raise Invalid(f"has an element that {error}") from None

    return read


def converted(reader: Reader, convert: Callable[[Any], Any]) -> Reader:
    """Return a reader that passes what `reader` returns through `convert`."""
    return lambda value: convert(reader(value))


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a map; a hint that cannot be read counts as absent (D-Z5)."""

    key: str
    read: Reader
    optional: bool = False
    hint: bool = False
    attribute: str = ""

    @property
    def name(self) -> str:
        """The message's attribute, which differs from the key where that is a Python word."""
        return self.attribute or self.key


def required(key: str, read: Reader, *, attribute: str = "") -> Member:
    """Return a member that must be present."""
    return Member(key, read, attribute=attribute)


def optional(key: str, read: Reader) -> Member:
    """Return a member of the draft's CDDL that may be absent."""
    return Member(key, read, optional=True)


def hint(key: str, read: Reader) -> Member:
    """Return an unknown key of this project, which other makes ignore."""
    return Member(key, read, optional=True, hint=True)


KEY_SHOWN_MAX = 40  # characters of an unknown key that an answer repeats


class Table(Generic[M]):
    """The members of one message, in the order in which they are checked.

    `closed` refuses unknown keys, as the contract does; otherwise they are ignored (D-E3).
    """

    def __init__(self, kind: type[M], *members: Member, closed: bool = False) -> None:
        self.kind = kind
        self.closed = closed
        self._steps = [(m.key, m.name, m.read, m.optional, m.hint) for m in members]
        # Core deterministic order of text keys below 24 octets: by length, then octet by octet.
        self.encoded_order = sorted(
            ((m.key, m.name) for m in members), key=lambda pair: (len(pair[0]), pair[0])
        )

    def read(self, value: object) -> M:
        """Check a decoded map and build the message; raises Invalid."""
        return self.kind(**self.arguments(value))

    def arguments(self, value: object) -> dict[str, Any]:
        """Check a decoded map and return the message's constructor arguments; raises Invalid."""
        if not isinstance(value, dict):
            raise Invalid("is not a map")
        arguments: dict[str, Any] = {}
        for key, name, read, is_optional, is_hint in self._steps:
            raw = value.get(key, _ABSENT)
            if raw is _ABSENT:
                if is_optional:
                    continue
                raise Invalid(f"has no {key}")
            try:
                arguments[name] = read(raw)
            except Invalid as error:
                if not is_hint:
                    raise Invalid(f"{key} {error}") from None
        if self.closed and len(arguments) != len(value):
            known = {step[0] for step in self._steps}
            unknown = next(key for key in value if key not in known)
            raise Invalid(f"has an unknown key, {ascii(unknown)[:KEY_SHOWN_MAX]}")
        return arguments

    def plain(
        self, message: Message, tables: "Mapping[type[Message], Table[Any]]"
    ) -> dict[str, Any]:
        """Return the map to encode, with keys in deterministic order and absent ones left out."""
        members: dict[str, Any] = {}
        for key, name in self.encoded_order:
            value = getattr(message, name)
            if value is None:
                continue
            if isinstance(value, Message):
                value = tables[type(value)].plain(value, tables)
            members[key] = value
        return members
