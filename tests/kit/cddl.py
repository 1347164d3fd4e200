"""Every message that a role sends in any test is held to the draft's CDDL by pycddl.

The roles encode in three places: requests, answers and commit records.  `install` puts a check
there, in this process; for processes that tests start, `tests/kit/site` does it, and what they
find goes to the file that `SDCP_CDDL_REPORT` names.  `why_not` is the oracle for what roles take.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import cbor2
from pycddl import Schema, ValidationError

from tests.kit.outside_cbor import NotCbor, Pairs, Tagged, read

REPORT = "SDCP_CDDL_REPORT"
_RULES = (Path(__file__).parents[1] / "sdcp.cddl").read_text()
_NAMES = {
    "SessionOpen": "session-open",
    "SessionState": "session-state",
    "Assignment": "assignment",
    "Proposal": "proposal",
    "Verdict": "verdict",
    "Policy": "policy",
    "Status": "status",
    "Event": "event",
    "Output": "output",
    "CommitRecord": "commit-record",
    "FenceRecord": "fence-record",
    "LogprobsRequest": "logprobs-request",
    "LogprobsAnswer": "logprobs-answer",
}
_RECORDS = """
commit-record = { epoch: uint, round: uint, emitted: [+ uint], committed: uint, digest: hash32 }
fence-record = { epoch: uint }
; of this project alone (D-Z5)
logprobs-request = {
  target: hash32, tokens: [+ uint], from: uint, alternatives: 0..20, ? scope: bstr .size 16
}
logprobs-answer = { rows: [* [+ uint]] }
"""
# Keys of this project's own (D-Z5, D-Z6): a receiver ignores them, the CDDL's maps are closed.
_HINTS: dict[str, tuple[str, ...]] = {
    "session-open": ("self_decode_after_ms", "logprobs"),
    "assignment": ("vocab",),
    "status": (
        "engine",
        "model",
        "ready",
        "rules",
        "vocab",
        "dropped",
        "tokens_per_s",
        "certificate_until",
    ),
    "output": ("rounds", "drafted", "accepted", "self_decoded", "parts", "logprobs"),
}
WHERE = (
    ("sdcpd.roles.base", "encode"),
    ("sdcpd.roles.calls", "encode"),
    ("sdcpd.roles.commit_log", "encode_record"),
)


@lru_cache
def _schema(rule: str) -> Schema:
    return Schema(f"start = {rule}\n{_RULES}\n{_RECORDS}")


def validate(kind: str, octets: bytes) -> None:
    """Raise ValidationError if the octets are not a message of that class of ours."""
    rule = _NAMES[kind]
    content = cbor2.loads(octets)
    own = dict(content)
    _remove(own, _HINTS.get(rule, ()))
    if isinstance(own.get("status"), dict):
        own["status"] = dict(own["status"])
        _remove(own["status"], _HINTS["status"])
    _schema(rule).validate_cbor(octets if own == content else cbor2.dumps(own))


def why_not(kind: str, octets: bytes) -> str | None:
    """What the CDDL has against a body that a role was sent; None if it allows it.

    Unknown keys outside the contract are ignored (section 5.2), and so is what an unknown action
    is (it means fail).  What pycddl is known to let through is looked for here: tags, negative
    numbers, keys that come twice, and unknown keys of the contract's sampling.
    """
    rule = _NAMES[kind]
    try:
        written = read(octets)
        if not isinstance(written, Pairs):
            return "no map"
        own = _plain(_without_unknown(written, rule))
    except (NotCbor, ValueError) as e:
        return str(e)
    if rule == "event" and isinstance(own.get("kind"), int):
        own["kind"] = min(own["kind"], 5)
    contract = own.get("contract")
    sampling = contract.get("sampling") if isinstance(contract, dict) else None
    if isinstance(sampling, dict) and not sampling.keys() <= _keys("sampling"):
        return "an unknown key in the contract's sampling"
    try:
        _schema(rule).validate_cbor(cbor2.dumps(own))
    except ValidationError as e:
        return str(e)
    return None


@lru_cache
def _keys(rule: str) -> frozenset[str]:
    """The member names of a map rule, or of a map written out in one ("session-open.resume")."""
    outer, _, inner = rule.partition(".")
    text = re.sub(";.*", "", _RULES)
    found = re.search(rf"^{outer} = {{(.*?)^}}", text, re.DOTALL | re.MULTILINE)
    assert found is not None, rule
    body = found[1]
    nested = {m[1]: m[2] for m in re.finditer(r"(\w+): {(.*?)}", body, re.DOTALL)}
    members = nested[inner] if inner else re.sub(r"{.*?}", "", body, flags=re.DOTALL)
    return frozenset(re.findall(r"(\w+):", members))


_INNER = {
    ("session-open", "resume"): "session-open.resume",
    ("assignment", "sampling"): "sampling",
    ("policy", "sampling"): "sampling",
    ("proposal", "status"): "status",
}


def _without_unknown(written: Pairs, rule: str) -> Pairs:
    """Without unknown keys, also in the maps that are members; the contract is left whole."""
    kept = Pairs()
    if len({repr(key) for key, _ in written}) < len(written):
        raise ValueError("a key comes twice")
    for key, value in written:
        if not isinstance(key, str) or key not in _keys(rule):
            continue
        inner = _INNER.get((rule, key))
        if inner is not None and isinstance(value, Pairs):
            value = _without_unknown(value, inner)
        kept.append((key, value))
    return kept


def _plain(value: Any) -> Any:
    """What was read as ordinary values; raises ValueError for what no message has."""
    if isinstance(value, Pairs):
        plain = {_plain(key): _plain(member) for key, member in value}
        if len(plain) < len(value):
            raise ValueError("a key comes twice")
        return plain
    if isinstance(value, list):
        return [_plain(member) for member in value]
    if isinstance(value, Tagged):
        raise ValueError("a tag, or a simple value that nobody uses")
    if isinstance(value, int) and value < 0:
        raise ValueError("a negative number")
    return value


def _remove(content: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        content.pop(key, None)


def install(report: Callable[[str], None], seen: Callable[[str], None]) -> None:
    """Check what is encoded from now on: `seen` gets each kind, `report` each violation."""
    for module_name, function in WHERE:
        module = importlib.import_module(module_name)
        setattr(module, function, _checked(getattr(module, function), report, seen))


def _checked(
    inner: Callable[[Any], bytes], report: Callable[[str], None], seen: Callable[[str], None]
) -> Callable[[Any], bytes]:
    def encode_and_check(message: Any) -> bytes:
        octets = inner(message)
        kind = type(message).__name__
        seen(kind)
        try:
            validate(kind, octets)
        except Exception as e:  # whatever the validator says is a finding, not an end of the run
            report(f"{kind}: {e}: {octets.hex()}")
        return octets

    return encode_and_check


def install_in_child() -> None:
    """In a process that a test has started: append violations to the report file."""
    path = os.environ.get(REPORT)
    if not path:
        return

    def write(line: str) -> None:
        with open(path, "a") as file:
            file.write(line + "\n")

    install(lambda text: write(f"violation {text}"), lambda _: None)
