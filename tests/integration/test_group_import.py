"""``kera group import``: offsets that a consumer group has committed in a real Kafka, as cursors of a copied stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import confluent_kafka
import pytest

from kera.client import Client, Record
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.command_line import run_kera
from tests.integration.kafka import Kafka

VALUE = bytes(60 * KIB)
"""About 17 of these fit into a chunk of a copy."""
CHUNK_RECORDS = 18
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with LocalCluster.running(brokers=2, arena_bytes=256 * MIB, segment_bytes=4 * MIB) as running:
        yield running


@pytest.fixture
def kera(cluster: RunningCluster) -> Any:
    """Run a command to its end: exit code, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        done = run_kera(*arguments, "--bootstrap", cluster.bootstrap)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run


def fill(kafka: Kafka, topic: str, counts: Mapping[int, int]) -> None:
    """Write numbered records, by partition, in transactions of one to four: offsets have gaps."""
    producer = kafka.producer(transactional_id=topic, message_max_bytes=1 << 20)
    producer.init_transactions()
    for partition, count in counts.items():
        numbers, size = iter(range(count)), 1
        while some := list(islice(numbers, size)):
            producer.begin_transaction()
            for number in some:
                producer.produce(topic, b"%d %b" % (number, VALUE), partition=partition)
            producer.flush()
            producer.commit_transaction()
            size = size % 4 + 1


def commit(kafka: Kafka, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    consumer.commit(
        offsets=[confluent_kafka.TopicPartition(topic, *each) for each in offsets.items()], asynchronous=False
    )
    consumer.close()


def offsets_of(kafka: Kafka, topic: str, partitions: int) -> dict[int, list[int]]:
    """The offsets of the records, by partition: the n-th offset belongs to the record with number n."""
    found = kafka.read(topic, partitions)
    return {partition: [message.offset() for message in messages] for partition, messages in found.items()}


def number_of(record: Record) -> int:
    return int((record.value or b"").split(b" ", 1)[0])


def read_by_group(cluster: RunningCluster, group: str, stream: str, counts: Mapping[int, int]) -> dict[int, list[int]]:
    """The numbers of the records that a group gets, by streamlet, up to the last record of each."""
    found: dict[int, list[int]] = {streamlet: [] for streamlet in counts}

    async def read() -> None:
        async with asyncio.timeout(TIMEOUT_S), await Client.connect(cluster.bootstrap) as client:
            described = await client.admin.describe_consumer_group(group)
            left = sum(entry.lag.records for entry in described.entries if entry.lag)
            async with client.group_consumer(group, stream) as consumer:
                records = aiter(consumer)
                for _ in range(left):
                    record = await anext(records)
                    found[record.streamlet].append(number_of(record))
                await consumer.commit()

    asyncio.run(read())
    return found


def test_an_imported_group_continues_in_the_copy_where_it_was_in_kafka(
    kafka: Kafka, cluster: RunningCluster, kera: Any
) -> None:
    """The group skips no record, and reads less than a chunk of each streamlet again."""
    counts = {0: 70, 1: 40, 2: 5, 3: 0}
    topic = kafka.make_topic("imported", len(counts))
    fill(kafka, topic, counts)
    offsets = offsets_of(kafka, topic, len(counts))
    assert max(offsets[0]) > counts[0], "gaps"
    code, _, said = kera("connect", "copy", kafka.url(topic), "kera:imported", "--create")
    assert code == 0, said
    read = {0: 45, 1: 40, 2: 0}
    # All of partition 1 is read: its offset lies behind the mark that ends the last transaction.
    commit(kafka, "billing", topic, {0: offsets[0][45], 1: offsets[1][-1] + 2, 2: 0})
    import_it = ("group", "import", "billing", "imported", "--from", kafka.url(topic))

    code, printed, said = kera(*import_it, "--dry-run", "--json")
    assert code == 0, said
    previewed = json.loads(printed)
    assert [row["kafka_offset"] for row in previewed] == [offsets[0][45], offsets[1][-1] + 2, 0, None]
    assert previewed[3]["note"].startswith("nothing committed")
    assert "no consumer group 'billing'" in kera("group", "describe", "billing")[2]
    code, printed, said = kera(*import_it, "--yes")
    assert (code, said) == (0, ""), "what librdkafka logs is not shown"
    assert "imported 4 offsets into group billing, stream imported" in printed

    given = read_by_group(cluster, "billing", "imported", counts)
    for streamlet, first in read.items():
        begun = counts[streamlet] - len(given[streamlet])
        assert given[streamlet] == list(range(begun, counts[streamlet])), "from one record on, none left out"
        assert first - CHUNK_RECORDS < begun <= first
        assert first - begun <= previewed[streamlet]["records_again_max"]
        assert previewed[streamlet]["new_offset"] == begun
    assert given[1] == []

    code, printed, said = kera(*import_it, "--dry-run", "--json")
    assert (code, said) == (0, "")
    again = json.loads(printed)
    assert [row["old_offset"] for row in again] == list(counts.values())
    assert [row["records_again_max"] for row in again] == [70 - previewed[0]["new_offset"], 0, 5, 0]
    assert "2 cursors would go back" in kera(*import_it, "--dry-run")[1]
    code, printed, said = kera(*import_it, "--yes")
    assert (code, "OLD OFFSET" in printed) == (1, True)
    assert said == (
        "kera: error: group billing has read further in stream imported than these offsets, in streamlets 0, 2:"
        " --force sets its cursors back\n"
    )
    assert [row["old_offset"] for row in json.loads(kera(*import_it, "--dry-run", "--json")[1])] == [70, 40, 5, 0]
    assert kera(*import_it, "--yes", "--force")[0] == 0
    assert read_by_group(cluster, "billing", "imported", counts)[0] == given[0]


def test_an_import_without_confirmation_is_refused_before_kafka_is_asked(kera: Any) -> None:
    code, _, said = kera("group", "import", "billing", "nothing", "--from", "kafka://127.0.0.1:1/nothing")
    assert code == 2
    assert said.startswith("kera: error: importing offsets into group billing needs --yes")


@pytest.mark.slow
def test_an_import_refuses_offsets_without_a_place_in_the_stream(kafka: Kafka, kera: Any) -> None:
    topic = kafka.make_topic("refused", 2)
    kafka.fill(topic, 20, 2)

    def import_it(group: str, stream: str, *more: str) -> str:
        code, _, said = kera("group", "import", group, stream, "--from", kafka.url(topic), "--yes", *more)
        assert code != 0
        (line,) = said.splitlines()
        return str(line)

    for stream, streamlets in (("refused", "2"), ("uneven", "3"), ("elsewhere", "2")):
        assert kera("stream", "create", stream, "--streamlets", streamlets)[0] == 0
    for stream in ("refused", "uneven"):
        assert kera("connect", "copy", kafka.url(topic), f"kera:{stream}")[0] == 0
    assert "has committed no offset for topic 'refused'" in import_it("nobody", "refused")
    commit(kafka, "ahead", topic, {0: 10, 1: 10})
    assert "2 partitions and stream 'uneven' 3 streamlets" in import_it("ahead", "uneven")
    assert "no copy does. kera connect copy makes one" in import_it("ahead", "elsewhere")
    assert "no copy 'other'" in import_it("ahead", "refused", "--copy", "other")
    assert "there is no stream 'refsed'" in import_it("ahead", "refsed")
    kafka.fill(topic, 20, 2, first=20)
    commit(kafka, "ahead", topic, {0: 20, 1: 20})
    told = import_it("ahead", "refused", "--wait", "1s")
    assert "has read partition 0 up to offset 20, and the copy has come to 10: run the copy, or give --wait" in told
    assert kera("connect", "copy", kafka.url(topic), "kera:refused")[0] == 0
    assert kera("group", "import", "ahead", "refused", "--from", kafka.url(topic), "--yes")[0] == 0
    assert kera("stream", "delete", "refused", "--yes")[0] == 0
    assert kera("stream", "create", "refused", "--streamlets", "2")[0] == 0
    assert "goes into stream 'refused' as it is now" in import_it("ahead", "refused")
