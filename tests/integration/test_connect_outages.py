"""``kera connect copy --follow`` survives restarts of its source and target, and reports little about them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from kera.client.sync import Client
from kera.local.cluster import RunningCluster
from tests.integration.connect_support import client, cluster, copying, has, table  # noqa: F401 - fixtures
from tests.integration.kafka import Kafka
from tests.integration.postgres import Postgres


def test_copies_from_and_to_a_table_survive_a_restart_of_postgresql(
    postgres: Postgres, client: Client, cluster: RunningCluster, tmp_path: Path
) -> None:
    postgres.run("CREATE TABLE outlives (id int PRIMARY KEY)", "CREATE TABLE outlived (id int)")
    client.admin.create_stream("outlives", schema=pa.schema([("id", pa.int32())]), durability="persisted")
    out = ("--follow", postgres.url("outlives"), "kera:outlives")
    back = ("--follow", "kera:outlives", postgres.url("outlived"))
    with (
        copying(cluster.bootstrap, *out, log=tmp_path / "out") as reading,
        copying(cluster.bootstrap, *back, log=tmp_path / "back") as writing,
    ):
        reading.event("began")
        writing.event("began")
        postgres.run("INSERT INTO outlives SELECT generate_series(1, 100)")
        has(client, "outlives", 100)
        writing.event("progress")

        postgres.stop()
        assert "PostgreSQL cannot be reached" in reading.event("failing")["error"]
        postgres.start()

        postgres.run("INSERT INTO outlives SELECT generate_series(101, 200)")
        assert reading.event("resumed")["attempts"] > 0
        writing.event("resumed")
        has(client, "outlives", 200)
        postgres.waits_for("SELECT count(*) FROM outlived", 200)
        assert (reading.terminate(), writing.terminate()) == (143, 143)

    assert table(client, "outlives").column("id").to_pylist() == list(range(1, 201))
    assert postgres.rows("SELECT count(DISTINCT id) FROM outlived") == [(200,)]


@pytest.mark.slow
def test_a_copy_that_waits_for_postgresql_ends_at_sigterm(
    postgres: Postgres, client: Client, cluster: RunningCluster, tmp_path: Path
) -> None:
    postgres.run("CREATE TABLE waits (id int PRIMARY KEY)")
    arguments = ("--follow", "--create", postgres.url("waits"), "kera:waits")
    with copying(cluster.bootstrap, *arguments, log=tmp_path / "log") as copier:
        copier.event("began")
        postgres.stop()
        try:
            copier.event("failing")
            assert copier.terminate() == 143
        finally:
            postgres.start()
    assert client.describe("waits").stream_id


@pytest.mark.slow
def test_copies_from_and_to_a_table_survive_a_restart_of_every_daemon(
    postgres: Postgres, client: Client, cluster: RunningCluster, tmp_path: Path
) -> None:
    postgres.run("CREATE TABLE daemons (id int PRIMARY KEY)", "CREATE TABLE daemons_back (id int)")
    client.admin.create_stream("daemons", schema=pa.schema([("id", pa.int32())]), durability="persisted")
    out = ("--follow", postgres.url("daemons"), "kera:daemons")
    back = ("--follow", "kera:daemons", postgres.url("daemons_back"))
    rows = 0
    with (
        copying(cluster.bootstrap, *out, log=tmp_path / "out") as reading,
        copying(cluster.bootstrap, *back, log=tmp_path / "back") as writing,
    ):
        reading.event("began")
        writing.event("began")
        for name in ("coordinator", "broker-1", "broker-2"):
            cluster.kill(name)
            postgres.run(f"INSERT INTO daemons SELECT generate_series({rows + 1}, {rows + 100})")
            rows += 100
            cluster.restart(name)
            has(client, "daemons", rows)
            postgres.waits_for("SELECT count(*) FROM daemons_back", rows)
        assert (reading.terminate(), writing.terminate()) == (143, 143)

    assert table(client, "daemons").column("id").to_pylist() == list(range(1, rows + 1))
    assert postgres.rows("SELECT count(*), count(DISTINCT id) FROM daemons_back") == [(rows, rows)]


@pytest.mark.slow
def test_copies_from_and_to_a_topic_survive_a_restart_of_kafka(
    kafka: Kafka, client: Client, cluster: RunningCluster, tmp_path: Path
) -> None:
    source, target = kafka.make_topic("outlives", 1), kafka.make_topic("outlived", 1)
    client.admin.create_stream("topic-outlives", durability="persisted")
    out = ("--follow", kafka.url(source), "kera:topic-outlives")
    back = ("--follow", "kera:topic-outlives", kafka.url(target))
    with (
        copying(cluster.bootstrap, *out, log=tmp_path / "out") as reading,
        copying(cluster.bootstrap, *back, log=tmp_path / "back") as writing,
    ):
        reading.event("began")
        writing.event("began")
        kafka.fill(source, 100, 1)
        has(client, "topic-outlives", 100)

        kafka.restart()
        kafka.fill(source, 100, 1, first=100)

        has(client, "topic-outlives", 200)
        while len(kafka.read(target, 1)[0]) < 200:
            pass
        assert (reading.terminate(), writing.terminate()) == (143, 143)

    assert [message.value() for message in kafka.read(target, 1)[0]] == [b"%d" % number for number in range(200)]
