"""`kera.connect.endpoints`: addresses of source and target."""

import pytest

from kera.connect.endpoints import (
    FilesEnd,
    StreamEnd,
    TableEnd,
    TopicEnd,
    check_copy_name,
    copy_name,
    parse_end,
)
from kera.core.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("kera:clicks", StreamEnd("clicks")),
        ("kera://clicks", StreamEnd("clicks")),
        ("kera://far:7400/clicks", StreamEnd("clicks", "far:7400")),
        ("kera://a:7400,b:7400/clicks", StreamEnd("clicks", "a:7400,b:7400")),
        ("kafka://far:9092/clicks", TopicEnd("far:9092", "clicks")),
        ("kafka://a,b:9093/clicks", TopicEnd("a:9092,b:9093", "clicks")),
        ("postgresql://db/shop?table=orders", TableEnd("postgresql://db/shop", "orders")),
        ("postgres:///shop?table=s.orders&key=a,b", TableEnd("postgresql:///shop", "s.orders", key=("a", "b"))),
        (
            "postgresql:///shop?host=/run/pg&query=SELECT%201%20AS%20a&key=a",
            TableEnd("postgresql:///shop?host=%2Frun%2Fpg", query="SELECT 1 AS a", key=("a",)),
        ),
        ("orders.parquet", FilesEnd("orders.parquet", "parquet")),
        ("./odd:name.csv", FilesEnd("./odd:name.csv", "csv")),
        ("/data/*.csv", FilesEnd("/data/*.csv", "csv", many=True)),
        ("file:///data/a%20b.jsonl", FilesEnd("/data/a b.jsonl", "jsonl")),
        ("lines.ndjson.gz", FilesEnd("lines.ndjson.gz", "jsonl")),
    ],
)
def test_addresses_are_parsed(text: str, end: object) -> None:
    assert parse_end(text) == end


def test_a_directory_needs_a_format() -> None:
    assert parse_end("out/", file_format="csv") == FilesEnd("out/", "csv", many=True)
    with pytest.raises(InvalidArgument, match="--format"):
        parse_end("out/")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty address"),
        ("kera:", "not the name of a stream"),
        ("kera:a/b", "not the name of a stream"),
        ("kera://user@host/s", "no user"),
        ("kafka:///topic", "without brokers"),
        ("kafka://host:9092/", "not the name of a topic"),
        ("kafka://user:pw@host/topic", "--kafka-config"),
        ("kafka://host/topic?sasl.password=x", "--kafka-config"),
        ("kafak://host/topic", "did you mean kafka:"),
        ("http://host/x.csv", "is not one of"),
        ("postgresql://db/shop", "table or a query"),
        ("postgresql://db/shop?table=", "is empty"),
        ("postgresql://db/shop?table=a&query=b&key=c", "table or a query"),
        ("postgresql://db/shop?query=SELECT%201", "needs a key"),
        ("clicks", "kera:name"),
        ("kera:clicks?tabel=x", "nothing behind"),
        ("kera://host/clicks#x", "nothing behind"),
        ("file:///a.csv?x", "%3F"),
        ("postgresql://db/shop?tabel=a&table=b", "no parameter tabel; did you mean table"),
        ("postgresql://db/shop?table=a&setle=1", "did you mean settle"),
        ("postgresql://db/shop?table=a&anything=1", "there are table, query, key, settle, changes, .* and libpq's"),
        ("postgresql://db/shop?table=a&table=b", "table is there twice"),
        ("postgresql://db/shop?table=a#b", "%23"),
        ("postgresql://db/shop?table=a&settle=1.5", "settle=1.5: write a whole number of seconds"),
        (f"postgresql://db/shop?table=a&settle={'9' * 12}", "9: write a whole number of seconds"),
        ("postgresql://[::1/shop?table=a", "the host is not valid; an IPv6 address has brackets"),
        ("postgresql://[db]/shop?table=a", "the host is not valid"),
        ("file://[x/a.csv", "the host is not valid; write file:///"),
    ],
)
def test_an_invalid_address_is_refused_with_a_hint(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_end(text)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:hush@db/shop?table=t",
        "postgresql://db/shop?table=t&password=hush",
        "postgresql://db/d?table=t&sslpassword=hush",
        "kafka://u:hush@h/t",
        "postgresql://me:hush@[::1/shop?table=t",
        "postgresql://me:hush@\u2100/shop?table=t",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_end(text)
    assert "hush" not in str(refused.value)


def test_a_format_applies_to_files_and_must_be_known() -> None:
    with pytest.raises(InvalidArgument, match="applies to files only"):
        parse_end("kera:s", file_format="csv")
    with pytest.raises(InvalidArgument, match="not one of parquet"):
        parse_end("x.csv", file_format="orc")


def test_the_default_name_of_a_copy_has_both_ends() -> None:
    assert copy_name(TopicEnd("h:1", "a b"), StreamEnd("s")) == "kafka.a-b-to-s"
    assert copy_name(FilesEnd("/x/y/*.csv", "csv", many=True), StreamEnd("s")) == "file.y-to-s"
    assert len(copy_name(TopicEnd("h:1", "t" * 200), StreamEnd("s"))) == 100


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 101, "a/b"])
def test_an_invalid_name_of_a_copy_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="--name"):
        check_copy_name(name)


def test_addresses_of_changes_have_their_own_parameters() -> None:
    end = parse_end("postgresql://db/shop?table=orders&changes=logical&values=columns&slot=kera_1&sslmode=require")

    assert isinstance(end, TableEnd)
    assert (end.changes, end.values, end.slot, end.tombstones) == (True, "columns", "kera_1", False)
    assert (end.shown, end.slug) == ("changes of table orders", "postgres.orders.changes")
    assert end.uri == "postgresql://db/shop?sslmode=require"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("table=t&values=json", "is about changes"),
        ("table=t&changes=trigger", "changes=logical"),
        ("table=t&changes=logical&key=id", "without query or key"),
        ("query=t&key=id&changes=logical", "without query or key"),
        ("table=t&changes=logical&values=avro", "values=json or values=columns"),
        ("table=t&changes=logical&tombstones=yes", "tombstones=true or tombstones=false"),
        ("table=t&changes=logical&slot=A-b", "a-z, 0-9 and _"),
    ],
)
def test_invalid_parameters_of_changes_are_refused(more: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_end(f"postgresql://db/shop?{more}")
