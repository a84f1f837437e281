"""Values at the edges of PostgreSQL's types: they arrive as they are, or the copy ends with their column and text.

Source and target are put together without a stream between them: what a stream does with Arrow is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
from collections.abc import Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from kera.connect.endpoints import TableEnd, parse_end
from kera.connect.pieces import Piece
from kera.connect.postgres import sql
from kera.connect.postgres.changes import PART, ChangesSource
from kera.connect.postgres.sink import TableSink
from kera.connect.postgres.source import TableSource
from kera.core.errors import KeraError, SchemaMismatch
from tests.integration.postgres import Postgres

NUMBERS = itertools.count()

VALUES: dict[str, list[str]] = {
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "real": ["NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "-0", "0.1"],
    "double precision": [
        "NaN",
        "Infinity",
        "-Infinity",
        "-0",
        "5e-324",
        "1.7976931348623157e308",
        "0.30000000000000004",
    ],
    "numeric": ["NaN", "Infinity", "-Infinity", "0." + "0" * 300 + "1", "9" * 400, "1e1000", "1.10", "-0.001"],
    "numeric(38,10)": ["1234567890123456789012345678.0123456789"],
    "money": ["-92233720368547758.08", "92233720368547758.07", "12.34", "0"],
    "date": ["infinity", "-infinity", "4713-01-01 BC", "5874897-12-31", "0044-03-15 BC", "0001-01-01", "1969-12-31"],
    "time": ["24:00:00", "00:00:00", "23:59:59.999999"],
    "timetz": ["24:00:00+15:59", "00:00:00-15:59", "12:00:00.123456+05:30"],
    "timestamp": [
        *("infinity", "-infinity", "4713-01-01 00:00:00 BC", "294276-12-31 23:59:59.999999", "0001-01-01 00:00:00"),
        *("294247-01-10 04:00:54.775807", "294247-01-10 04:00:54.775808", "1969-12-31 23:59:59.999999"),
    ],
    "timestamptz": [
        *("infinity", "-infinity", "4713-01-01 00:00:00+00 BC", "294276-12-31 23:59:59.999999+00"),
        *("294247-01-10 04:00:54.775807+00", "294247-01-10 04:00:54.775808+00", "2026-10-25 02:30:00+02"),
    ],
    "timestamp(0)": ["2026-01-02 03:04:05"],
    "interval": ["1 mon", "30 days", "720:00:00", "1 mon -1 day +00:00:00.000001", "-178000000 years"],
    "oid": ["0", "2147483648", "4294967295"],
    "xid8": ["18446744073709551615"],
    "int[]": ["{1,2,NULL}", "{}", "{{1,2},{3,4}}", "[0:1]={5,6}", "{{{1}}}"],
    "text[]": ['{a,"NULL",NULL,"a,b",""}'],
    "numeric[]": ["{1.10,NaN,NULL}", "{{1},{2}}"],
    "oid[]": ["{4294967295}"],
    "money[]": ["{1.25,NULL}"],
    "date[]": ["{infinity}", "{0001-01-01,NULL}"],
    "timestamp[]": ["{infinity,2020-01-01}", "{294276-01-01}", "{2020-01-01}"],
    "timestamptz[]": ["{-infinity}"],
    "time[]": ["{24:00}", "{12:00}"],
    "bytea[]": ['{"\\\\xff00"}'],
    "uuid[]": ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"],
    "int2vector": ["1 2 3"],
    "point": ["(1.5,NaN)"],
    "line": ["{1,2,3}"],
    "box": ["(1,1),(0,0)"],
    "path": ["((0,0),(1,1))", "[(0,0),(1,1)]"],
    "circle": ["<(0,0),1>"],
    "int4range": ["[1,5)", "empty", "(,)"],
    "numrange": ["(1.10,2]"],
    "tstzrange": ['["2020-01-01 00:00:00+00",infinity)'],
    "bit(4)": ["1010"],
    "varbit": ["", "10101"],
    "inet": ["10.0.0.1/8", "::1"],
    "cidr": ["10.0.0.0/8"],
    "macaddr": ["08:00:2b:01:02:03"],
    "json": ['{"a": 1e400, "a":  169299987.353451120001}', "null"],
    "jsonb": ['{"a": 169299987.353451120001, "b": 9007199254740993}', "1e400"],
    "xml": ["<a>&amp;</a>"],
    "tsvector": ["'a':1A 'b'"],
    "pg_lsn": ["16/B374D848"],
    "bytea": ["\\x00ff", ""],
    "char(5)": ["ab", ""],
    "varchar(3)": ["a  "],
    "text": ["é€😀", ""],
    '"char"': ["a", ""],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "boolean": ["t", "f"],
    "mood": ["sad"],
    "pos": ["5"],
    "amount": ["1.25"],
    "moment": ["infinity", "2020-01-01"],
}
REFUSED = {
    *(("date", each) for each in ("infinity", "-infinity")),
    ("time", "24:00:00"),
    *(("timestamp", each) for each in ("infinity", "-infinity")),
    *(("timestamp", each) for each in ("294276-12-31 23:59:59.999999", "294247-01-10 04:00:54.775808")),
    *(("timestamptz", each) for each in ("infinity", "-infinity")),
    *(("timestamptz", each) for each in ("294276-12-31 23:59:59.999999+00", "294247-01-10 04:00:54.775808+00")),
    *(("int[]", each) for each in ("{{1,2},{3,4}}", "[0:1]={5,6}", "{{{1}}}")),
    *(("date[]", "{infinity}"), ("timestamp[]", "{infinity,2020-01-01}"), ("timestamp[]", "{294276-01-01}")),
    *(("timestamptz[]", "{-infinity}"), ("time[]", "{24:00}"), ("moment", "infinity")),
}
"""Values that Arrow's types for these columns lack; a stream with a text column takes all of them."""


@pytest.fixture(scope="module")
def types(postgres: Postgres) -> Postgres:
    """A server with some user-defined types."""
    postgres.run(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN pos AS int CHECK (value > 0)",
        "CREATE DOMAIN amount AS money",
        "CREATE DOMAIN moment AS timestamp",
    )
    return postgres


def table_end(postgres: Postgres, name: str) -> TableEnd:
    end = parse_end(postgres.url(name))
    assert isinstance(end, TableEnd)
    return end


def read(postgres: Postgres, name: str, wanted: pa.Schema | None = None) -> list[Piece]:
    async def run() -> list[Piece]:
        source = TableSource(table_end(postgres, name), wanted, follow=False)
        try:
            await source.open()
            return [piece async for piece in source.read({}, 1 << 20)]
        finally:
            await source.close()

    return asyncio.run(run())


def write(postgres: Postgres, name: str, pieces: Sequence[Piece]) -> None:
    async def run() -> None:
        sink = TableSink(table_end(postgres, name), f"copy-{name}", create=False)
        try:
            schema = pieces[0].rows.schema
            await sink.open(SimpleNamespace(schema=schema, identity="test", shown="test"))
            await sink.put(pieces)
        finally:
            await sink.close()

    asyncio.run(run())


def put(postgres: Postgres, kind: str, column: pa.Array) -> list[str | None]:
    """Write a column into a table with a column of some type; returns its values there as text."""
    name = f"put_{next(NUMBERS)}"
    postgres.run(f"CREATE TABLE {name} (v {kind})")
    write(postgres, name, [Piece("", 0, 1, pa.record_batch({"v": column}))])
    return [value for (value,) in postgres.rows(f"SELECT v::text FROM {name}")]


def come_back(postgres: Postgres, kind: str, values: Sequence[str], wanted: pa.Schema | None = None) -> None:
    """Copy values of a type into another table, and check that they are the same there."""
    name = f"good_{next(NUMBERS)}"
    postgres.run(
        f"CREATE TABLE {name} (id int PRIMARY KEY, v {kind})",
        f"INSERT INTO {name} VALUES (0, NULL)",
        *(f"INSERT INTO {name} VALUES ({n}, {sql.literal(value)})" for n, value in enumerate(values, 1)),
        f"CREATE TABLE {name}_again (LIKE {name})",
    )
    write(postgres, f"{name}_again", read(postgres, name, wanted))
    before, after = (postgres.rows(f"SELECT id, v::text FROM {each} ORDER BY id") for each in (name, f"{name}_again"))
    assert before == after


def are_refused(postgres: Postgres, kind: str, values: Sequence[str]) -> None:
    for value in values:
        name = f"bad_{next(NUMBERS)}"
        postgres.run(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v {kind})",
            f"INSERT INTO {name} VALUES (1, NULL), (2, {sql.literal(value)})",
        )
        ((text,),) = postgres.rows(f"SELECT v::text FROM {name} WHERE id = 2")
        with pytest.raises(SchemaMismatch) as refused:
            read(postgres, name)
        assert f"column 'v' of the row with key 2 has {text}, which" in refused.value.message
        assert "\n" not in refused.value.message


def test_edge_values_of_some_types_are_copied_exactly_or_refused(types: Postgres) -> None:
    for kind in ("money", "oid", '"char"'):
        come_back(types, kind, VALUES[kind])
    for kind in ("timestamp", "int[]"):
        are_refused(types, kind, [value for value in VALUES[kind] if (kind, value) in REFUSED][:2])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", VALUES)
def test_edge_values_of_every_type_are_copied_exactly_or_refused(types: Postgres, kind: str) -> None:
    are_refused(types, kind, [value for value in VALUES[kind] if (kind, value) in REFUSED])
    come_back(types, kind, [value for value in VALUES[kind] if (kind, value) not in REFUSED])
    if not kind.startswith("bytea"):
        come_back(types, kind, VALUES[kind], pa.schema([("id", pa.int32()), ("v", pa.string())]))


def times(value: int, unit: str, zone: str | None = None) -> pa.Array:
    return pa.array([value], pa.int64()).cast(pa.timestamp(unit, zone))


FIT = [
    ("numeric(4,1)", pa.array([Decimal("125.50"), None], pa.decimal128(10, 2)), ["125.5", None]),
    ("numeric", pa.array([0.30000000000000004, float("inf")]), ["0.30000000000000004", "Infinity"]),
    ("timestamp", times(1_000, "ns"), ["1970-01-01 00:00:00.000001"]),
    ("timestamp", times(-62_135_596_800, "s"), ["0001-01-01 00:00:00"]),
    ("timestamp(0)", times(2_000_000, "us"), ["1970-01-01 00:00:02"]),
    ("time", pa.array([86_400_000_000], pa.int64()).cast(pa.time64("us")), ["24:00:00"]),
    ("varchar(3)", pa.array(["abc"]), ["abc"]),
    ("money", pa.array(["12.34"]), ["$12.34"]),
    ("money", pa.array([Decimal("-0.05")], pa.decimal128(10, 2)), ["-$0.05"]),
    ("double precision", pa.array(["0.1", "NaN", "-Infinity", "1e308"]), ["0.1", "NaN", "-Infinity", "1e+308"]),
    ("timestamp", pa.array(["2020-01-01 00:00Z", "infinity"]), ["2020-01-01 00:00:00", "infinity"]),
    ("integer", pa.array([1.0, float("nan")]).fill_null(2.0).slice(0, 1), ["1"]),
    ("bigint", pa.array([2**32 - 1], pa.uint32()), ["4294967295"]),
]
MISFITS = [
    (
        "numeric(4,1)",
        pa.array([Decimal("1.20"), Decimal("1.26")], pa.decimal128(10, 2)),
        "record 2 of a piece has 1.26",
    ),
    ("numeric(4,1)", pa.array([Decimal("12345.00")], pa.decimal128(10, 2)), "has 12345.00, which does not fit"),
    ("numeric(4,1)", pa.array(["1.26"]), "has '1.26', which it cannot hold as it is"),
    ("varchar(3)", pa.array(["abcdef"]), "abcdef"),
    ("char(3)", pa.array(["abcd"]), "abcd"),
    ('"char"', pa.array(["ab"]), "has 'ab', which it cannot hold as it is"),
    ("integer", pa.array([1.5]), "has 1.5, which it cannot hold"),
    ("integer", pa.array(["x"]), "has 'x', which does not fit"),
    ("smallint", pa.array([1, 2, 40_000, 3]), "record 3 of a piece has 40000, which does not fit"),
    ("real", pa.array([0.1]), "has 0.1, which it cannot hold"),
    ("double precision", pa.array(["9007199254740993"]), "has '9007199254740993', which it cannot hold"),
    ("money", pa.array(["1.255"]), "has '1.255', which it cannot hold"),
    ("timestamp", times(1_234, "ns"), "does not fit into PostgreSQL's microseconds"),
    ("timestamp", times(2**62, "s"), "does not fit into PostgreSQL's microseconds"),
    ("timestamp", times(-(2**63), "us"), "is out of PostgreSQL's range"),
    ("timestamp", times(-(2**63) + 946_684_800_000_000, "us"), "is out of PostgreSQL's range"),
    ("timestamp(0)", times(1_500_000, "us"), "which it cannot hold as it is"),
    ("timestamp", pa.array(["2020-01-01 00:00+02"]), "has '2020-01-01 00:00+02', which it cannot hold"),
    ("timestamp", pa.array(["2020-01-01 00:00:00.1234567"]), "which it cannot hold as it is"),
    ("date", times(1, "us", "UTC"), "which it cannot hold as it is"),
    ("date", pa.array(["2020-01-01 12:34"]), "has '2020-01-01 12:34', which it cannot hold"),
    ("date", pa.array([-(2**31) + 10957], pa.int32()).cast(pa.date32()), "is out of PostgreSQL's range"),
    ("date[]", pa.array([[], [0, 2**31 - 1]], pa.list_(pa.int32())).cast(pa.list_(pa.date32())), "record 2 of a piece"),
    ("time", pa.array([-1], pa.int64()).cast(pa.time64("us")), "is out of PostgreSQL's range"),
    ("time", pa.array(["2020-01-01 12:00"]), "which it cannot hold as it is"),
    ("text", pa.array(["ok", "a\0b"]), "record 2 of a piece has 'a\\x00b', which has a NUL"),
]


@pytest.mark.parametrize(
    ("fit", "misfits"),
    [(FIT[:3], MISFITS[:6]), pytest.param(FIT, MISFITS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_value_that_a_conversion_would_change_is_refused_with_its_column_and_row(
    types: Postgres, fit: list[tuple[str, pa.Array, list[Any]]], misfits: list[tuple[str, pa.Array, str]]
) -> None:
    for kind, column, expected in fit:
        assert put(types, kind, column) == expected, kind
    for kind, column, said in misfits:
        with pytest.raises(KeraError) as refused:
            put(types, kind, column)
        assert isinstance(refused.value, SchemaMismatch), (kind, column, refused.value)
        assert said in refused.value.message, (kind, refused.value.message)
        assert "'v'" in refused.value.message or "column v" in refused.value.message
        assert "\n" not in refused.value.message


def test_a_decimal_column_takes_the_numerics_that_it_can_hold(types: Postgres) -> None:
    types.run("CREATE TABLE exact (id int PRIMARY KEY, v numeric)", "INSERT INTO exact VALUES (1, 1.5), (2, 'NaN')")
    wanted = pa.schema([("id", pa.int32()), ("v", pa.decimal128(10, 2))])
    with pytest.raises(SchemaMismatch, match=r"column 'v' of the row with key 2 has 'NaN', which does not fit dec"):
        read(types, "exact", wanted)
    types.run("DELETE FROM exact WHERE id = 2")
    (piece,) = read(types, "exact", wanted)
    assert piece.rows.column("v").to_pylist() == [Decimal("1.50")]


def test_values_as_text_do_not_depend_on_settings_of_the_role(types: Postgres) -> None:
    types.run(
        "CREATE TABLE forms (id int PRIMARY KEY, span interval, during tsrange)",
        "INSERT INTO forms VALUES (1, '-1 day 2 hours', '[2020-02-01,2020-02-03)')",
        "ALTER ROLE kera SET intervalstyle = 'sql_standard'",
        "ALTER ROLE kera SET datestyle = 'SQL, DMY'",
    )
    try:
        (piece,) = read(types, "forms")
    finally:
        types.run("ALTER ROLE kera RESET ALL")
    assert piece.rows.to_pylist() == [
        {"id": 1, "span": "-1 days +02:00:00", "during": '["2020-02-01 00:00:00","2020-02-03 00:00:00")'}
    ]


def test_dates_before_the_year_1_are_copied_as_the_right_day(types: Postgres) -> None:
    types.run("CREATE TABLE old (id int PRIMARY KEY, v date)", "INSERT INTO old VALUES (1, '0001-12-31 BC')")
    (piece,) = read(types, "old")
    assert piece.rows.column("v").cast(pa.int32()).to_pylist() == [
        (datetime.date(1, 1, 1) - datetime.date(1970, 1, 1)).days - 1
    ]


def changes(postgres: Postgres, name: str, values: str, place: Any) -> tuple[Any, list[pa.RecordBatch]]:
    """The changes that a copy reads from a place on, and the place after them."""
    end = parse_end(postgres.url(name, changes="logical", values=values))
    assert isinstance(end, TableEnd)

    async def run() -> tuple[Any, list[pa.RecordBatch]]:
        source = ChangesSource(end, None, f"slot_{name}", follow=False)
        try:
            await source.open()
            pieces = [piece async for piece in source.read({} if place is None else {PART: place}, 1 << 20)]
        finally:
            await source.close()
        return pieces[-1].end if pieces else place, [piece.rows for piece in pieces if piece.rows.num_rows]

    return asyncio.run(run())


def test_changes_have_the_exact_values_of_the_table_or_are_refused(types: Postgres) -> None:
    types.run(
        "CREATE TABLE changing (id int PRIMARY KEY, m money, o oid, t timestamptz, l int[])",
        "INSERT INTO changing VALUES (1, 12.34, 4294967295, '0044-03-15 00:00:00+00 BC', '{1,NULL}')",
    )
    place, (first,) = changes(types, "changing", "columns", None)
    types.run("INSERT INTO changing SELECT 2, m, o, t, l FROM changing")
    place, (second,) = changes(types, "changing", "columns", place)
    for rows in (first, second):
        assert [rows.column(name).to_pylist() for name in ("m", "o", "l")] == [["12.34"], [4294967295], [[1, None]]]
        assert rows.column("t").cast(pa.int64()).to_pylist() == [-63_517_824_000_000_000]
    types.run("INSERT INTO changing VALUES (3, NULL, NULL, 'infinity', NULL)")
    with pytest.raises(SchemaMismatch, match=r"column 't' of row 1 has infinity, which timestamp"):
        changes(types, "changing", "columns", place)


@pytest.mark.slow
def test_changes_as_json_have_all_digits_and_texts_for_values_that_json_lacks(types: Postgres) -> None:
    types.run("CREATE TABLE as_json (id int PRIMARY KEY, n numeric, t timestamp, f float8, j jsonb, l int[])")
    place, _ = changes(types, "as_json", "json", None)
    types.run(
        "INSERT INTO as_json VALUES (1, 169299987.353451120001, 'infinity', 'NaN',"
        " '{\"a\": 9007199254740993}', '{{1,2},{3,4}}')"
    )
    _, (rows,) = changes(types, "as_json", "json", place)
    (value,) = rows.column("value").to_pylist()
    after = value.partition(b'"after" : ')[2]
    assert after.startswith(b'{"id":1,"n":169299987.353451120001,"t":"infinity","f":"NaN","j":{"a": 9007199254740993},')
