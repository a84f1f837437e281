"""Values in the chosen or detected format: valid, invalid and hostile ones."""

import json

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.console.browsing.decoding import TAKEN_APART_BYTES_MAX
from kera.console.browsing.formats import FORMATS, Decoder

PACKED = msgpack.packb({"id": 7, "tags": ["a", None]})


@pytest.mark.parametrize(
    ("value", "kind", "document"),
    [
        (b'{"a": 1}', "json", {"a": 1}),
        (b"plain", "text", "plain"),
        (b"17", "text", "17"),
        (PACKED, "msgpack", {"id": 7, "tags": ["a", None]}),
        (PACKED + b"\x00", "hex", PACKED + b"\x00"),
        (b"\x93\x01\x02\x03", "hex", b"\x93\x01\x02\x03"),
        (b"\x80", "hex", b"\x80"),
        (b"\x00\x00\x00\x00\x09?", "hex", b"\x00\x00\x00\x00\x09?"),
        (b"", "empty", ""),
        (None, "null", None),
    ],
)
def test_the_format_of_a_value_is_detected(value: bytes | None, kind: str, document: object) -> None:
    decoder = Decoder()
    assert (decoder.shown(value, 1000).kind, decoder.document(value)) == (kind, document)


@pytest.mark.parametrize(
    ("chosen", "value", "kind", "document"),
    [
        ("json", b"17", "json", 17),
        ("msgpack", b"\x93\x01\x02\x03", "msgpack", [1, 2, 3]),
        ("integer", (-5).to_bytes(8, "big", signed=True), "integer", -5),
        ("text", b"\xffa", "text", "\ufffda"),
        ("text", b"{}", "text", "{}"),
        ("hex", b"{}", "hex", b"{}"),
    ],
)
def test_a_value_is_decoded_in_the_chosen_format(chosen: str, value: bytes, kind: str, document: object) -> None:
    found = Decoder(chosen).shown(value, 1000)
    assert (found.kind, found.problem, Decoder(chosen).document(value)) == (kind, "", document)


@pytest.mark.parametrize(
    ("chosen", "value", "problem"),
    [
        ("json", b"{", "not JSON: "),
        ("json", b'{"a": 1, "a": 2}', "comes twice"),
        ("msgpack", b"\xc1", "not msgpack: "),
        ("integer", b"abc", "not Integer: 3 bytes"),
        ("schema", b"plain", "names no registered schema"),
        pytest.param("json", b"[" + b"1," * TAKEN_APART_BYTES_MAX + b"1]", "too long", id="too long"),
    ],
)
def test_a_value_that_does_not_fit_the_chosen_format_is_shown_with_a_reason(
    chosen: str, value: bytes, problem: str
) -> None:
    found = Decoder(chosen).shown(value, 1000)
    assert problem in found.problem
    assert found.text
    assert Decoder(chosen).document(value) == value


HOSTILE = {
    "deep": b"\x91" * 100_000 + b"\x01",
    "deep objects": b"\x81\xa1a" * 900 + b"\x01",
    "a length that is not there": b"\xdf\xff\xff\xff\xff",
    "names of numbers": msgpack.packb({1: 2}),
    "a time that is none": b"\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12,
    "an extension": msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
    "text that is none": b"\x81\xa1a\xa1\xff",
    "a name twice": b"\x82\xa1a\x01\xa1a\x02",
    "deep JSON": b"[" * 50_000,
    "half a character": b'["\\ud800"]',
    "a long number": b"[" + b"1" * 5_000 + b"]",
}


@pytest.mark.parametrize("chosen", FORMATS)
def test_hostile_values_are_shown_in_bounds(chosen: str) -> None:
    for kind, value in HOSTILE.items():
        found = Decoder(chosen).shown(value, 2000)
        found.text.encode()
        assert len(found.text) <= 2000, kind
        Decoder(chosen).document(value)


PACKED_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=12,
)


@given(
    st.sampled_from(list(FORMATS)),
    st.one_of(
        st.none(),
        st.binary(max_size=400),
        st.text(max_size=200).map(lambda text: text.encode()),
        PACKED_VALUES.map(msgpack.packb),
        st.tuples(PACKED_VALUES.map(msgpack.packb), st.integers(0, 40), st.binary(max_size=2)).map(
            lambda p: p[0][: p[1]] + p[2] + p[0][p[1] + 1 :]
        ),
        st.text(max_size=60).map(lambda text: json.dumps({"a": text}).encode()[:-1] + b"}"),
    ),
    st.integers(1, 300),
)
def test_any_value_is_shown_in_any_format_without_an_error(chosen: str, value: bytes | None, length_max: int) -> None:
    found = Decoder(chosen).shown(value, length_max)
    found.text.encode()
    assert len(found.text) <= max(length_max, 80)
    assert not set(found.text) & set("\x00\x07\x1b\x7f\u202e\u2066\ufeff")
    assert found.size_bytes == len(value or b"")
    Decoder(chosen).document(value)
