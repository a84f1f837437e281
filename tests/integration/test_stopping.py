"""Consumers that are stopped by another thread or by SIGTERM: no record is lost, and commits are stored."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator

import pyarrow as pa
import pytest

from kera.client import Client as AsyncClient
from kera.client import tasks
from kera.client.sync import Client, Consumer, GroupConsumer
from kera.core.errors import WokenUp
from kera.local.cluster import RunningCluster

TIMEOUT_S = 60.0
RECORDS, CHUNK_RECORDS = 600, 20
VALUES = [b"%d" % number for number in range(RECORDS)]


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[Client]:
    with Client(cluster.bootstrap) as connected:
        yield connected


def fill(client: Client, stream: str) -> None:
    client.admin.create_stream(stream)
    with client.producer() as producer:
        for first in range(0, RECORDS, CHUNK_RECORDS):
            values = pa.array(VALUES[first : first + CHUNK_RECORDS], pa.binary())
            producer.send_batch(stream, pa.record_batch({"value": values})).result()


def consumer_of(client: Client, stream: str, *, in_group: bool) -> Consumer | GroupConsumer:
    if in_group:
        return client.group_consumer(stream, stream, joined_bytes_max=0)
    return client.consumer(stream, start="earliest", joined_bytes_max=0)


@pytest.mark.parametrize("in_group", [False, True], ids=["plain", "group"])
def test_a_wakeup_ends_a_waiting_poll_and_the_next_poll_works(client: Client, in_group: bool) -> None:
    stream = f"stop-poll-{in_group}"
    client.admin.create_stream(stream)
    with consumer_of(client, stream, in_group=in_group) as consumer:
        woken: list[BaseException] = []

        def poll() -> None:
            try:
                consumer.poll()
            except WokenUp as error:
                woken.append(error)

        waiting = threading.Thread(target=poll)
        waiting.start()
        consumer.wakeup()
        waiting.join(TIMEOUT_S)
        assert len(woken) == 1

        with client.producer() as producer:
            producer.send(stream, b"one").result()
        assert [record.value for record in consumer.poll(TIMEOUT_S)] == [b"one"]


@pytest.mark.parametrize("in_group", [False, True], ids=["plain", "group"])
@pytest.mark.parametrize("kind", ["records", "batches"])
def test_a_wakeup_ends_a_loop_and_the_next_loop_continues(client: Client, kind: str, in_group: bool) -> None:
    stream = f"stop-loop-{kind}-{in_group}"
    fill(client, stream)
    found: list[bytes | None] = []
    loops = 0
    with consumer_of(client, stream, in_group=in_group) as consumer:
        while len(found) < RECORDS:
            loops += 1
            before = len(found)
            if kind == "records":
                for record in consumer:
                    found.append(record.value)
                    if len(found) - before >= CHUNK_RECORDS + 7 or len(found) == RECORDS:
                        consumer.wakeup()
            else:
                for batch in consumer.batches():
                    found += batch.batch["value"].to_pylist()
                    consumer.wakeup()
    assert sorted(found, key=lambda value: int(value or b"-1")) == VALUES
    assert loops > 10


POLLS = """
import signal, sys
from kera.client.sync import Client
from kera.core.errors import WokenUp

bootstrap, stream, in_group = sys.argv[1:]
with Client(bootstrap) as client:
    if in_group == "True":
        consumer = client.group_consumer(stream, stream, joined_bytes_max=0)
    else:
        consumer = client.consumer(stream, start="committed", consumer_group=stream, joined_bytes_max=0)
    with consumer:
        signal.signal(signal.SIGTERM, lambda *_: consumer.wakeup())
        try:
            while True:
                for record in consumer.poll():
                    print(record.value.decode(), flush=True)
        except WokenUp:
            consumer.commit()
"""
LOOPS = (
    POLLS.split("        try:\n", maxsplit=1)[0]
    + """
        for record in consumer:
            print(record.value.decode(), flush=True)
        consumer.commit()
"""
)


def run_until(program: str, arguments: list[str], wanted: Collection[bytes]) -> list[bytes]:
    """The values that a program prints until it ends; it gets a SIGTERM when it has printed all the wanted values."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        found: list[bytes] = []
        while not {*wanted}.issubset(found):
            found.append(process.stdout.readline().strip())
            assert found[-1], process.stderr.read().decode()
        process.send_signal(signal.SIGTERM)
        found += process.stdout.read().split()
        errors = process.stderr.read().decode()
        assert process.wait(TIMEOUT_S) == 0, errors
    return found


@pytest.mark.parametrize(
    ("program", "in_group"),
    [
        pytest.param(POLLS, True, id="polls in a group"),
        pytest.param(POLLS, False, id="polls", marks=pytest.mark.slow),
        pytest.param(LOOPS, True, id="a loop in a group", marks=pytest.mark.slow),
        pytest.param(LOOPS, False, id="a loop", marks=pytest.mark.slow),
    ],
)
def test_a_process_commits_at_sigterm_and_the_next_process_continues(
    client: Client, cluster: RunningCluster, program: str, in_group: bool
) -> None:
    polls = program is POLLS
    stream = f"stop-term-{'polls' if polls else 'loops'}-{in_group}"
    fill(client, stream)
    arguments = [cluster.bootstrap, stream, str(in_group)]

    first = run_until(program, arguments, VALUES[:50])
    assert 50 <= len(first) < RECORDS
    rest = run_until(program, arguments, {*VALUES} - {*first})

    assert {*first, *rest} == {*VALUES}
    # A loop ends within a chunk, and the next process reads that chunk again.
    assert len(first) + len(rest) - RECORDS < (1 if polls else CHUNK_RECORDS)


@pytest.mark.parametrize("form", ["batches", "records", "poll"])
@pytest.mark.parametrize("in_group", [False, True], ids=["plain", "group"])
async def test_other_tasks_get_turns_while_a_consumer_always_has_chunks(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, form: str, in_group: bool
) -> None:
    stream = f"turns-{form}-{in_group}"
    await asyncio.to_thread(lambda: filled(cluster, stream))
    monkeypatch.setattr(tasks, "TURN_EVERY_S", 0.0)  # as if the caller took longer than that with each chunk
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with await AsyncClient.connect(cluster.bootstrap) as client:
        consumer = (
            client.group_consumer(stream, stream, joined_bytes_max=0)
            if in_group
            else client.consumer(stream, start="earliest", joined_bytes_max=0)
        )
        async with consumer, asyncio.timeout(TIMEOUT_S):
            await consumer.poll()  # from here on chunks are at hand
            running = asyncio.create_task(others())
            seen, read = set(), CHUNK_RECORDS
            if form == "batches":
                async for batch in consumer.batches():
                    seen.add(turns)
                    read += batch.batch.num_rows
                    if read >= RECORDS:
                        break
            elif form == "records":
                async for _ in consumer:
                    seen.add(turns)
                    read += 1
                    if read >= RECORDS:
                        break
            else:
                while read < RECORDS:
                    read += len(await consumer.poll())
                    seen.add(turns)
            running.cancel()
    assert len(seen) >= RECORDS // CHUNK_RECORDS - 2  # at least one turn for each chunk


def filled(cluster: RunningCluster, stream: str) -> None:
    with Client(cluster.bootstrap) as client:
        fill(client, stream)
