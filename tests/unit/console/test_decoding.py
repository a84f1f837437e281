import json
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.client.json_form import row_lines, texts_of
from kera.console.browsing.decoding import Shown, brief, jsonable, shown, shown_cell, shown_columns, shown_document
from kera.console.browsing.row_json import Rows


@given(
    st.one_of(st.none(), st.binary(max_size=400), st.text(max_size=200).map(str.encode), st.just(b"two\r\nlines")),
    st.integers(1, 300),
)
def test_any_key_is_shown_in_one_bounded_line(value: bytes | None, length_max: int) -> None:
    found = brief(value, length_max)
    found.encode()
    assert len(found) <= max(length_max + 1, len("null"))
    assert not set(found) & set("\r\n\x00\x1b\u202e")


def test_json_is_indented() -> None:
    found = shown(b'{"b": [1, 2], "a": "\\u00e9"}', 1000)
    assert (found.kind, json.loads(found.text)) == ("json", {"b": [1, 2], "a": "é"})
    assert "\n" in found.text
    assert not found.cut


HURTFUL = {
    "deep": b"[" * 50_000,
    "deep objects": b'{"a":' * 9_000,
    "deep and whole": b"[" * 900 + b"]" * 900,
    "a long number": b"[" + b"1" * 5_000 + b"]",
    "half a character": b'["\\ud800"]',
    "none": b"{not json",
}


@pytest.mark.parametrize("value", HURTFUL.values(), ids=list(HURTFUL))
def test_invalid_or_hostile_json_is_shown_in_bounds(value: bytes) -> None:
    found = shown(value, 2000)
    found.text.encode()
    assert found.kind in {"text", "json"}
    assert len(found.text) <= 2000


def test_text_is_shown_unchanged_and_cut_between_characters() -> None:
    assert shown("grüße ✓".encode(), 100)[:2] == ("text", "grüße ✓")
    long = shown("✓".encode() * 5000, 100)
    assert (long.kind, long.text, long.cut) == ("text", "✓" * 100, True)


def test_bytes_that_are_not_text_are_shown_in_hexadecimal() -> None:
    found = shown(bytes(range(128, 148)) + b"abc", 1000)
    assert found.kind == "hex"
    assert found.text.splitlines()[0].startswith("000000  80 81 82")
    assert found.text.splitlines()[1].endswith("....abc")


def test_a_bidirectional_control_character_is_escaped() -> None:
    assert shown("a name, turned \u202edef".encode(), 1000).text == "a name, turned \\u202edef"


def test_null_and_empty_values_are_distinguished() -> None:
    assert [shown(value, 10).kind for value in (None, b"")] == ["null", "empty"]


DAY_S = 86_400
UNION = pa.UnionArray.from_dense(pa.array([1], pa.int8()), pa.array([0], pa.int32()), [pa.array([5]), pa.array(["x"])])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (pa.array([1]), "1"),
        (pa.array([1.5]), "1.5"),
        (pa.array([float("nan")]), "NaN"),
        (pa.array([True]), "true"),
        (pa.array([[1, None]]), "[1, null]"),
        (pa.array(["a\x1b"]), "a\\u001b"),
        (pa.array(["[1]"]), "[1]"),
        (pa.array([b"\xff"]), '{"base64": "/w=="}'),
        (pa.array([DAY_S * 10**9 + 1], pa.timestamp("ns", "Europe/Paris")), "1970-01-02T00:00:00.000000001Z"),
        (pa.array([-(10**14)], pa.timestamp("s")), "-100000000000000"),
        (pa.array([1500], pa.duration("ms")), "1500"),
        (pa.array([1500], pa.time32("ms")), "00:00:01.500"),
        (UNION, '[1, "x"]'),
        (pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())), '[["a", 1], ["a", 2]]'),
    ],
    ids=str,
)
def test_cells_of_typed_streams_have_the_form_of_json(values: pa.Array, text: str) -> None:
    rows = Rows(pa.record_batch({"a": pa.concat_arrays([values, values])}).slice(1))
    assert shown_cell(rows.cell(0, "a", 100), 100).text == text
    assert rows.row(0, 100).encode() + b"\n" == row_lines(pa.record_batch({"a": values}))
    assert rows.has(0, text[:5].casefold())


NULLS = pa.ListArray.from_arrays(pa.array([0, 1 << 30], pa.int32()), pa.nulls(1 << 30))
MANY = [
    NULLS,
    pa.array([[{"a": [1] * 1000}] * 50]),
    pa.array([[("k", 1)] * 1000], pa.map_(pa.string(), pa.int64())),
    pa.array([{"a": [None] * 1000}]),
]


@pytest.mark.parametrize("values", MANY, ids=lambda values: str(values.type))
def test_only_the_first_parts_of_a_huge_cell_become_text(values: pa.Array) -> None:
    found = Rows(pa.record_batch({"a": values})).cell(0, "a", 100)
    whole = "[" + "null, " * 50 if values is NULLS else texts_of(values)[0].as_py()
    assert 100 <= len(found) < 500
    assert found[:90] == whole[:90]
    json.loads(found)


def test_a_search_finds_the_shown_part_of_a_huge_row() -> None:
    small, large = pa.array(["Needle"]), pa.nulls(1 << 30)
    batch = pa.record_batch({"a": small, "b": pa.ListArray.from_arrays(pa.array([0, 1 << 30], pa.int32()), large)})
    assert Rows(batch).has(0, "needle")


class Counted(list[object]):
    """Counts its visited items."""

    looked_at = 0

    def __iter__(self) -> Iterator[object]:
        for each in super().__iter__():
            self.looked_at += 1
            yield each


def test_only_the_first_parts_of_a_huge_value_are_visited() -> None:
    many = Counted([{"a": None}] * 10_000)
    found = shown_document(many, "avro", 9, 100)
    assert found.cut
    assert len(found.text) == 100
    assert 25 <= many.looked_at <= 100


def test_rows_with_any_values_are_shown_as_json() -> None:
    row = pa.record_batch({"a": [float("nan")], "b": [b"\xff\xfe"], "d": [{"x": 10**18}]})
    assert shown_columns(Rows(row).row(0, 1000), 1000).text.splitlines() == [
        "{",
        '  "a": "NaN",',
        '  "b": {',
        '    "base64": "//4="',
        "  },",
        '  "d": {',
        '    "x": 1000000000000000000',
        "  }",
        "}",
    ]
    assert jsonable(b"") == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b'{"id": 23958446825181076828}', '{\n  "id": 23958446825181076828\n}'),
        (b'{"p": 169299987.353451120001,"e":1.0E-7}', '{\n  "p": 169299987.353451120001,\n  "e": 1.0E-7\n}'),
        (b'{"a": 1, "a": 2, "big": 1e400}', '{\n  "a": 1,\n  "a": 2,\n  "big": 1e400\n}'),
    ],
)
def test_json_is_shown_with_every_digit_and_name_as_written(value: bytes, text: str) -> None:
    assert shown(value, 1000) == Shown("json", text, len(value))
