"""``kera connect copy --value``: rows and JSON of real systems become values that the SDK's deserializers read."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from kera.client import SchemaType
from kera.client.serializers import AvroDeserializer, JsonDeserializer
from kera.client.sync import Client
from kera.local.cluster import RunningCluster
from tests.integration.command_line import run_kera
from tests.integration.connect_support import client, cluster, copying, killed_again_and_again, records, table  # noqa: F401 - fixtures
from tests.integration.kafka import Kafka
from tests.integration.postgres import Postgres

AVRO = ("--create", "--value", "avro")


@pytest.fixture
def kera(cluster: RunningCluster) -> Any:
    """Run a command to its end: its exit code and its standard error."""

    def run(*arguments: str) -> tuple[int, str]:
        done = run_kera(*arguments, "--bootstrap", cluster.bootstrap)
        return done.returncode, done.stderr.decode()

    return run


def values(client: Client, stream: str, deserializer: Any) -> list[Any]:
    with client.consumer(stream, start="earliest", end="latest", deserializer=deserializer) as consumer:
        return [record.value for record in consumer]


def test_a_table_is_copied_as_avro_and_an_added_column_makes_a_new_version(
    postgres: Postgres, client: Client, kera: Any
) -> None:
    postgres.run(
        "CREATE TABLE sales (id bigint PRIMARY KEY, at timestamptz, price numeric(9, 2), tags text[])",
        "INSERT INTO sales VALUES (1, to_timestamp(5), 1.50, ARRAY['a']), (2, NULL, NULL, NULL)",
    )
    arguments = ("connect", "copy", postgres.url("sales"), "kera:sales", *AVRO, "--key", "id")

    code, said = kera(*arguments)
    assert code == 0, said
    assert "values are written as avro, version 1 of subject sales-value" in said
    postgres.run("ALTER TABLE sales ADD COLUMN zip text", "INSERT INTO sales VALUES (3, NULL, NULL, NULL, 'x')")
    code, said = kera(*arguments)

    assert code == 0, said
    assert "version 2 of subject sales-value" in said
    assert sorted(values(client, "sales", AvroDeserializer()), key=lambda row: row["id"]) == [
        {"id": 1, "at": datetime.datetime.fromtimestamp(5, datetime.UTC), "price": "1.50", "tags": ["a"]},
        {"id": 2, "at": None, "price": None, "tags": None},
        {"id": 3, "at": None, "price": None, "tags": None, "zip": "x"},
    ]
    assert {record.key for each in records(client, "sales").values() for record in each} == {b"1", b"2", b"3"}
    code, said = kera(*arguments[:-2])
    assert code == 1
    assert (
        "the copy of this name is from table sales of database postgres as avro of subject sales-value, key id" in said
    )


@pytest.mark.slow
def test_changes_with_columns_are_copied_as_avro(postgres: Postgres, client: Client, kera: Any) -> None:
    postgres.run("CREATE TABLE versions (id bigint PRIMARY KEY, name text)", "INSERT INTO versions VALUES (1, 'a')")
    arguments = (postgres.url("versions", changes="logical", values="columns"), "kera:versions", *AVRO, "--key", "id")
    assert kera("connect", "copy", *arguments)[0] == 0
    postgres.run("UPDATE versions SET name = 'b'", "DELETE FROM versions")

    code, said = kera("connect", "copy", *arguments)

    assert code == 0, said
    found = [(row["op"], row["id"], row["name"]) for row in values(client, "versions", AvroDeserializer())]
    assert found == [("r", 1, "a"), ("u", 1, "b"), ("d", 1, None)]
    postgres.run(
        "ALTER TABLE versions ADD COLUMN more text", "INSERT INTO versions VALUES (2, 'c', 'd')", "TRUNCATE versions"
    )
    code, said = kera("connect", "copy", *arguments)
    assert code == 0, said
    created, truncated = values(client, "versions", AvroDeserializer())[3:]
    assert (created["op"], created["id"], created["more"]) == ("c", 2, "d")
    assert (truncated["op"], truncated["id"]) == ("t", None)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [("--value", "avro"), ("--value", "json"), ()])
def test_a_column_added_during_a_copy_ends_it_before_rows_lack_the_column(
    postgres: Postgres, client: Client, cluster: RunningCluster, kera: Any, tmp_path: Path, encoding: tuple[str, ...]
) -> None:
    name = "_".join(("widened", *encoding[1:]))
    postgres.run(f"CREATE TABLE {name} (id bigint PRIMARY KEY)", f"INSERT INTO {name} VALUES (1)")
    arguments = (postgres.url(name), f"kera:{name}", "--create", "--key", "id", *encoding)
    with copying(cluster.bootstrap, *arguments, "--follow", log=tmp_path / "log") as copy:
        copy.event("progress")
        postgres.run(f"ALTER TABLE {name} ADD COLUMN land text", f"INSERT INTO {name} VALUES (2, 'x')")
        code, said = copy.wait()
    assert code == 1
    assert "column 'land' was added, removed or changed while the copy ran: start the copy again" in said
    assert sum(map(len, records(client, name).values())) == 1
    if not encoding:
        assert kera("stream", "alter", name, "--add-column", "land:string")[0] == 0

    code, said = kera("connect", "copy", *arguments)

    assert code == 0, said
    if encoding:
        deserializer = AvroDeserializer() if "avro" in encoding else JsonDeserializer()
        assert {"id": 2, "land": "x"} in values(client, name, deserializer)
    else:
        assert {"id": 2, "land": "x"} in table(client, name).to_pylist()


def test_the_error_for_a_missing_column_names_the_command_that_adds_it(
    postgres: Postgres, client: Client, kera: Any
) -> None:
    postgres.run("CREATE TABLE lacking (id bigint PRIMARY KEY)", "INSERT INTO lacking VALUES (1)")
    arguments = ("connect", "copy", postgres.url("lacking"), "kera:lacking")
    assert kera(*arguments, "--create")[0] == 0
    postgres.run("ALTER TABLE lacking ADD COLUMN zip text", "INSERT INTO lacking VALUES (2, 'x')")

    code, said = kera(*arguments)
    assert code == 1
    assert "kera stream alter lacking --add-column 'zip:string'" in said
    assert kera("stream", "alter", "lacking", "--add-column", "zip:string")[0] == 0
    code, said = kera(*arguments)

    assert code == 0, said
    with client.consumer("lacking", start="earliest", end="latest") as consumer:
        assert consumer.to_arrow().sort_by("id").to_pylist() == [{"id": 1, "zip": None}, {"id": 2, "zip": "x"}]


def test_json_is_encoded_by_its_subject_and_a_new_field_needs_a_new_version(
    client: Client, kera: Any, tmp_path: Path
) -> None:
    order: dict[str, Any] = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    client.admin.create_stream("raw")
    with client.producer() as producer:
        producer.send("raw", b'{"id": 1}', keys=b"a", headers={"h": b"1"})
    arguments = ("connect", "copy", "kera:raw", "kera:ready", *AVRO, "--subject", "orders")

    code, said = kera(*arguments)
    assert code == 1
    assert "kera schema register orders FILE --type avro" in said
    client.schemas.register("orders", SchemaType.AVRO, json.dumps(order))
    code, said = kera(*arguments)
    assert code == 0, said
    with client.producer() as producer:
        producer.send("raw", b'{"id": 2, "zip": "x"}', keys=b"a")
    code, said = kera(*arguments)
    assert code == 1
    assert "version 1 of subject 'orders' has no field 'zip'" in said
    order["fields"].append({"name": "zip", "type": ["null", "string"], "default": None})
    (tmp_path / "order.avsc").write_text(json.dumps(order))
    assert kera("schema", "register", "orders", str(tmp_path / "order.avsc"), "--type", "avro")[0] == 0
    code, said = kera(*arguments)

    assert code == 0, said
    assert values(client, "ready", AvroDeserializer()) == [{"id": 1}, {"id": 2, "zip": "x"}]
    ((first, _),) = records(client, "ready").values()
    assert (first.key, first.headers.pairs) == (b"a", (("h", b"1"),))


def test_a_file_is_copied_as_json_with_a_schema(client: Client, kera: Any, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,at\n1,2026-01-02T12:00:00Z\n")

    code, said = kera("connect", "copy", str(tmp_path / "x.csv"), "kera:from-csv", "--create", "--value", "json")

    assert code == 0, said
    assert values(client, "from-csv", JsonDeserializer()) == [{"id": 1, "at": "2026-01-02T12:00:00Z"}]
    code, said = kera("connect", "copy", str(tmp_path / "x.csv"), "kera:from-csv", *AVRO, "--name", "other")
    assert code == 1
    assert "subject 'from-csv-value' has schemas of type json, and --value is avro" in said


def test_a_copy_from_latest_remembers_where_it_began(postgres: Postgres, client: Client, kera: Any) -> None:
    postgres.run("CREATE TABLE newest (id int PRIMARY KEY)", "INSERT INTO newest SELECT generate_series(1, 1000)")
    arguments = ("connect", "copy", postgres.url("newest"), "kera:newest", "--from", "latest")
    assert kera(*arguments, "--create")[0] == 0
    assert not records(client, "newest")
    postgres.run("INSERT INTO newest VALUES (1001)")

    code, said = kera(*arguments)

    assert code == 0, said
    with client.consumer("newest", start="earliest", end="latest") as consumer:
        assert consumer.to_arrow().to_pylist() == [{"id": 1001}]


def test_create_options_that_an_existing_stream_contradicts_are_an_error(
    client: Client, kera: Any, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("id\n1\n")
    arguments = ("connect", "copy", str(tmp_path / "x.csv"), "kera:created", "--create", "--key", "id")
    assert kera(*arguments, "--streamlets", "2")[0] == 0
    assert kera(*arguments, "--streamlets", "2")[0] == 0

    code, said = kera(*arguments, "--streamlets", "3")
    assert code == 1
    assert "--streamlets 3: stream 'created' exists, and has 2: leave the option out" in said
    assert client.describe("created").config.streamlets == 2


@pytest.mark.slow
def test_a_copy_of_encoded_rows_with_kills_at_any_moment_has_each_row_once(
    postgres: Postgres, client: Client, cluster: RunningCluster, kera: Any, tmp_path: Path
) -> None:
    postgres.run(
        "CREATE TABLE often (id bigint PRIMARY KEY, name text)",
        "INSERT INTO often SELECT n, 'name ' || n FROM generate_series(1, 100000) n",
    )
    client.admin.create_stream("often", streamlets=3)
    arguments = (postgres.url("often"), "kera:often", "--value", "avro", "--key", "id")

    killed_again_and_again(cluster.bootstrap, *arguments, log=tmp_path / "log", times=6, seed=9)
    code, said = kera("connect", "copy", *arguments)

    assert code == 0, said
    found = values(client, "often", AvroDeserializer())
    assert sorted(row["id"] for row in found) == list(range(1, 100_001))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["avro", "json"])
def test_encoded_records_of_a_topic_keep_their_order(kafka: Kafka, client: Client, kera: Any, kind: str) -> None:
    topic = kafka.make_topic(f"numbers-{kind}", 2)
    kafka.fill(topic, 1000, 2)  # numbers are JSON
    definition = '"int"' if kind == "avro" else '{"type": "integer"}'
    client.schemas.register(f"numbers-{kind}-value", SchemaType(kind), definition)

    code, said = kera("connect", "copy", kafka.url(topic), f"kera:numbers-{kind}", "--create", "--value", kind)

    assert code == 0, said
    deserializer = AvroDeserializer() if kind == "avro" else JsonDeserializer()
    found: dict[int, list[int]] = {}
    with client.consumer(f"numbers-{kind}", start="earliest", end="latest", deserializer=deserializer) as consumer:
        for record in consumer:
            found.setdefault(record.streamlet, []).append(record.value)
    assert sorted(number for each in found.values() for number in each) == list(range(1000))
    assert all(each == sorted(each) for each in found.values())
