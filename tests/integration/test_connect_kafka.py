"""``kera connect copy`` between a real Kafka and real brokers: each record once, despite kills at any moment."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Record
from kera.client.producing.encoding.partitioner import PARTITIONERS, partition_by_key, streamlet_of
from kera.client.sync import Client
from kera.connect.errors import SourceChanged
from kera.connect.kafka.source import TopicSource
from kera.local.cluster import RunningCluster
from tests.integration.command_line import run_kera
from tests.integration.connect_support import (  # noqa: F401 - fixtures
    COPY_TIMEOUT_S,
    client,
    cluster,
    copy,
    copying,
    has,
    killed_again_and_again,
    records,
)
from tests.integration.kafka import Kafka, headers_of

RECORDS_MAX = 100_000


def same(record: Record, message: Any) -> bool:
    return (
        record.value == message.value()
        and record.key == message.key()
        and record.timestamp_us == message.timestamp()[1] * 1000
        and record.headers.pairs == tuple(message.headers() or ())
    )


def assert_same(kafka: Kafka, topic: str, client: Client, stream: str, partitions: int) -> int:
    """Check that the stream equals the topic: partition p in streamlet p, in order, each record once."""
    messages, stored = kafka.read(topic, partitions), records(client, stream)
    for number in range(partitions):
        own = stored.get(number, [])
        assert [record.value for record in own] == [message.value() for message in messages[number]]
        assert all(same(*pair) for pair in zip(own, messages[number], strict=True))
    return sum(map(len, messages.values()))


def test_a_topic_is_copied_to_a_stream_with_every_part_of_its_records(kafka: Kafka, client: Client, copy: Any) -> None:
    topic = kafka.make_topic("whole", 3)
    kafka.fill(topic, 2000, 3)

    code, said = copy(kafka.url(topic), "kera:whole", "--create")

    assert code == 0, said
    assert "2,000 records" in said
    assert (client.describe("whole")).config.streamlets == 3
    assert assert_same(kafka, topic, client, "whole", 3) == 2000

    kafka.fill(topic, 500, 3, first=2000)
    code, said = copy(kafka.url(topic), "kera:whole")

    assert code == 0, said
    assert "goes on after 2,000 records" in said
    assert assert_same(kafka, topic, client, "whole", 3) == 2500


def test_a_copy_with_kills_at_any_moment_has_each_record_once(
    kafka: Kafka, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path
) -> None:
    topic = kafka.make_topic("killed", 2)
    client.admin.create_stream("killed", streamlets=2)
    stopping = threading.Event()

    def go_on() -> None:
        count = 0
        while not stopping.is_set() and count < RECORDS_MAX:
            kafka.fill(topic, 500, 2, first=count)
            count += 500
            stopping.wait(0.05)

    filling = threading.Thread(target=go_on)
    filling.start()
    try:
        killed_again_and_again(
            cluster.bootstrap, "--follow", kafka.url(topic), "kera:killed", log=tmp_path / "log", times=6, seed=1
        )
    finally:
        stopping.set()
        filling.join()
    code, said = copy(kafka.url(topic), "kera:killed")

    assert code == 0, said
    assert assert_same(kafka, topic, client, "killed", 2) > 500


@pytest.mark.slow
def test_a_paused_copy_that_was_replaced_ends_and_duplicates_nothing(
    kafka: Kafka, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path
) -> None:
    topic = kafka.make_topic("asleep", 1)
    client.admin.create_stream("asleep")
    kafka.fill(topic, 1000, 1)
    with copying(cluster.bootstrap, "--follow", kafka.url(topic), "kera:asleep", log=tmp_path / "log") as sleeper:
        has(client, "asleep", 1000)
        sleeper.pause()
        kafka.fill(topic, 1000, 1, first=1000)
        code, said = copy(kafka.url(topic), "kera:asleep")
        assert code == 0, said
        sleeper.resume()
        code, said = sleeper.wait()

    assert code == 1
    assert "another process runs this copy" in said
    assert assert_same(kafka, topic, client, "asleep", 1) == 2000


def test_a_following_copy_takes_new_records_and_ends_at_sigterm(
    kafka: Kafka, client: Client, cluster: RunningCluster, tmp_path: Path
) -> None:
    topic = kafka.make_topic("followed", 1)
    client.admin.create_stream("followed")
    with copying(cluster.bootstrap, "--follow", kafka.url(topic), "kera:followed", log=tmp_path / "log") as follower:
        follower.event("began")
        kafka.fill(topic, 100, 1)
        has(client, "followed", 100)
        kafka.fill(topic, 100, 1, first=100)
        has(client, "followed", 200)
        assert follower.terminate() == 143

    assert assert_same(kafka, topic, client, "followed", 1) == 200


def test_aborted_transactions_are_not_copied(kafka: Kafka, client: Client, copy: Any) -> None:
    topic = kafka.make_topic("aborted", 1)
    producer = kafka.producer(transactional_id="aborted")
    producer.init_transactions()
    for number in range(6):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number)
        producer.flush()
        if number % 2:
            producer.abort_transaction()
        else:
            producer.commit_transaction()

    code, said = copy(kafka.url(topic), "kera:aborted", "--create")

    assert code == 0, said
    assert [record.value for record in (records(client, "aborted"))[0]] == [b"0", b"2", b"4"]


def test_keys_place_records_if_the_numbers_of_partitions_and_streamlets_differ(
    kafka: Kafka, client: Client, copy: Any
) -> None:
    topic = kafka.make_topic("uneven", 2)
    kafka.fill(topic, 1000, 2)

    code, said = copy(kafka.url(topic), "kera:uneven", "--create", "--streamlets", "3")

    assert code == 0, said
    assert "2 parts, the stream 3 streamlets" in said
    stored = records(client, "uneven")
    assert sorted(int(record.value or b"") for each in stored.values() for record in each) == list(range(1000))
    where: dict[bytes, set[int]] = {}
    for streamlet, each in stored.items():
        for record in each:
            if record.key is not None:
                where.setdefault(record.key, set()).add(streamlet)
    assert {len(streamlets) for streamlets in where.values()} == {1}


def test_the_error_names_a_missing_topic(kafka: Kafka, copy: Any) -> None:
    code, said = copy(kafka.url("nowhere"), "kera:nowhere", "--create")

    assert code == 1
    assert f"there is no topic 'nowhere' at {kafka.bootstrap}" in said


def test_the_error_for_a_missing_stream_suggests_create(kafka: Kafka, copy: Any) -> None:
    topic = kafka.make_topic("no-stream", 1)

    code, said = copy(kafka.url(topic), "kera:nobody")

    assert code == 1
    assert "there is no stream 'nobody'" in said
    assert "--create" in said


def test_records_removed_before_they_were_copied_end_the_copy_unless_skipped(
    kafka: Kafka, client: Client, copy: Any
) -> None:
    topic = kafka.make_topic("removed", 1)
    kafka.fill(topic, 10, 1)
    assert copy(kafka.url(topic), "kera:removed", "--create")[0] == 0
    kafka.fill(topic, 20, 1, first=10)
    kafka.remove_before(topic, 25)

    code, said = copy(kafka.url(topic), "kera:removed")

    assert code == 1
    assert "offsets 10 to 24 of partition 0" in said
    code, said = copy(kafka.url(topic), "kera:removed", "--skip-lost")
    assert code == 0, said
    values = [int(record.value or b"") for record in (records(client, "removed"))[0]]
    assert values == [*range(10), *range(25, 30)]


def test_a_copy_whose_topic_was_recreated_needs_another_name(kafka: Kafka, copy: Any) -> None:
    topic = kafka.make_topic("anew", 1)
    kafka.fill(topic, 10, 1)
    assert copy(kafka.url(topic), "kera:anew", "--create")[0] == 0
    kafka.delete_topic(topic)
    kafka.make_topic("anew", 1)

    code, said = copy(kafka.url(topic), "kera:anew")

    assert code == 1
    assert "give this one another --name" in said


def test_a_copy_is_listed_and_forgotten(kafka: Kafka, client: Client, cluster: RunningCluster, copy: Any) -> None:
    topic = kafka.make_topic("listed", 1)
    kafka.fill(topic, 10, 1)
    assert copy(kafka.url(topic), "kera:listed", "--create", "--name", "mine")[0] == 0

    listed = run_kera("connect", "list", "--bootstrap", cluster.bootstrap).stdout.decode()
    assert "mine" in listed
    assert "topic listed" in listed
    forgotten = run_kera("connect", "forget", "mine", "--yes", "--bootstrap", cluster.bootstrap)
    assert forgotten.returncode == 0
    assert "mine" not in run_kera("connect", "list", "--bootstrap", cluster.bootstrap).stdout.decode()
    again = run_kera("connect", "forget", "mine", "--yes", "--bootstrap", cluster.bootstrap)
    assert b"no copy 'mine'" in again.stderr

    assert copy(kafka.url(topic), "kera:listed", "--name", "mine")[0] == 0
    assert len((records(client, "listed"))[0]) == 20  # a forgotten copy starts over


def fill(client: Client, stream: str, count: int, first: int = 0) -> None:
    with client.producer() as producer:
        for number in range(first, first + count):
            key = b"" if number % 7 == 0 else b"k%d" % (number % 50)
            producer.send(
                stream,
                b"%d" % number,
                keys=key or (),
                headers=headers_of(number),
                timestamp_us=1_700_000_000_000_000 + number * 1000,
            )


def assert_copied(kafka: Kafka, topic: str, client: Client, stream: str, streamlets: int) -> int:
    """Check that the topic equals the stream: streamlet s in partition s, in order, each record once."""
    stored = records(client, stream)
    deadline = time.monotonic() + COPY_TIMEOUT_S
    messages = kafka.read(topic, streamlets)
    while sum(map(len, messages.values())) < sum(map(len, stored.values())) and time.monotonic() < deadline:
        messages = kafka.read(topic, streamlets)  # a commit returns before each partition shows its records
    for number in range(streamlets):
        own = stored.get(number, [])
        assert [message.value() for message in messages[number]] == [record.value for record in own]
        assert all(same(*pair) for pair in zip(own, messages[number], strict=True))
    return sum(map(len, messages.values()))


def test_a_stream_is_copied_to_a_topic_with_every_part_of_its_records(kafka: Kafka, client: Client, copy: Any) -> None:
    client.admin.create_stream("to-kafka", streamlets=3)
    fill(client, "to-kafka", 2000)

    code, said = copy("kera:to-kafka", kafka.url("from-kera"), "--create")

    assert code == 0, said
    assert "made, with 3 partitions" in said
    assert assert_copied(kafka, "from-kera", client, "to-kafka", 3) == 2000
    fill(client, "to-kafka", 500, 2000)
    code, said = copy("kera:to-kafka", kafka.url("from-kera"))
    assert code == 0, said
    assert "goes on after 2,000 records" in said
    assert assert_copied(kafka, "from-kera", client, "to-kafka", 3) == 2500


@pytest.mark.slow
def test_a_copy_to_kafka_with_kills_at_any_moment_has_each_record_once(
    kafka: Kafka, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path
) -> None:
    client.admin.create_stream("killed-out", streamlets=2)
    kafka.make_topic("killed-in", 2)
    stopping = threading.Event()

    def go_on() -> None:
        count = 0
        while not stopping.is_set() and count < RECORDS_MAX:
            fill(client, "killed-out", 500, count)
            count += 500
            stopping.wait(0.02)

    filling = threading.Thread(target=go_on)
    filling.start()
    arguments = ("kera:killed-out", kafka.url("killed-in"))
    try:
        killed_again_and_again(cluster.bootstrap, "--follow", *arguments, log=tmp_path / "log", times=6, seed=4)
    finally:
        stopping.set()
        filling.join()

    code, said = copy(*arguments)

    assert code == 0, said
    assert assert_copied(kafka, "killed-in", client, "killed-out", 2) > 500


@pytest.mark.slow
def test_a_paused_copy_to_kafka_that_was_replaced_ends_and_duplicates_nothing(
    kafka: Kafka, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path
) -> None:
    client.admin.create_stream("asleep-out")
    kafka.make_topic("asleep-in", 1)
    fill(client, "asleep-out", 1000)
    arguments = ("kera:asleep-out", kafka.url("asleep-in"))
    with copying(cluster.bootstrap, "--follow", *arguments, log=tmp_path / "log") as sleeper:
        sleeper.event("progress")
        sleeper.pause()
        fill(client, "asleep-out", 1000, 1000)
        code, said = copy(*arguments)
        assert code == 0, said
        sleeper.resume()
        fill(client, "asleep-out", 1000, 2000)
        code, said = sleeper.wait()
        assert code == 1
        assert "another process runs this copy" in said

    assert copy(*arguments)[0] == 0
    assert assert_copied(kafka, "asleep-in", client, "asleep-out", 1) == 3000


def test_the_error_says_what_a_topic_cannot_take(kafka: Kafka, client: Client, copy: Any) -> None:
    client.admin.create_stream("typed-out", schema=pa.schema([("id", pa.int64())]))
    client.admin.create_stream("large-out")

    code, said = copy("kera:typed-out", kafka.url("typed-in"), "--create")
    assert code == 1
    assert "has columns of its own (id)" in said
    code, said = copy("kera:large-out", kafka.url("nobody-in"))
    assert code == 1
    assert "there is no topic 'nobody-in'" in said
    with client.producer() as producer:
        producer.send("large-out", b"x" * 300_000)
    kafka.make_topic("large-in", 1, {"max.message.bytes": "100000"})
    code, said = copy("kera:large-out", kafka.url("large-in"))
    assert code == 1
    assert "a record is larger than Kafka takes" in said
    assert kafka.read("large-in", 1) == {0: []}


def test_invalid_kafka_settings_are_refused_without_showing_their_values(
    kafka: Kafka, copy: Any, tmp_path: Path
) -> None:
    config = tmp_path / "client.properties"
    for text, said in (
        ("isolation.level=read_uncommitted\n", "not yours to set"),
        ("# comment\n\nsasl.password hush\n", "line 3"),
        ("no.such.setting=hush\n", "no.such.setting"),
    ):
        config.write_text(text)
        code, told = copy(kafka.url("x"), "kera:x", "--kafka-config", str(config))
        assert code in (1, 2)
        assert said in told
        assert "hush" not in told
    code, told = copy(kafka.url("x"), "kera:x", "--kafka-config", str(tmp_path / "none"))
    assert "cannot be read" in told


def test_partitions_added_to_a_followed_topic_end_the_copy(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kera.connect.kafka.source.LOOK_S", 0.0)
    topic = kafka.make_topic("grows", 1)
    kafka.fill(topic, 10, 1)

    async def follow() -> None:
        source = TopicSource(kafka.bootstrap, topic, "grows", {}, follow=True)
        try:
            await source.open()
            async for _ in source.read({}, 1 << 20):
                kafka.add_partitions(topic, 2)
        finally:
            await source.close()

    with pytest.raises(SourceChanged, match="2 partitions now, and had 1"):
        asyncio.run(follow())


@pytest.mark.slow
def test_a_killed_copy_continues_if_all_removed_records_were_stored(
    kafka: Kafka, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path
) -> None:
    topic = kafka.make_topic("removed-later", 1)
    client.admin.create_stream("removed-later")
    kafka.fill(topic, 10, 1)
    with copying(cluster.bootstrap, "--follow", kafka.url(topic), "kera:removed-later", log=tmp_path / "log") as killed:
        has(client, "removed-later", 10)
        killed.kill()
    kafka.fill(topic, 5, 1, first=10)
    kafka.remove_before(topic, 10)

    code, said = copy(kafka.url(topic), "kera:removed-later")

    assert code == 0, said
    values = [int(record.value or b"") for record in records(client, "removed-later")[0]]
    assert values == list(range(15))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "name"), [({}, "consistent_random"), ({"partitioner": "murmur2_random"}, "murmur2_random")]
)
def test_keys_are_placed_where_a_real_kafka_client_places_them(
    kafka: Kafka, settings: dict[str, Any], name: str
) -> None:
    """`settings` are librdkafka's; without any, its default applies."""
    partitions, chance, partitioner = 7, random.Random(7), PARTITIONERS[name]
    topic = kafka.make_topic(f"placed-{name}", partitions)
    keys = [chance.randbytes(chance.randrange(1, 40)) for _ in range(1000)]
    keys += [b""] * partitioner.takes_empty
    producer = kafka.producer(**settings)
    for number, key in enumerate(keys):
        producer.produce(topic, b"%d" % number, key=key)
    assert producer.flush(30) == 0

    read = kafka.read(topic, partitions)
    placed = {int(message.value()): partition for partition, messages in read.items() for message in messages}

    assert placed == {number: streamlet_of(key, partitions, partitioner) for number, key in enumerate(keys)}
    batch = pa.record_batch({"number": range(len(keys))})
    parts = partition_by_key(batch, pa.array(keys, pa.binary()), partitions, 0, partitioner).parts()
    assert placed == {number: streamlet for streamlet, rows in parts for number in rows["number"].to_pylist()}
