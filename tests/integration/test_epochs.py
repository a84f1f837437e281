"""Epochs with real daemons: all readers get the same epochs, at any time and for any order of timestamps."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client, Epoch, Epochs, sync
from kera.core.errors import DataLost, EpochPassed, InvalidArgument, RecordTooLarge, TimestampAhead
from kera.local.cluster import RunningCluster

pytestmark = pytest.mark.timeout(120)
WAIT_S = 60.0
MS = 1000
SETTINGS: list[dict[str, Any]] = [{}, {"joined_bytes_max": 0}, {"shared_memory": "never"}]


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


def batch(times_us: list[int]) -> pa.RecordBatch:
    times = pa.array(times_us, pa.timestamp("us", "UTC"))
    return pa.record_batch({"timestamp": times, "value": [b"%d" % at for at in times_us]})


async def write(client: Client, stream: str, *chunks: list[int], streamlet: int | None = None) -> None:
    """Write each list as a chunk of its own; the keys of rows put them where they belong."""
    async with client.producer() as producer:
        await producer.prepare(stream)
        for times in chunks:
            for at in times:
                producer.send(stream, b"%d" % at, timestamp_us=at, streamlet=streamlet)
            await producer.flush()


async def read(reader: Epochs, count: int) -> list[Epoch]:
    found = []
    async with asyncio.timeout(WAIT_S):
        async for epoch in reader:
            found.append(epoch)
            if len(found) == count:
                break
    return found


def seen(epochs: list[Epoch]) -> list[Any]:
    return [
        (epoch.number, epoch.records, epoch.late_records, epoch.digest, epoch.rows()["value"].to_pylist())
        for epoch in epochs
    ]


async def test_the_epochs_of_a_history_have_the_records_of_the_log(client: Client) -> None:
    await client.admin.create_stream("epochs-history", streamlets=2, epoch_ms=10, punctuation="producers")
    await write(client, "epochs-history", [1000, 3000], [12_000, 9000], [31_000], [95_000], streamlet=0)
    await write(client, "epochs-history", [2000], [25_000], [8000], [38_000], [99_000], streamlet=1)
    async with client.epochs("epochs-history", start="earliest", end=9) as reader:
        found = await read(reader, 9)
    assert [(epoch.number, epoch.start_us, epoch.end_us) for epoch in found] == [
        (0, 0, 10_000),
        (1, 10_000, 20_000),
        (2, 20_000, 30_000),
        (3, 30_000, 40_000),
    ]
    assert [[chunk.batch["value"].to_pylist() for chunk in epoch.batches] for epoch in found] == [
        [[b"1000", b"3000"], [b"2000"]],
        [[b"12000", b"9000"]],
        [[b"25000", b"8000"]] if len(found[2].batches) == 1 else [[b"25000"], [b"8000"]],
        [[b"31000"], [b"38000"]],
    ]
    assert [epoch.late_records for epoch in found] == [0, 1, 1, 0]
    assert (reader.epochs_read, reader.records_read, reader.late_records) == (4, 9, 2)
    assert found[1].rows()["value"].to_pylist() == [b"9000", b"12000"], "sorted by time"
    async with client.epochs("epochs-history", start=1, end=3, epoch_ms=20) as reader:
        assert [epoch.number for epoch in await read(reader, 9)] == [1]


async def test_live_and_later_readers_get_the_same_epochs(client: Client) -> None:
    await client.admin.create_stream(
        "epochs-live", streamlets=2, entries=2, epoch_ms=200, epoch_grace_ms=100, timestamp_ahead_max_ms=10_000
    )
    begun_us = time.time_ns() // 1000
    random, stop = Random(5), asyncio.Event()

    async def produce(streamlet: int) -> None:
        async with client.producer() as producer:
            await producer.prepare("epochs-live")
            while not stop.is_set():
                at = time.time_ns() // 1000 - random.choice([0, 0, 0, 50_000, 900_000])
                producer.send("epochs-live", b"%d" % at, timestamp_us=at, streamlet=streamlet)
                await producer.flush()
                await asyncio.sleep(random.choice([0.001, 0.01, 0.3]))  # sleep: paces the writer, nothing waits

    first = begun_us // 200_000
    producers = [asyncio.create_task(produce(streamlet)) for streamlet in (0, 1)]
    async with client.epochs("epochs-live", start=first) as eager:
        live = await read(eager, 8)
    last = live[-1].number
    stop.set()
    await asyncio.gather(*producers)
    for settings in SETTINGS:
        async with client.epochs("epochs-live", start=first, end=last + 1, **settings) as reader:
            again = await read(reader, 1000)
        assert seen(again) == seen(live)
    assert sum(epoch.late_records for epoch in live) > 0
    async with client.consumer("epochs-live", start="earliest", end="latest") as consumer:
        everything = {record.value async for record in consumer}
    assert {value for epoch in live for value in epoch.rows()["value"].to_pylist()} <= everything


async def test_an_entry_without_writers_does_not_delay_epochs(client: Client) -> None:
    await client.admin.create_stream("epochs-silent", streamlets=4, epoch_ms=200, epoch_grace_ms=100)
    now_us = time.time_ns() // 1000
    async with client.epochs("epochs-silent", start=now_us // 200_000) as reader:
        await write(client, "epochs-silent", [now_us], streamlet=2)
        (epoch,) = await read(reader, 1)
        assert (epoch.number, epoch.records) == (now_us // 200_000, 1)
        assert set(reader.positions()) == {0, 1, 2, 3}


async def test_a_reader_continues_after_its_committed_epoch(client: Client) -> None:
    await client.admin.create_stream("epochs-commit", epoch_ms=10, punctuation="producers")
    await write(client, "epochs-commit", *([at * MS] for at in (1, 5, 12, 25, 31, 58)))
    settings: dict[str, Any] = {"consumer_group": "epochs", "start": "committed"}
    async with client.epochs("epochs-commit", **settings) as reader:
        assert [epoch.number for epoch in await read(reader, 2)] == [0, 1]
        await reader.commit()
        assert [epoch.number for epoch in await read(reader, 1)] == [2]
    async with client.epochs("epochs-commit", **settings) as reader:
        assert [epoch.number for epoch in await read(reader, 2)] == [2, 3]
        await reader.commit()
        assert [(entry.streamlet_id, entry.entry) for entry in reader.held_up_by()] == [(0, 0)]


async def test_continuing_with_longer_epochs_gives_whole_epochs_or_an_error(client: Client) -> None:
    await client.admin.create_stream("epochs-longer", streamlets=2, epoch_ms=10, punctuation="producers")
    for streamlet in (0, 1):
        await write(client, "epochs-longer", *([at * MS + 1] for at in range(0, 100, 10)), streamlet=streamlet)
    settings: dict[str, Any] = {"consumer_group": "longer", "start": "committed"}
    async with client.epochs("epochs-longer", start="earliest", consumer_group="longer") as reader:
        assert [epoch.number for epoch in await read(reader, 4)] == [0, 1, 2, 3]
        await reader.commit()
    async with client.epochs("epochs-longer", epoch_ms=30, **settings) as reader:
        for _ in range(2):
            with pytest.raises(EpochPassed, match=r"start=1 reads all of it again, start=2 .* epoch_ms as it was"):
                await read(reader, 1)
    async with client.epochs("epochs-longer", epoch_ms=30, start=1, end=3) as reader:
        whole = seen(await read(reader, 2))
    assert [epoch[:2] for epoch in whole] == [(1, 6), (2, 6)]
    async with client.epochs("epochs-longer", epoch_ms=20, end=3, **settings) as reader:
        assert [(epoch.number, epoch.records) for epoch in await read(reader, 1)] == [(2, 4)], "one begins there"
    await client.admin.alter_stream("epochs-longer", epoch_ms=30)
    async with client.ordered_consumer("epochs-longer", **settings) as consumer:
        with pytest.raises(EpochPassed, match=r"start=2 continues after it$"):
            await anext(aiter(consumer))
    async with client.epochs("epochs-longer", start=1, end=3, consumer_group="longer") as reader:
        assert seen(await read(reader, 1)) == whole[:1]
        await reader.commit()
    async with client.epochs("epochs-longer", end=3, **settings) as reader:
        assert seen(await read(reader, 1)) == whole[1:]


async def test_a_truncated_stream_gives_only_whole_epochs(client: Client) -> None:
    await client.admin.create_stream("epochs-cut", epoch_ms=10, punctuation="producers")
    await write(client, "epochs-cut", *([at * MS] for at in (1, 5, 12, 45, 13, 14, 58, 69, 75)))
    await cut_before(client, "epochs-cut", 45 * MS)
    async with client.epochs("epochs-cut", start="earliest", end=7) as reader:
        found = await read(reader, 9)
    assert [(epoch.number, epoch.rows()["value"].to_pylist()) for epoch in found] == [
        (5, [b"58000"]),
        (6, [b"69000"]),
    ], "what is left of epoch 4, which is older than that, is not given for epoch 1"


async def cut_before(client: Client, stream: str, time_us: int) -> None:
    """Remove all chunks up to the chunk with that time, inclusive."""
    places = await client.positions_at(stream, time_us)
    async with client.consumer(stream, start={0: [places[0][0].position]}, joined_bytes_max=0) as consumer:
        async for chunk in consumer.batches():
            await client.admin.truncate_stream(stream, {0: [chunk.next]})
            break


async def test_a_partly_removed_epoch_is_an_error(client: Client) -> None:
    await client.admin.create_stream("epochs-part", epoch_ms=10, punctuation="producers")
    await write(client, "epochs-part", *([at * MS] for at in (1, 5, 12, 45, 13, 14, 58, 69)))
    async with client.epochs("epochs-part", start="earliest", end=6) as early:
        await early.start()
        await cut_before(client, "epochs-part", 45 * MS)
        with pytest.raises(DataLost):
            await read(early, 1)
    for start in (0, 1, 4):
        with pytest.raises(DataLost, match="start at 5"):
            async with client.epochs("epochs-part", start=start):
                pass
    whole: list[dict[str, Any]] = [{"start": 5}, {"start": "committed", "consumer_group": "never-committed"}]
    for arguments in whole:
        async with client.epochs("epochs-part", end=6, **arguments) as reader:
            assert [epoch.number for epoch in await read(reader, 9)] == [5], arguments


async def test_the_error_for_removed_committed_epochs_says_how_to_continue(client: Client) -> None:
    await client.admin.create_stream("epochs-gone", epoch_ms=10, punctuation="producers")
    await write(client, "epochs-gone", *([at * MS] for at in (1, 12, 25, 45, 58, 69)))
    settings: dict[str, Any] = {"consumer_group": "gone"}
    async with client.epochs("epochs-gone", start="earliest", **settings) as reader:
        await read(reader, 1)
        await reader.commit()
    await cut_before(client, "epochs-gone", 45 * MS)
    async with client.epochs("epochs-gone", start="committed", **settings) as reader:
        with pytest.raises(DataLost, match="start='earliest' goes on with the first") as lost:
            await read(reader, 1)
    assert "read on from there" not in lost.value.message
    assert f"is gone: {lost.value.attributes['reason']}; epochs are given as a whole" in lost.value.message
    async with client.epochs("epochs-gone", start="earliest", end=6, **settings) as reader:
        assert [epoch.number for epoch in await read(reader, 9)] == [5]


async def test_the_error_for_an_epoch_read_too_early_says_where_to_read_again(client: Client) -> None:
    await client.admin.create_stream("epochs-passed", streamlets=2, epoch_ms=10, punctuation="producers")
    await write(client, "epochs-passed", *([at * MS] for at in (1, 12, 25)), streamlet=0)
    async with client.epochs("epochs-passed", start="earliest", consumer_group="passed") as reader:
        assert [epoch.records for epoch in await read(reader, 1)] == [1]
        await write(client, "epochs-passed", [2 * MS], [29 * MS], streamlet=1)
        with pytest.raises(EpochPassed, match="start=0 reads all of it"):
            await read(reader, 2)
        await reader.commit()
    async with client.epochs("epochs-passed", start="committed", consumer_group="passed") as reader:
        with pytest.raises(EpochPassed, match="start=0 reads all of it"):
            await read(reader, 1)
    async with client.epochs("epochs-passed", start=0, end=2) as reader:
        assert [epoch.records for epoch in await read(reader, 2)] == [2, 1]


async def test_a_late_record_is_in_the_epoch_of_its_punctuation_for_every_reader(client: Client) -> None:
    await client.admin.create_stream("epochs-behind", epoch_ms=10, epoch_grace_ms=1000)
    now_us = time.time_ns() // 1000
    first = now_us // 10_000 - 500
    await write(client, "epochs-behind", [first * 10_000])
    async with asyncio.timeout(WAIT_S):
        while (await client.bounds("epochs-behind", promise=True))[0][0].promised_us is None:
            pass
    await write(client, "epochs-behind", [first * 10_000 + 1], [now_us + 60_000_000])
    settings: dict[str, Any] = {"consumer_group": "epochs", "start": "committed"}
    async with client.epochs("epochs-behind", start=first) as reader:
        expected = seen(await read(reader, 2))
    assert expected[1][0] > first, "what came late is of the epoch that was promised"
    async with client.epochs("epochs-behind", **settings) as reader:
        assert seen(await read(reader, 1)) == expected[:1]
        await reader.commit()
    async with client.epochs("epochs-behind", **settings) as reader:
        assert seen(await read(reader, 1)) == expected[1:]


@pytest.mark.parametrize(("start", "end"), [(10**30, "latest"), (-(10**30), 0), (3, "latest"), (7, 7)])
async def test_a_reader_with_no_epoch_between_start_and_end_ends_at_once(client: Client, start: int, end: Any) -> None:
    stream = f"epochs-nothing-{start % 97}"
    await client.admin.create_stream(stream, epoch_ms=10, punctuation="producers")
    await write(client, stream, [1], [20_000])
    async with client.epochs(stream, start=start, end=end) as reader:
        assert await read(reader, 1) == []


async def test_invalid_arguments_and_settings_of_epochs_are_refused(client: Client) -> None:
    await client.admin.create_stream("epochs-none")
    await client.admin.create_stream("epochs-some", epoch_ms=30)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"epoch_ms": 45}, "not a multiple"),
        ({"epoch_ms": 0}, "epoch_ms"),
        ({"start": "never"}, "number of an epoch"),
        ({"end": True}, "number of an epoch"),
        ({"epoch_bytes_max": 0}, "epoch_bytes_max"),
    ]
    for arguments, text in wrong:
        with pytest.raises(InvalidArgument, match=text):
            async with client.epochs("epochs-some", **arguments):
                pass
    with pytest.raises(InvalidArgument, match="has no epochs"):
        async with client.epochs("epochs-none"):
            pass
    with pytest.raises(InvalidArgument):
        client.epochs()
    unfit: list[dict[str, Any]] = [
        {"epoch_ms": -1},
        {"epoch_ms": 1 << 60},
        {"punctuation": "never"},
        {"epoch_grace_ms": 0},
    ]
    for arguments in unfit:
        with pytest.raises(InvalidArgument):
            await client.admin.alter_stream("epochs-some", **arguments)
    year_ahead = time.time_ns() // 1000 + 366 * 86_400_000_000
    with pytest.raises(TimestampAhead, match="timestamp_ahead_max_ms"):
        await write(client, "epochs-some", [year_ahead])
    await write(client, "epochs-some", [-1])


async def test_an_epoch_larger_than_its_memory_limit_is_an_error(client: Client) -> None:
    await client.admin.create_stream("epochs-large", epoch_ms=10, punctuation="producers")
    await write(client, "epochs-large", *([1] for _ in range(8)), [20_000])
    async with client.epochs("epochs-large", start="earliest", epoch_bytes_max=500, joined_bytes_max=0) as reader:
        with pytest.raises(RecordTooLarge, match="epoch_bytes_max"):
            await read(reader, 1)


async def test_every_kind_of_reader_skips_punctuations(client: Client) -> None:
    await client.admin.create_stream("epochs-mixed", epoch_ms=10, epoch_grace_ms=1)
    expected = []
    for number in range(20):
        await client.bounds("epochs-mixed", promise=True)
        await write(client, "epochs-mixed", [number])
        expected.append(b"%d" % number)
    for settings in SETTINGS:
        async with client.consumer("epochs-mixed", start="earliest", end="latest", **settings) as consumer:
            assert [record.value async for record in consumer] == expected
        async with client.consumer("epochs-mixed", start="earliest", end="latest", **settings) as consumer:
            batches = [chunk.batch.num_rows async for chunk in consumer.batches()]
            assert sum(batches) == len(expected)
            assert all(batches), "none comes as a batch without records"
    async with client.group_consumer("epochs-group", "epochs-mixed") as member:
        found = []
        async with asyncio.timeout(WAIT_S):
            async for record in member:
                found.append(record.value)
                if len(found) == len(expected):
                    break
    assert found == expected
    (entry,) = (await client.bounds("epochs-mixed"))[0]
    assert (entry.first_record, entry.next_record) == (0, 20)
    assert entry.watermark_us is not None
    assert entry.watermark_us > 10**15, "punctuations have been written, which say how late it was"


def test_the_synchronous_client_reads_and_commits_epochs(cluster: RunningCluster) -> None:
    with sync.Client(cluster.bootstrap) as client:
        client.admin.create_stream("epochs-sync", epoch_ms=10, punctuation="producers")
        with client.producer() as producer:
            for at in (1, 5, 12, 25, 31):
                producer.send("epochs-sync", b"%d" % at, timestamp_us=at * MS)
                producer.flush()
        with client.epochs("epochs-sync", start="committed", end=3, consumer_group="sync") as epochs:
            assert [(epoch.number, epoch.records) for epoch in epochs] == [(0, 2), (1, 1), (2, 1)]
            assert (epochs.epoch_ms, len(epochs.positions()[0])) == (10, 1)
            assert (epochs.epochs_read, epochs.records_read, epochs.late_records) == (3, 4, 0)
            assert [(entry.streamlet_id, entry.entry) for entry in epochs.held_up_by()] == [(0, 0)]
            epochs.commit()
        with client.epochs("epochs-sync", start="committed", end="latest", consumer_group="sync") as epochs:
            assert list(epochs) == []
        with pytest.raises(InvalidArgument, match="number of an epoch"):
            client.epochs("epochs-sync", start="soon")  # type: ignore[arg-type]


def kera(cluster: RunningCluster, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "kera.cli", *arguments, "--bootstrap", cluster.bootstrap],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    return done.returncode, done.stdout, done.stderr


async def test_the_command_line_shows_epochs_and_their_lag(client: Client, cluster: RunningCluster) -> None:
    created = kera(cluster, "stream", "create", "epochs-cli", "--streamlets", "2", "--epoch", "10ms")
    assert created[0] == 0, created
    assert kera(cluster, "stream", "alter", "epochs-cli", "--punctuation", "producers", "--epoch-grace", "3s")[0] == 0
    assert "of 10 ms, producers say when they are closed" in kera(cluster, "stream", "describe", "epochs-cli")[1]
    await write(client, "epochs-cli", [1000, 3000], [12_000, 9000], [31_000], streamlet=0)
    await write(client, "epochs-cli", [95_000], streamlet=1)

    code, out, _ = kera(cluster, "epochs", "list", "epochs-cli", "--json", "--digest")
    found = json.loads(out)
    assert (code, [each["epoch"] for each in found], [each["records"] for each in found]) == (0, [0, 1], [2, 2])
    assert [each["late_records"] for each in found] == [0, 1]
    code, again, _ = kera(cluster, "epochs", "list", "epochs-cli", "--digest", "--from", "1", "--limit", "1")
    assert (code, found[1]["digest"] in again, len(again.splitlines())) == (0, True, 2)
    assert re.search(r":\d\d\.010 .*:\d\d\.020 ", again), "times are as fine as epochs may be"
    assert kera(cluster, "epochs", "list", "epochs-cli", "--epoch", "15ms")[0] == 1
    assert kera(cluster, "epochs", "list", "epochs-cli", "--from", "never")[0] == 2
    assert kera(cluster, "epochs", "list", "no-such-stream")[0] == 1

    code, out, _ = kera(cluster, "epochs", "lag", "epochs-cli", "--json")
    entries = json.loads(out)
    assert (code, [(entry["streamlet"], entry["settled_us"]) for entry in entries]) == (0, [(0, 31_000), (1, 95_000)])
    assert "SETTLED UP TO" in kera(cluster, "epochs", "lag", "epochs-cli")[1]
    await client.admin.create_stream("epochs-cli-none")
    code, _, error = kera(cluster, "epochs", "lag", "epochs-cli-none")
    assert (code, "has no epochs" in error) == (1, True)
    assert kera(cluster, "epochs", "list", "epochs-cli-none")[::2] == (code, error)
