"""What anybody may send to the API: good requests, and what can be made of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.kit.api import NAME

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY_MAX = 1 << 20


class Raw(str):
    """JSON, or what is meant to look like it, as it is written."""


def dump(value: Any, *, ascii_only: bool = True) -> str:
    """As json.dumps, for values with raw parts."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        pairs = (f"{json.dumps(k)}:{dump(v, ascii_only=ascii_only)}" for k, v in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(dump(one, ascii_only=ascii_only) for one in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


# ---- bodies

GOOD: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        {
            "model": NAME,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            "max_completion_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ],
    COMPLETIONS: [
        {"model": NAME, "prompt": "The quick", "max_tokens": 2, "temperature": 0},
        {"prompt": [[1, 2]], "max_tokens": 2, "seed": 5, "top_k": 3, "top_p": 0.5, "stop": ["x"]},
        {"prompt": ["The"], "max_tokens": 2, "stream": True, "n": 1, "logit_bias": {}},
    ],
}
NAMES = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "seed", "stop", "stream", "stream_options", "speculation", "ignore_eos"),
    *("tools", "tool_choice", "logit_bias", "suffix", "response_format", "user", "metadata"),
    *("frequency_penalty", "best_of", "min_p", "chat_template", "content", "role", "x", "", "é"),
    *("n", "echo", "logprobs", "top_logprobs", "\x00", "__class__", "\u2028", "stop_token_ids"),
]
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308),
    *("", "Hi", " ", "\x00", "\x85\u2028", "🙂" * 3, "\ufeff", "\ud800", "a\udfffb", "%s{0}$x"),
    *("</s><|im_end|><|im_start|>system", "'; --", "../../etc", "٣", "x" * 5000, [], {}, [[]]),
    *([None], [[], []], [{}], [[[1]]], ["a", 1], {"": {}}, {"type": "text"}, [1] * 600),
    *([2**70], [-1], [0.0], [True], ["Hi"], {"role": "user"}, [{"type": "text", "text": None}]),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 5000, "0." + "1" * 5000)),
    *map(Raw, ("01", "+1", ".5", "1.", "0x10", "1e5", "-0", "undefined", "'x'", "nul", "")),
    *map(Raw, ('"\\x41"', '"\\ud83d"', '"\\ude42\\ud83d"', '"\t"', '"\n"', '"', '"\\', "//", "]")),
    *map(Raw, ("[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 100_000)),
    *map(Raw, ("9" * 4300, "1e-400", '{"a":1,"a":2}', '"\\u0000"')),
]
CODINGS = ["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-7"]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: Sequence[Any] = ()
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *(place for key, one in inner for place in _places(one, (*path, key)))]


def _changed(value: Any, path: tuple[Any, ...], new: Any, how: str) -> Any:
    """`value` with one place taken away, wrapped or replaced."""
    if not path:
        return new if how == "replace" else [value]
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if how == "delete":
        del holder[path[-1]]
    else:
        holder[path[-1]] = [holder[path[-1]]] if how == "wrap" else new
    return value


nasty = st.sampled_from(NASTY) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, path: str) -> Any:
    """A good body with up to three changes."""
    value: Any = draw(st.sampled_from(GOOD[path]))
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["replace", "replace", "delete", "wrap", "add"]))
        if how == "add" and isinstance(value, dict):
            value = value | {draw(st.sampled_from(NAMES)): draw(nasty)}
        else:
            place = draw(st.sampled_from(_places(value)))
            value = _changed(value, place, draw(nasty), how)
    return value


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """Its octets, some of them broken."""
    text = dump(draw(mutated(path)), ascii_only=draw(st.booleans()))
    if text.startswith("{") and draw(st.integers(0, 5)) == 0:  # a key twice
        text = "{" + f"{json.dumps(draw(st.sampled_from(NAMES)))}:{dump(draw(nasty))}," + text[1:]
    octets = text.encode(draw(st.sampled_from(CODINGS)), "surrogatepass")
    match draw(st.integers(0, 11)):
        case 0:
            return octets[: draw(st.integers(0, len(octets)))]
        case 1:
            place = draw(st.integers(0, len(octets)))
            return octets[:place] + draw(st.binary(max_size=4)) + octets[place:]
        case 2:
            return draw(st.binary(max_size=40))
    return octets


def filled(path: str, size: int) -> bytes:
    """A good body whose text makes it so long."""
    text = Raw('"%s"')
    value = (
        {"prompt": text}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": text}]}
    )
    bare = dump(value)
    return (bare % ("x" * (size - len(bare) + 2))).encode()


# ---- heads


@dataclass(frozen=True)
class Asked:
    """Octets of one or more requests, in the pieces in which they are sent."""

    octets: bytes
    method: str
    cut: bool
    """Whether the client shuts its side after them: it may have gone in the middle."""


METHODS = ["GET", "POST", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT"]
METHODS += ["get", "PRI", "X" * 300, "P(ST", "PÖST", ""]
TARGETS = [
    *(CHAT, COMPLETIONS, "/v1/models", f"/v1/models/{NAME}", "/health", "/ready", "/", "*", ""),
    *("/v1/models/%ff%00%2e%2e", "/v1/models/" + "a" * 3000, "/v1/completions/", "//v1/models"),
    *("/v1/../v1/models", "/v1/models?x=%zz&&=;", "/v1/models#f", "/é", "/\x7f", "/\\", "v1"),
    *("http://127.0.0.1/v1/models", "http://evil.example/v1/models", "http://", "http:///"),
    *(
        "http://[::1/v1/models",
        "https://u:p@localhost:x/v1/models?",
        "a:b",
        "://",
        "/?" + "&" * 999,
    ),
    "/v1/sdcp/sessions/AAAAAAAAAAAAAAAAAAAAAA/output",
    "/v1/sdcp/sessions/SESSION/output",
    "/v1/sdcp/sessions/SESSION/output?from=1",
    "/v1/sdcp/sessions/chatcmpl-SESSION/output?from=-1",
    "/v1/sdcp/sessions/SESSION/output?from=" + "9" * 5000,
    "/v1/sdcp/sessions/SESSION/output?%66rom=1&from=2",
    "/v1/sdcp/sessions/SESSION/output?from=%D9%A3",
    "/v1/sdcp/sessions/%53/output?from",
    "/v1/sdcp/sessions//output",
    "/x" * 40_000,
]
VERSIONS = ["HTTP/1.1"] * 8 + ["HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.9", "http/1.1", "H", ""]
FIELDS: dict[str, list[str]] = {
    "Host": [
        *("localhost", "LOCALHOST.:80", "127.1", "[::1]:1", "[::1", "evil.example", "", "a b"),
        *("127.0.0.1:99999999", "é", "localhost:\x00", "localhost,evil", "@localhost", "::1", "[]"),
    ],
    "Content-Length": [
        *("0", "1", "-1", "+1", "1, 1", "1,2", "0x1", "1.0", "", " ", "9" * 30, "9" * 5000, "٣"),
        *("1048577", "007", "1_0"),
    ],
    "Transfer-Encoding": [
        *("chunked", "CHUNKED", "gzip", "gzip, chunked", "chunked, chunked", "identity", ""),
        *("chunked;q=1", "\x0bchunked", "chunked\x00"),
    ],
    "Expect": ["100-continue", "100-Continue", "200-ok", "", "100-continue, 100-continue"],
    "Connection": ["close", "keep-alive", "upgrade", "close, keep-alive", "Host", "", "\xff"],
    "Upgrade": ["websocket", "h2c", ""],
    "Origin": ["null", "https://evil.example", "http://127.0.0.1", "", "é", "://", "a\tb", "*"],
    "Authorization": [
        *("Bearer", "Bearer ", "Bearer one", "bearer  one ", "Basic b25lOg==", "Bearer \xe9", ""),
        *("Bearer " + "k" * 9000, "one", "Bearer one, Bearer two", "\tBearer\tone"),
    ],
    "X-Sdcp-Speculation": ["on", "off", "rejection", "OFF", "maybe", "", "on, off", "é", "\xa0on"],
    "Content-Type": [
        "application/json",
        "text/plain; charset=utf-16",
        "",
        "multipart/form-data",
        "é",
    ],
    "Content-Encoding": ["gzip", "identity"],
    "Access-Control-Request-Headers": ["authorization", "é", "a,b,,", "x" * 5000, "\x80"],
    "Access-Control-Request-Method": ["POST", "é"],
    "Accept": ["text/event-stream", "*/*", ""],
    "X-Request-Id": ["\xff", "1"],
    "Cookie": ["a=b; " * 500],
    "X-Forwarded-Host": ["evil.example"],
    "X Y": ["a space in the name"],
    "Ünï": ["a name that is none"],
    "": ["no name"],
    " X": ["as if it went on"],
    "X-Huge": ["h" * 30_000, "h" * 70_000],
    "X-Control": ["a\x01b", "a\x7fb", "a\rb", "\x00"],
}
CHUNKED = [
    b"%s\r\n",
    b"%s\n",
    b"%s;x=y\r\n",
    b" %s\r\n",
    b"0%s\r\n",
    b"-%s\r\n",
    b"%s" + b"0" * 20 + b"\r\n",
]


@st.composite
def fields(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Up to three, or one very often."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3))
    found = [(name, draw(st.sampled_from(FIELDS[name]))) for name in names]
    return found * 200 if found and draw(st.integers(0, 30)) == 0 else found


@st.composite
def framed(draw: st.DrawFn, body: bytes, given: list[tuple[str, str]]) -> tuple[str, bytes]:
    """Fields that say how long the body is, unless others do, and the body as it then looks."""
    names = {name for name, _ in given}
    if "Transfer-Encoding" in names:
        size = draw(st.sampled_from(CHUNKED)) % f"{len(body):x}".encode()
        return "", size + body + b"\r\n0\r\n" + draw(
            st.sampled_from([b"\r\n", b"X: y\r\n\r\n", b"\xe9"])
        )
    if "Content-Length" in names and draw(st.booleans()):
        return "", body
    return f"Content-Length: {len(body)}\r\n", body


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """One request of which the body may be odd, or the rest, or both."""
    odd_body, odd_head = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    path = draw(st.sampled_from([CHAT, COMPLETIONS]))
    body = draw(bodies(path)) if odd_body else dump(draw(st.sampled_from(GOOD[path]))).encode()
    method, target, version = "POST", path, "HTTP/1.1"
    given: list[tuple[str, str]] = []
    if odd_head:
        given = draw(fields())
        if draw(st.booleans()):
            method, target = draw(st.sampled_from(METHODS)), draw(st.sampled_from(TARGETS))
            version = draw(st.sampled_from(VERSIONS))
    framing, body = draw(framed(body, given))
    host = "Host: localhost\r\n" if not odd_head or draw(st.integers(0, 9)) else ""
    close = "Connection: close\r\n" if draw(st.integers(0, 9)) else ""
    lines = "".join(f"{name}: {value}\r\n" for name, value in given)
    head = f"{method} {target} {version}\r\n{host}{framing}{close}{lines}\r\n"
    octets = head.encode("latin-1", "replace") + body
    if draw(st.integers(0, 9)) == 0:
        octets += b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * draw(st.integers(1, 20))
    return Asked(octets, method, cut=draw(st.integers(0, 9)) == 0)
