"""The strict decoder: RFC 8949 well-formedness and D-E2, D-E3."""

import math

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol import cbor
from sdcpd.protocol.cbor import DuplicateKeys, NotWellFormed, Simple, Tag, decode_one
from sdcpd.protocol.limits import NESTING_DEPTH_MAX

ITEMS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda children: (
        st.lists(children, max_size=5) | st.dictionaries(st.text(), children, max_size=5)
    ),
    max_leaves=20,
)


@given(ITEMS)
def test_de1_reads_what_another_encoder_writes(value: object) -> None:
    assert decode_one(cbor2.dumps(value)) == value
    assert decode_one(cbor2.dumps(value, canonical=True)) == value


@given(ITEMS)
def test_de2_every_truncation_is_refused(value: object) -> None:
    octets = cbor2.dumps(value)
    for end in range(len(octets)):
        with pytest.raises(NotWellFormed):
            decode_one(octets[:end])


@given(st.binary(max_size=60))
def test_arbitrary_octets_decode_or_are_not_well_formed(octets: bytes) -> None:
    try:
        decode_one(octets)
    except NotWellFormed:
        return


@pytest.mark.parametrize(
    ("octets", "value"),
    [
        ("f6", None),
        ("f7", Simple(23)),
        ("f0", Simple(16)),
        ("f8ff", Simple(255)),
        ("f90000", 0.0),
        ("f93c00", 1.0),
        ("fa47c35000", 100000.0),
        ("fb3ff199999999999a", 1.1),
        ("f97c00", math.inf),
        ("c24108", Tag(2, b"\x08")),
        ("d9d9f780", Tag(55799, [])),
        ("1bffffffffffffffff", 2**64 - 1),
        ("3bffffffffffffffff", -(2**64)),
        ("1800", 0),
        ("5f42010243030405ff", b"\x01\x02\x03\x04\x05"),
        ("7f657374726561646d696e67ff", "streaming"),
        ("9f018202039f0405ffff", [1, [2, 3], [4, 5]]),
        ("bf6346756ef563416d7421ff", {"Fun": True, "Amt": -2}),
        ("5fff", b""),
        ("7fff", ""),
        ("9fff", []),
        ("bfff", {}),
        ("981900" + "01" * 24, None),
    ],
)
def test_encodings_of_rfc8949(octets: str, value: object) -> None:
    data = bytes.fromhex(octets)
    if octets.startswith("9819"):  # a count of 25 and 25 elements
        assert decode_one(data) == [0] + [1] * 24
        return
    decoded = decode_one(data)
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    "octets",
    [
        "",  # nothing
        "ff",  # break
        "1c",  # reserved heads
        "3d",
        "5e",
        "fc",
        "1f",  # indefinite integers and tags do not exist
        "3f",
        "df00",
        "f800",  # simple value below 32 in two octets
        "f81f",
        "f8",
        "61ff",  # not UTF-8
        "62c3",
        "7f61c361a9ff",  # a character split between chunks
        "5f6161ff",  # chunk of another type
        "5f5f4100ffff",  # chunk of indefinite length
        "5f4100",  # no break
        "7f6161",
        "bf01ff",  # a key without a value
        "a1616101" + "00",  # octets after the item
        "8202ff",  # break inside a definite array
        "a201ff",
        "9bffffffffffffffff00",  # counts that no body could hold
        "bbffffffffffffffff00",
        "5bffffffffffffffff00",
        "7bffffffffffffffff00",
    ],
)
def test_de2_not_well_formed(octets: str) -> None:
    with pytest.raises(NotWellFormed):
        decode_one(bytes.fromhex(octets))


@pytest.mark.parametrize("opening", ["81", "9f", "a100", "bf00", "c1"])
def test_de2_nesting_deeper_than_32_is_refused(opening: str) -> None:
    closing = "ff" if opening in ("9f", "bf00") else ""
    decode_one(bytes.fromhex(opening * NESTING_DEPTH_MAX + "00" + closing * NESTING_DEPTH_MAX))
    with pytest.raises(NotWellFormed, match="deep"):
        decode_one(bytes.fromhex(opening * 33 + "00" + closing * 33))
    with pytest.raises(NotWellFormed, match="deep"):
        decode_one(bytes.fromhex(opening * 100_000))


@pytest.mark.parametrize(
    "octets",
    [
        "a2616101616102",  # text
        "a261610178016102",  # the second with a longer head
        "a201011801" + "02",  # integers
        "a2f501f502",  # true
        "a2f93c0001fa3f80000002",  # 1.0 in two widths
        "a281010181180102",  # arrays
        "a2a201020304" + "01" + "a203040102" + "02",  # maps, members in another order
        "a2c10001c1000" + "2",  # tags
        "bf616101616102ff",
        "a2416101" + "5f4161ff02",
        "a1a26161016161020" + "0",  # inside a key
        "a16178a2616101616102",  # inside a value
        "81a2616101616102",
        "c1a2616101616102",
    ],
)
def test_de2_duplicate_keys_are_found_whatever_their_encoding(octets: str) -> None:
    assert cbor.holds_duplicates(decode_one(bytes.fromhex(octets)))


@pytest.mark.parametrize(
    "octets",
    [
        "a3" + "0101" + "f501" + "f93c0001",  # 1, true and 1.0 are three values
        "a2" + "616101" + "416101",  # "a" and h'61'
        "a2" + "0001" + "f401",
        "a2" + "f93c0001" + "f9bc0001",
        "a2" + "810101" + "8102" + "01",
        "a2" + "f601" + "f701",
        "a2" + "c10001" + "c20001",
        "a2" + "0101" + "2001",
    ],
)
def test_de2_keys_of_other_types_are_other_keys(octets: str) -> None:
    value = decode_one(bytes.fromhex(octets))
    assert not isinstance(value, DuplicateKeys)
    assert not cbor.holds_duplicates(value)
