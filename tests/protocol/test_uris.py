"""Base URIs, session ids, the output query and cache references: D-H5, D-H6, D-G3, D-M2, D-M3."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol import uris
from sdcpd.protocol.problems import Malformed

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())
CACHE = VECTORS["uris"]["cache_refs"]
BASE = CACHE["trusted_base"]
SCOPE = bytes.fromhex(CACHE["scope"])
SEGMENT = CACHE["scope_segment"]


@pytest.mark.parametrize("entry", VECTORS["uris"]["base_uri_equal"], ids=lambda e: e["b"])
def test_dh5_base_uri_equal(entry: dict[str, Any]) -> None:
    assert uris.base_uri_equal(entry["a"], entry["b"]) is entry["equal"]
    assert uris.base_uri_equal(entry["b"], entry["a"]) is entry["equal"]


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://",
        "https:///path",
        "http://d1.example/",
        "d1.example:8443",
        "https://d1.example:0/",
        "https://d1.example:65536/",
        "https://d1.example:x/",
        "https://d1.example/ ",
        " https://d1.example/",
        "https://d1.example/\n",
        "https://d1.example\\x",
        "https://dé.example/",
        "https://[::1/",
    ],
)
def test_dh5_what_is_no_base_uri_equals_nothing(uri: str) -> None:
    assert uris.normalize_base_uri(uri) is None
    assert not uris.base_uri_equal(uri, uri)


def test_dh5_one_trailing_slash_is_ignored_and_no_more() -> None:
    assert not uris.base_uri_equal("https://d1.example/a/", "https://d1.example/a//")
    assert uris.normalize_base_uri("https://D1.example/A/") == "https://d1.example:443/A"
    assert uris.normalize_base_uri("https://[::1]:8443/") == "https://[::1]:8443"


@pytest.mark.parametrize("base", ["https://v1.example:8443/s", "https://v1.example:8443/s/"])
def test_dh5_join_has_exactly_one_slash(base: str) -> None:
    assert uris.join(base, "proposals") == "https://v1.example:8443/s/proposals"


@pytest.mark.parametrize("entry", VECTORS["session_ids"]["valid"], ids=lambda e: e["id"])
def test_dh6_session_ids(entry: dict[str, str]) -> None:
    """R-5.1-5: base64url without padding."""
    session = bytes.fromhex(entry["session"])
    assert uris.session_path_id(session) == entry["id"]
    assert uris.parse_session_id(entry["id"]) == session


@pytest.mark.parametrize("entry", VECTORS["session_ids"]["invalid"], ids=lambda e: e["name"])
def test_dh6_other_segments_name_no_session(entry: dict[str, str]) -> None:
    assert uris.parse_session_id(entry["id"]) is None


@given(st.binary(min_size=16, max_size=16))
def test_dh6_session_ids_round_trip(session: bytes) -> None:
    assert uris.parse_session_id(uris.session_path_id(session)) == session


@given(st.text(max_size=24))
def test_dh6_only_the_one_spelling_is_read(segment: str) -> None:
    session = uris.parse_session_id(segment)
    assert session is None or uris.session_path_id(session) == segment


@pytest.mark.parametrize("entry", CACHE["cases"], ids=lambda e: e["ref"] or "empty")
def test_dm2_cache_references(entry: dict[str, Any]) -> None:
    assert uris.cache_ref_trusted(entry["ref"], [BASE], scope=SCOPE) is entry["fetch"]


def test_dm2_without_a_scope_anything_below_the_base_is_trusted() -> None:
    def trusted(ref: str) -> bool:
        return uris.cache_ref_trusted(ref, [BASE], scope=None)

    assert trusted(BASE + "logs/AAECAwQFBgcICQoLDA0ODw")
    assert not trusted(BASE)
    assert not trusted(BASE.removesuffix("/") + "-other/logs/x")
    assert not trusted(BASE + "a/%2E%2e/b")
    assert not trusted(BASE + "a/%5c/b")
    assert not trusted(BASE + "a/./b")
    assert not uris.cache_ref_trusted(BASE + "x", [], scope=None)


def test_dm3_a_cache_of_another_make_is_trusted_for_the_scopes_that_are_named() -> None:
    """Whatever its URIs look like; for other scopes, and for none, it is not, if it is also a base."""
    other = "https://cache.example/tenant-a/"

    def trusted(ref: str, scope: bytes | None) -> bool:
        return uris.cache_ref_trusted(ref, [other, BASE], scope=scope, scoped={other: {SCOPE}})

    assert trusted(f"{other}any/where", SCOPE)
    assert not trusted(f"{other}any/where", bytes(16))
    assert not trusted(f"{other}any/where", None)
    assert not trusted(f"{other}../where", SCOPE)
    assert not trusted(other, SCOPE)
    assert trusted(f"{BASE}objects/{SEGMENT}/x", SCOPE), "the others are as they were"
    assert not trusted("https://cache.example/tenant-ab/x", SCOPE)


def test_dm2_any_configured_base_will_do() -> None:
    ref = f"https://other.example/objects/{SEGMENT}/x"
    assert uris.cache_ref_trusted(ref, [BASE, "https://other.example"], scope=SCOPE)
    assert not uris.cache_ref_trusted(ref, [BASE, "http://other.example"], scope=SCOPE)


def test_dm3_a_base_may_name_its_own_path_pattern() -> None:
    bases = ["https://s3.example/bucket/{scope}/kv"]
    good = f"https://s3.example/bucket/{SEGMENT}/kv/x"
    assert uris.cache_ref_trusted(good, bases, scope=SCOPE)
    assert not uris.cache_ref_trusted(good, bases, scope=bytes(16))
    assert uris.cache_ref_trusted(good, bases, scope=None)
    assert not uris.cache_ref_trusted("https://s3.example/bucket/x", bases, scope=None)


@given(st.text(max_size=40))
def test_dm2_no_text_makes_the_check_raise(text: str) -> None:
    uris.cache_ref_trusted(BASE + text, [BASE], scope=SCOPE)
    uris.cache_ref_trusted(text, [BASE], scope=None)


@pytest.mark.parametrize("entry", VECTORS["output_queries"]["valid"], ids=lambda e: e["query"])
def test_dg3_output_queries(entry: dict[str, str]) -> None:
    assert uris.parse_from_query(entry["query"]) == int(entry["from"])


@pytest.mark.parametrize("entry", VECTORS["output_queries"]["invalid"], ids=lambda e: e["query"])
def test_dg3_other_queries_are_malformed(entry: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        uris.parse_from_query(entry["query"])


def test_dg3_long_numbers_are_refused_before_they_are_read() -> None:
    assert uris.parse_from_query("from=" + "0" * 10_000 + "7") == 7
    with pytest.raises(Malformed):
        uris.parse_from_query("from=" + "9" * 1_000_000)
