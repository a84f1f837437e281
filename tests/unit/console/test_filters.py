"""Filter expressions: their meaning, the columns of mistakes, and agreement with a naive interpretation."""

import datetime
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.console.browsing.filters.evaluating import fits
from kera.console.browsing.filters.parsing import DEPTH_MAX, LENGTH_MAX, PARTS_MAX, FilterError, parse, roots_of

NOON_US = 1_769_860_800_000_000
"""2026-01-31T12:00Z."""
DOCUMENTATION = Path(__file__).parents[3] / "docs/console.md"


class Subject(NamedTuple):
    value: Any = None
    keys: tuple[Any, ...] = ()
    headers: dict[str, Any] = {}  # noqa: RUF012 - never changed
    streamlet: int = 2
    entry: int = 0
    offset: int = 100
    time_us: int = NOON_US + 1


ORDER = Subject(
    {
        "total": 12.5,
        "name": "an Example",
        "paid": True,
        "tags": ["new", 7, None],
        "lines": [{"sku": "A-1"}],
        "odd name": 1,
        "price": Decimal("12.50"),
        "bad": Decimal("sNaN"),
        "at": datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC),
        "raw": b"abc",
    },
    ("a", {"id": 7}),
    {"trace": b"17", "x.y": b"\xff", "gone": None},
)


@pytest.mark.parametrize(
    "text",
    [
        'value.total > 10 and key == "a"',
        "headers.trace",
        'headers["x.y"] and not headers.gone and not headers.none',
        'headers.trace == "17"',
        'contains(value.name, "Ex") and not contains(value.name, "ex")',
        'contains(lower(value.name), "ex")',
        'contains(value.tags, "new") and contains(value.tags, null) and not contains(value.tags, "7")',
        'contains(value, "total")',
        "streamlet == 2",
        "offset >= 100 and entry == 0",
        'time > "2026-01-31T12:00" and "2026-01-31T13:00+01:00" < time',
        f"time == {NOON_US + 1}",
        'not time in ["2026-01-31T12:00"]',
        'value["odd name"] == 1',
        'value.lines[0].sku == "A-1" and value.lines[1].sku == null and value.lines.sku == null',
        "keys[1].id == 7",
        'value.total in [1, 12.5, "x"]',
        "value.paid and value.paid == true and value.paid != 1",
        "value.price == value.total",
        "not value.bad < 1 and value.bad != value.bad",
        'value.at == "2026-01-31T00:00:00+00:00"',
        'value.raw == "abc"',
        "length(value.tags) == 3 and length(value.total) == null",
        'starts_with(value.name, "an") and ends_with(value.name, "le") and not starts_with(value.total, "1")',
        "not (value.total < 10 or value.none < 10 or value.none >= 10)",
        "value.total != null and value.tags != value.tags",
        "0 == -0.0 and 1e3 == 1000 and -2 < -1",
        r""" 'it\'s "x"' == "it's \"x\"" """,
        "1 == 2 or 1 == 1 and not 1 == 2",
    ],
)
def test_expressions_have_their_documented_meaning(text: str) -> None:
    assert fits(parse(text), ORDER)
    assert not fits(parse(f"not ({text})"), ORDER)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "the filter is empty"),
        ("value.total = 1", 13, "write =="),
        ("a && b", 3, "write `and`"),
        ("total > 1", 1, "there is no field total"),
        ("value.", 7, "a name is expected"),
        ("value[x]", 7, "brackets take a name in quotes"),
        ("(key", 5, ") is missing"),
        ('key == "a', 8, "no closing quote"),
        ('key == "\\x"', 8, "an escape"),
        ('key == "\\ud800"', 8, "an escape"),
        ("key == a", 8, "put text into quotes"),
        ("1 < 2 < 3", 7, "do not chain"),
        ("key key", 5, "join conditions"),
        ("key in []", 9, "a list has"),
        ("key in [key]", 9, "a list has"),
        ("offset.x == 1", 7, "offset has no fields"),
        ("contains(key)", 1, "takes 2 arguments, and is given 1"),
        ("eval(key)", 1, "there is no function eval"),
        ('time > "noon"', 8, "a time like"),
        ('time in ["noon"]', 10, "a time like"),
        ("key ==", 7, "and not the end"),
        ("offset == ١", 11, "ASCII"),
        ("offset == " + "1" * 41, 11, "at most 40"),
        ("(" * 1000, DEPTH_MAX + 2, "nested more than"),
        ("not " * 200 + "key", 4 * (DEPTH_MAX + 1) + 1, "nested more than"),
        (" or ".join(["key"] * (PARTS_MAX - 1)), None, "more than"),
        ("1" * (LENGTH_MAX + 1), LENGTH_MAX + 1, "at most 1000"),
    ],
)
def test_a_mistake_is_refused_with_its_column_and_a_reason(text: str, column: int | None, message: str) -> None:
    with pytest.raises(FilterError, match=re.escape(message)) as found:
        parse(text)
    assert column is None or found.value.column == column
    assert found.value.message.startswith(f"column {found.value.column}: ")


def test_the_roots_of_an_expression_are_known() -> None:
    found = roots_of(parse('not (contains(value.a, "x") or key in [1]) and offset < streamlet and 1 == 1'))
    assert found == {"value", "key", "offset", "streamlet"}


WORDS = st.sampled_from(
    [
        *("value", "key", "keys", "headers", "offset", "time", "and", "or", "not", "in", "contains", "lower", "x"),
        *("(", ")", "[", "]", ",", ".", "==", "!=", "<", ">", "=", "!", "'", '"', "\\"),
        *("1", "-1", "1.5", "1e9", "null", "true", "\x00", "é", "\u202e", "\ud800", "\n"),
    ]
)


@given(st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=40).map(" ".join), st.lists(WORDS).map("".join)))
def test_any_text_is_an_expression_or_an_error_with_a_column(text: str) -> None:
    try:
        fits(parse(text), ORDER)
    except FilterError as error:
        found = error.column
    else:
        found = 1
    assert 1 <= found <= len(text) + 1


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.decimals(),
        st.datetimes(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b", "trace"]), inner, max_size=3)
    ),
    max_leaves=8,
)
EVERY_PART = (
    'value.a < value.b or value.a == value.b or contains(value.a, value.b) or contains(value, "a") or value.a[0] > 1'
    " or length(value.a) > 1 or lower(value.a) == value.b or starts_with(value.a, value.b) or keys[0].a != key"
    ' or value.a in [1, "x", null] or headers.trace <= value.a or value >= key'
)


@given(VALUES, VALUES, VALUES)
def test_a_filter_raises_no_error_for_any_record(value: Any, key: Any, header: Any) -> None:
    assert fits(parse(EVERY_PART), Subject(value, (key,), {"trace": header})) in {True, False}


class Naive(NamedTuple):
    """An expression, and its meaning in plain Python."""

    text: str
    of: Callable[[dict[str, Any]], Any]


def holds(value: Any) -> bool:
    return value is not None and value is not False


def kind(value: Any) -> str:
    return (
        "null" if value is None else "flag" if value in (True, False) and type(value) is bool else type(value).__name__
    )


NAIVE_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda a, b: kind(a) == kind(b) and a == b,
    "!=": lambda a, b: not (kind(a) == kind(b) and a == b),
    "<": lambda a, b: kind(a) == kind(b) in {"int", "str"} and a < b,
    "<=": lambda a, b: kind(a) == kind(b) in {"int", "str"} and a <= b,
    ">": lambda a, b: kind(a) == kind(b) in {"int", "str"} and a > b,
    ">=": lambda a, b: kind(a) == kind(b) in {"int", "str"} and a >= b,
}
LEAVES = st.one_of(
    st.integers(-3, 3).map(lambda number: Naive(str(number), lambda _: number)),
    st.sampled_from(["a", "b", ""]).map(lambda text: Naive(f'"{text}"', lambda _: text)),
    st.sampled_from([("true", True), ("false", False), ("null", None)]).map(lambda w: Naive(w[0], lambda _: w[1])),
    st.sampled_from(["a", "b", "c"]).map(lambda name: Naive(f"value.{name}", lambda value: value.get(name))),
)


@st.composite
def comparisons(draw: st.DrawFn) -> Naive:
    sign, left, right = draw(st.sampled_from(list(NAIVE_ORDER))), draw(LEAVES), draw(LEAVES)
    return Naive(f"{left.text} {sign} {right.text}", lambda v: NAIVE_ORDER[sign](left.of(v), right.of(v)))


def joined(inner: st.SearchStrategy[Naive]) -> st.SearchStrategy[Naive]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        inner.map(lambda one: Naive(f"not ({one.text})", lambda v: not holds(one.of(v)))),
        pairs.map(lambda p: Naive(f"({p[0].text}) and ({p[1].text})", lambda v: all(holds(e.of(v)) for e in p))),
        pairs.map(lambda p: Naive(f"({p[0].text}) or ({p[1].text})", lambda v: any(holds(e.of(v)) for e in p))),
    )


EXPRESSIONS = st.recursive(st.one_of(LEAVES, comparisons()), joined, max_leaves=8)
RECORDS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.one_of(st.integers(-3, 3), st.sampled_from(["a", "b", ""]), st.booleans(), st.none()),
)


@given(EXPRESSIONS, RECORDS)
def test_expressions_agree_with_a_naive_interpretation(expression: Naive, value: dict[str, Any]) -> None:
    assert fits(parse(expression.text), Subject(value)) == holds(expression.of(value))


@given(st.lists(st.tuples(st.sampled_from(["and", "or"]), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_not_and_and_or_have_the_precedence_of_python(parts: list[tuple[str, bool, bool]]) -> None:
    words = [f"{joint} {'not ' if negated else ''}{str(fact).lower()}" for joint, negated, fact in parts]
    text = " ".join(words).removeprefix(parts[0][0])
    python = text.replace("true", "True").replace("false", "False")
    assert fits(parse(text), ORDER) == eval(python, {"__builtins__": {}})


def documented() -> Iterator[str]:
    """The examples on the page about the console, from the first column of a table."""
    text = DOCUMENTATION.read_text(encoding="utf-8")
    section = text.partition("### Filter expressions")[2].partition("\n## ")[0]
    yield from re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_the_documented_examples_are_valid_expressions() -> None:
    examples = list(documented())
    assert len(examples) >= 6
    for each in examples:
        parse(each)
