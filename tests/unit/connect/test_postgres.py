"""`kera.connect.postgres.sql`: statements with arbitrary names and values."""

import pyarrow as pa
import pytest

from kera.connect.postgres import sql
from kera.core.errors import InvalidArgument, SchemaMismatch

ROWS = sql.Rows('"t"', ('kera_rows."a" AS "a"',), ("a", 'b"c'))


@pytest.mark.parametrize(
    ("name", "said"), [("a", '"a"'), ('a"; DROP TABLE x; --', '"a""; DROP TABLE x; --"'), ("ä b", '"ä b"')]
)
def test_names_are_quoted(name: str, said: str) -> None:
    assert sql.quoted(name) == said


@pytest.mark.parametrize("name", ["", "a\0b", ".", "a."])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        sql.table_name(name)


@pytest.mark.parametrize(("value", "said"), [("x", "'x'"), ("x'; --", "'x''; --'"), ("\\", "'\\'"), ("", "''")])
def test_values_are_quoted(value: str, said: str) -> None:
    assert sql.literal(value) == said


def test_a_value_with_a_nul_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        sql.literal("a\0b")


def test_a_page_starts_after_a_key_and_is_ordered_by_the_original_columns() -> None:
    assert sql.page(ROWS, ["1", "x'"], ["2", "y"], 10) == (
        'SELECT kera_rows."a" AS "a", kera_rows."a"::text AS __kera_key_0, kera_rows."b""c"::text AS __kera_key_1'
        """ FROM "t" AS kera_rows WHERE (kera_rows."a", kera_rows."b""c") > ('1', 'x''')"""
        """ AND (kera_rows."a", kera_rows."b""c") <= ('2', 'y')"""
        ' ORDER BY kera_rows."a", kera_rows."b""c" LIMIT 10'
    )
    assert "WHERE" not in sql.page(ROWS, None, None, None)
    assert sql.last_key(ROWS).endswith('ORDER BY kera_rows."a" DESC, kera_rows."b""c" DESC LIMIT 1')


def test_a_created_table_has_the_column_types_of_the_schema() -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("at", pa.timestamp("us", tz="UTC")),
            ("local", pa.timestamp("ms")),
            ("price", pa.decimal128(10, 2)),
            ("tags", pa.list_(pa.string())),
        ]
    )
    assert sql.create_table('"t"', schema) == (
        'CREATE TABLE "t" ("id" bigint, "at" timestamp with time zone, "local" timestamp without time zone,'
        ' "price" numeric(10, 2), "tags" text[])'
    )


@pytest.mark.parametrize(
    "kind", [pa.struct([("x", pa.int64())]), pa.uint64(), pa.list_(pa.list_(pa.int8())), pa.null()]
)
def test_a_column_type_without_a_postgres_type_is_refused_by_name(kind: pa.DataType) -> None:
    with pytest.raises(SchemaMismatch, match="column 'odd'"):
        sql.create_table('"t"', pa.schema([("odd", kind)]))
