"""The synchronous SDK, with real daemons: the same as the asynchronous SDK, from threads, scripts and callbacks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from kera.client import Client as AsyncClient
from kera.client import Delivery
from kera.client.sync import Client, GroupConsumer
from kera.core.errors import (
    ClosedError,
    InvalidArgument,
    KeraError,
    RecordTooLarge,
    SchemaMismatch,
    StreamExists,
    Unavailable,
    UnknownStream,
)
from kera.local.cluster import RunningCluster

TIMEOUT_S = 60.0
VALUES = [b"%d" % number for number in range(1000)]


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[Client]:
    with Client(cluster.bootstrap) as connected:
        yield connected


def fill(client: Client, stream: str, *, chunks: int = 3, records: int = 4) -> list[bytes]:
    """Write chunks of several records each; returns the values."""
    client.admin.create_stream(stream)
    values = [b"%d" % number for number in range(chunks * records)]
    with client.producer() as producer:
        for first in range(0, len(values), records):
            batch = pa.record_batch({"value": pa.array(values[first : first + records], pa.binary())})
            producer.send_batch(stream, batch).result()
    return values


def read(client: Client, stream: str) -> list[bytes | None]:
    with client.consumer(stream, start="earliest", end="latest") as consumer:
        return [record.value for record in consumer]


def test_records_are_written_and_read_in_order(client: Client) -> None:
    client.admin.create_stream("sync-order")
    with client.producer() as producer:
        sent = [producer.send("sync-order", value, headers={"n": value}) for value in VALUES]
    assert [each.result().record for each in sent] == list(range(len(VALUES)))
    with client.consumer("sync-order", start="earliest", end="latest") as consumer:
        records = list(consumer)
    assert [record.value for record in records] == VALUES
    assert records[7].headers == {"n": b"7"}
    with client.consumer("sync-order", start="earliest", end="latest") as consumer:
        assert [value for batch in consumer.batches() for value in batch.batch["value"].to_pylist()] == VALUES


def test_records_and_batches_of_one_producer_stay_in_the_order_of_the_calls(client: Client) -> None:
    client.admin.create_stream("sync-mixed")
    expected: list[bytes] = []
    with client.producer() as producer:
        for number in range(200):
            values = [b"%d-%d" % (number, row) for row in range(3)]
            if number % 3:
                producer.send_batch("sync-mixed", pa.record_batch({"value": pa.array(values, pa.binary())}))
            else:
                for value in values:
                    producer.send("sync-mixed", value)
            expected += values
    assert read(client, "sync-mixed") == expected


def test_a_failed_send_is_reported_by_its_delivery_and_by_the_next_flush(client: Client) -> None:
    client.admin.create_stream("sync-wrong")
    told: list[tuple[Delivery | None, Exception | None]] = []
    with client.producer() as producer:
        with pytest.raises(UnknownStream):
            producer.send("sync-no-such", b"x")
        large = producer.send(
            "sync-wrong", bytes(64 << 20), on_delivery=lambda delivery, error: told.append((delivery, error))
        )
        good = producer.send("sync-wrong", b"good", on_delivery=lambda delivery, error: told.append((delivery, error)))
        wrong = producer.send_batch("sync-wrong", pa.record_batch({"other": pa.array([1])}))
        with pytest.raises(RecordTooLarge):
            producer.flush()
        producer.flush()  # the error was reported already
        with pytest.raises(RecordTooLarge):
            large.result()
        with pytest.raises(SchemaMismatch):
            wrong.result()
        assert good.result().record == 0
        assert [type(error) for _, error in told] == [RecordTooLarge, type(None)]
        assert told[1][0] == good.result()
        no_bytes = producer.send("sync-wrong", "text")
        with pytest.raises(InvalidArgument, match="bytes"):
            no_bytes.result()
        with pytest.raises(InvalidArgument, match="bytes"):
            producer.flush()
    with pytest.raises(ClosedError):
        producer.send("sync-wrong", b"late")
    producer.close()
    assert read(client, "sync-wrong") == [b"good"]


def test_the_context_of_a_producer_raises_an_unreported_error(client: Client) -> None:
    client.admin.create_stream("sync-context")
    with pytest.raises(RecordTooLarge), client.producer() as producer:
        producer.send("sync-context", bytes(64 << 20))


def test_records_go_to_a_stream_that_was_deleted_and_created_again(client: Client) -> None:
    client.admin.create_stream("again")
    with client.producer() as producer:
        producer.send("again", b"before").result()
        client.admin.delete_stream("again")
        client.admin.create_stream("again")
        with pytest.raises(UnknownStream):
            producer.send("again", b"lost, and reported").result()
        producer.send("again", b"after").result()
        with pytest.raises(UnknownStream):
            producer.flush()
    assert read(client, "again") == [b"after"]


def test_a_producer_with_a_full_buffer_waits_and_loses_nothing(client: Client) -> None:
    client.admin.create_stream("sync-full")
    count, value = 3000, bytes(20_000)
    with client.producer(buffer_bytes_max=1 << 20) as producer:
        for _ in range(count):
            producer.send("sync-full", value)
            assert producer._handover._waiting_bytes <= (16 << 20) + 1
    (entry,) = client.bounds("sync-full")[0]
    assert entry.next_record == count


def test_several_threads_share_a_client_and_a_producer(client: Client) -> None:
    client.admin.create_stream("sync-threads")
    with client.producer() as producer:

        def send(thread: int) -> None:
            for number in range(500):
                producer.send("sync-threads", b"%d %d" % (thread, number))

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    found = read(client, "sync-threads")
    assert len(found) == 2000
    for sender in range(4):
        mine = [value for value in found if value is not None and value.startswith(b"%d " % sender)]
        assert mine == [b"%d %d" % (sender, number) for number in range(500)]


def test_positions_advance_with_the_last_record_of_each_chunk(client: Client, cluster: RunningCluster) -> None:
    """As with the asynchronous consumer, after each record."""
    values = fill(client, "sync-positions", chunks=4, records=3)

    async def positions() -> list[object]:
        async with (
            await AsyncClient.connect(cluster.bootstrap) as other,
            other.consumer("sync-positions", start="earliest", end="latest") as consumer,
        ):
            return [consumer.positions() async for _ in consumer]

    expected = asyncio.run(positions())
    with client.consumer("sync-positions", start="earliest", end="latest") as consumer:
        found = []
        for record, value in zip(consumer, values, strict=True):
            assert record.value == value
            found.append(consumer.positions())
    assert found == expected


@pytest.mark.parametrize(
    "taken", [4, 6, *(pytest.param(taken, marks=pytest.mark.slow) for taken in range(13) if taken not in {4, 6})]
)
def test_a_consumer_group_skips_exactly_the_committed_chunks(client: Client, taken: int) -> None:
    stream, group = f"sync-group-{taken}", f"sync-group-{taken}"
    values = fill(client, stream, chunks=4, records=3)
    with client.group_consumer(group, stream, commit_interval_ms=0) as consumer:
        first = [record.value for record in islice(consumer, taken)]
        consumer.commit()
    assert first == values[:taken]
    whole = taken // 3 * 3
    if whole == len(values):
        return
    with client.group_consumer(group, stream) as consumer:
        rest = [record.value for record in islice(consumer, len(values) - whole)]
    assert rest == values[whole:], "the rest of a chunk that was begun comes again, and no chunk is left out"


def test_data_frames_are_written_and_read(client: Client) -> None:
    schema = pa.schema([("time", pa.timestamp("us")), ("who", pa.string()), ("amount", pa.float64())])
    client.admin.create_stream("sync-frames", schema=schema, key_column="who", timestamp_column="time")
    given = pd.DataFrame(
        {
            "time": pd.to_datetime(range(100), unit="s").astype("datetime64[us]"),
            "who": [f"user-{number % 7}" for number in range(100)],
            "amount": [number / 4 for number in range(100)],
        }
    )
    with client.producer() as producer:
        producer.send_batch("sync-frames", given)
        producer.send_batch("sync-frames", pl.from_pandas(given))
    with client.consumer("sync-frames", start="earliest", end="latest") as consumer:
        found = consumer.to_pandas()
    expected = pd.concat([given, given], ignore_index=True)
    pd.testing.assert_frame_equal(found, expected)
    with client.consumer("sync-frames", start="earliest", end="latest") as consumer:
        assert consumer.to_polars().equals(pl.from_pandas(expected))
        assert consumer.to_polars().is_empty(), "all that was left has been read"
        assert consumer.to_arrow().schema == schema


def test_a_table_begins_at_the_unfinished_chunk_of_a_loop_over_records(client: Client) -> None:
    values = fill(client, "sync-rest", chunks=2, records=4)
    with client.consumer("sync-rest", start="earliest", end="latest") as consumer:
        assert [next(iter(consumer)).value for _ in range(6)] == values[:6]
        # The chunk that was begun is not delivered, so it comes whole.
        assert consumer.to_arrow()["value"].to_pylist() == values[4:]
    client.admin.create_stream("sync-other")
    for consumer in (
        client.consumer("sync-rest", start="earliest"),
        client.consumer("sync-rest", "sync-other", start="earliest", end="latest"),
    ):
        with pytest.raises(InvalidArgument, match="that has an end"):
            consumer.to_arrow()


def test_an_incomplete_table_does_not_move_the_position(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(client, "sync-cut", chunks=4, records=3)
    with client.consumer("sync-cut", start="earliest", end="latest", joined_bytes_max=0) as consumer:
        before = consumer.positions()
        next_chunk, left = consumer._consumer._next_chunk, [2]

        async def two_chunks(*, copied: bool = False) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Unavailable("the broker is away")
            return await next_chunk(copied=copied)

        monkeypatch.setattr(consumer._consumer, "_next_chunk", two_chunks)
        with pytest.raises(Unavailable):
            consumer.to_arrow()
        assert consumer.positions() == before


@pytest.mark.parametrize("shared_memory", ["always", pytest.param("never", marks=pytest.mark.slow)])
def test_loops_over_batches_and_records_and_tables_continue_each_other(client: Client, shared_memory: Any) -> None:
    stream = f"sync-by-turns-{shared_memory}"
    values = fill(client, stream, chunks=40, records=3)
    settings: Any = {"joined_bytes_max": 0, "shared_memory": shared_memory}
    with client.consumer(stream, start="earliest", end="latest", **settings) as consumer:
        found: list[bytes | None] = []
        for _ in range(3):
            for batch in consumer.batches():
                found += batch.batch["value"].to_pylist()
                break
            assert found == values[: len(found)], "nothing is left out, though more had come than was taken"
            with client.consumer(stream, start=consumer.positions(), end="latest") as other:
                assert next(iter(other)).value == values[len(found)], "and positions know of what was taken only"
            for record in consumer:
                found.append(record.value)
                if len(found) % 3 == 0:
                    break
            assert found == values[: len(found)]
        for batch in consumer.batches():
            found += batch.batch["value"].to_pylist()
            break
        found += consumer.to_arrow()["value"].to_pylist()
    assert found == values


def test_threads_share_the_batches_of_a_consumer(client: Client) -> None:
    values = fill(client, "sync-share-batches", chunks=60, records=2)
    found: list[bytes | None] = []
    with client.consumer("sync-share-batches", start="earliest", end="latest", joined_bytes_max=0) as consumer:

        def take() -> None:
            for batch in consumer.batches():
                found.extend(batch.batch["value"].to_pylist())

        with ThreadPoolExecutor(4) as threads:
            for each in [threads.submit(take) for _ in range(4)]:
                each.result(TIMEOUT_S)
    assert sorted(found, key=lambda value: int(value or 0)) == values


def test_threads_share_a_consumer_group(client: Client) -> None:
    client.admin.create_stream("sync-shared", streamlets=4)
    with client.producer() as producer:
        for number in range(2000):
            producer.send("sync-shared", b"%d" % number, streamlet=number % 4)
    found: list[bytes | None] = []
    all_there = threading.Event()

    def consume(consumer: GroupConsumer) -> None:
        try:
            for record in consumer:
                found.append(record.value)
                if len(found) >= 2000:
                    all_there.set()
        except ClosedError:
            pass

    consumers = [client.group_consumer("sync-shared", "sync-shared") for _ in range(3)]
    threads = [threading.Thread(target=consume, args=(consumer,)) for consumer in consumers]
    for thread in threads:
        thread.start()
    assert all_there.wait(TIMEOUT_S)
    for consumer in consumers:
        consumer.close()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert sorted(int(value or b"") for value in found) == list(range(2000))


def test_a_blocking_call_in_a_callback_is_refused(client: Client) -> None:
    client.admin.create_stream("sync-callback")
    told: list[KeraError] = []

    def ask_again(delivery: Delivery | None, error: Exception | None) -> None:
        del delivery, error
        try:
            client.describe("sync-callback")
        except KeraError as refused:
            told.append(refused)

    with client.producer() as producer:
        producer.send("sync-callback", b"x", on_delivery=ask_again)
    assert [type(error) for error in told] == [InvalidArgument]
    assert "own thread" in told[0].message


def test_the_synchronous_client_administers_streams(client: Client) -> None:
    client.admin.create_stream("sync-admin", streamlets=2)
    with pytest.raises(StreamExists):
        client.admin.create_stream("sync-admin")
    assert client.admin.alter_stream("sync-admin", retention_ms=1000).config.retention_ms == 1000
    assert "sync-admin" in [stream.name for stream in client.admin.list_streams()]
    assert client.admin.describe_cluster().brokers
    client.admin.delete_stream("sync-admin")
    with pytest.raises(UnknownStream):
        client.admin.describe_stream("sync-admin")


def test_the_synchronous_client_works_inside_a_running_loop(client: Client) -> None:
    """As in a notebook."""

    async def main() -> int:
        return len(client.admin.describe_cluster().brokers)

    assert asyncio.run(main()) > 0


def run(program: str, bootstrap: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, bootstrap], stdout=subprocess.PIPE, text=True)


def test_a_script_that_closes_nothing_delivers_what_it_has_sent(client: Client, cluster: RunningCluster) -> None:
    client.admin.create_stream("sync-script")
    program = (
        "import sys\nfrom kera.client.sync import Client\n"
        "producer = Client(sys.argv[1]).producer()\n"
        "for number in range(100):\n    producer.send('sync-script', b'%d' % number)\n"
    )
    with run(program, cluster.bootstrap) as script:
        assert script.wait(TIMEOUT_S) == 0
    assert read(client, "sync-script") == [b"%d" % number for number in range(100)]


def test_a_waiting_consumer_can_be_interrupted(client: Client, cluster: RunningCluster) -> None:
    client.admin.create_stream("sync-waits")
    program = (
        "import sys\nfrom kera.client.sync import Client\n"
        "with Client(sys.argv[1]) as client, client.consumer('sync-waits', start='earliest') as consumer:\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        next(iter(consumer))\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', flush=True)\n"
    )
    with run(program, cluster.bootstrap) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        script.send_signal(signal.SIGINT)
        assert script.stdout.readline() == "interrupted\n"
        assert script.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("kind", ["records", "batches"])
@pytest.mark.parametrize("in_group", [False, True])
def test_an_interrupted_consumer_loses_no_record(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str, in_group: bool
) -> None:
    """Ctrl-C comes when the client's thread is done, before the caller has taken its result."""
    stream = f"sync-interrupted-{kind}-{in_group}"
    values = fill(client, stream, chunks=4, records=3)
    consumer: Any = client.consumer(stream, start="earliest", end="latest", joined_bytes_max=0)
    if in_group:
        consumer = client.group_consumer(stream, stream, joined_bytes_max=0)
    run_it = consumer._thread.run
    interrupted = 0

    def run(work: Any) -> Any:
        nonlocal interrupted
        result = run_it(work)
        if work.__name__.startswith("_fetch") and interrupted < 20:
            interrupted += 1
            if interrupted % 2:
                raise KeyboardInterrupt
        return result

    monkeypatch.setattr(consumer._thread, "run", run)
    monkeypatch.setattr("kera.client.sync.consumer.AHEAD_MAX", 1)
    found: list[bytes | None] = []
    while len(found) < len(values):
        try:
            if kind == "records":
                for record in consumer:
                    found.append(record.value)
                    if len(found) == len(values):
                        break
            else:
                for batch in consumer.batches():
                    found += batch.batch["value"].to_pylist()
                    if len(found) == len(values):
                        break
        except KeyboardInterrupt:
            pass
    monkeypatch.undo()
    consumer.close()
    assert interrupted > 2
    assert found == values


def test_a_forked_child_gets_an_error_when_it_uses_the_parents_client(client: Client) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(ClosedError, match="belongs to the parent of a forked process"):
                client.admin.list_streams()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.admin.list_streams()
