"""Group consumers, with real daemons."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client, GroupConsumer, LostGroup, ShiftBy, ToOffset
from kera.client.admin.reset_plan import ResetTo
from kera.core.base.ids import EARLIEST, EntryId
from kera.core.base.settings import KIB, MIB
from kera.core.errors import DataLost, InvalidArgument, LeaseLost, StreamletOutOfRange
from kera.core.rpc import api
from kera.local.cluster import LocalCluster, RunningCluster
from kera.v1 import coordinator_pb2
from tests.integration.support import until, until_found

TIMEOUT_S = 60.0


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


async def fill(client: Client, stream: str, *values: bytes, streamlet: int | None = None) -> None:
    async with client.producer() as producer:
        await producer.send_batch(
            stream, pa.record_batch({"value": pa.array(values, pa.binary())}), streamlet=streamlet
        )


async def test_a_second_consumer_continues_after_the_first_ones_commit(client: Client) -> None:
    await client.admin.create_stream("alone", streamlets=2, entries=2)
    for streamlet in range(2):
        for number in range(2):
            await fill(client, "alone", b"%d%d" % (streamlet, number), streamlet=streamlet)
    async with asyncio.timeout(TIMEOUT_S):
        async with client.group_consumer("app", "alone") as consumer:
            records = aiter(consumer)
            values = sorted([(await anext(records)).value or b"" for _ in range(4)])
            assert values == [b"00", b"01", b"10", b"11"]
            await consumer.commit()
        await fill(client, "alone", b"new", streamlet=1)
        async with client.group_consumer("app", "alone") as consumer:
            assert (await anext(aiter(consumer))).value == b"new"


@pytest.fixture(scope="module")
def small_groups() -> Iterator[RunningCluster]:
    """Two brokers whose groups of segments are soon full."""
    with LocalCluster.running(brokers=2, arena_bytes=64 * MIB, segment_bytes=64 * KIB) as running:
        yield running


async def take(consumer: GroupConsumer, count: int) -> list[int]:
    """Take this many records, and commit them."""
    numbers: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for record in consumer:
            numbers.append(int(record.value or b"-1"))
            if len(numbers) == count:
                break
        await consumer.commit()
    return numbers


async def numbered(client: Client, stream: str, numbers: range, streamlet: int = 0) -> None:
    """Write each record in a chunk of its own."""
    async with client.producer() as producer:
        for number in numbers:
            values = pa.array([b"%d" % number], pa.binary())
            await (await producer.send_batch(stream, pa.record_batch({"value": values}), streamlet=streamlet))


async def read(consumer: GroupConsumer, taken: list[int]) -> None:
    """Read until cancelled."""
    async for record in consumer:
        taken.append(int(record.value or b"-1"))  # noqa: PERF401 - others look at it meanwhile


async def holdings(client: Client, consumer_group: str) -> list[int]:
    """How many groups each consumer has."""
    described = await client.admin.describe_consumer_group(consumer_group)
    return sorted(len(member.held) for member in described.members)


async def test_groups_are_rebalanced_when_consumers_join_and_leave(client: Client) -> None:
    await client.admin.create_stream("moving", streamlets=6)
    for streamlet in range(6):
        await numbered(client, "moving", range(streamlet * 10, streamlet * 10 + 5), streamlet)
    taken: list[int] = []
    own: dict[str, Any] = {"heartbeat_interval_ms": 100, "commit_interval_ms": 50}
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(client.group_consumer("app", "moving", **own))
        tasks = [asyncio.create_task(read(first, taken))]
        await until(lambda: len(taken) == 30)
        second, third = (client.group_consumer("app", "moving", **own) for _ in range(2))
        for consumer in (second, third):
            await stack.enter_async_context(consumer)
            tasks.append(asyncio.create_task(read(consumer, taken)))

        async def even() -> bool:
            return await holdings(client, "app") == [2, 2, 2]

        await until_found(even)
        for streamlet in range(6):
            await numbered(client, "moving", range(streamlet * 10 + 5, streamlet * 10 + 10), streamlet)
        await until(lambda: len(taken) == 60)
        await second.close()

        async def shared() -> bool:
            return await holdings(client, "app") == [3, 3]

        await until_found(shared)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(taken) == list(range(60)), "each once, whoever has it"


async def test_heartbeats_continue_while_user_code_blocks_the_loop(client: Client) -> None:
    await client.admin.create_stream("busy")
    await numbered(client, "busy", range(3))
    own: dict[str, Any] = {"session_timeout_ms": 500, "heartbeat_interval_ms": 100}
    async with client.group_consumer("busy-app", "busy", **own) as consumer:
        records = aiter(consumer)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await anext(records)).value == b"0"
            until_s = time.monotonic() + 3 * own["session_timeout_ms"] / 1000
            while time.monotonic() < until_s:
                pass  # nothing else runs on this loop
            assert [(await anext(records)).value for _ in range(2)] == [b"1", b"2"]
            await consumer.commit()


async def test_a_stuck_consumer_loses_its_groups_and_its_commits_are_refused(client: Client) -> None:
    await client.admin.create_stream("stuck")
    await numbered(client, "stuck", range(3))
    own: dict[str, Any] = {"heartbeat_interval_ms": 100}
    async with client.group_consumer("stuck-app", "stuck", progress_timeout_ms=300, **own) as slow:
        records = aiter(slow)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await anext(records)).value == b"0"
            async with client.group_consumer("stuck-app", "stuck", **own) as other:
                assert await take(other, 3) == [0, 1, 2], "what was not committed is read again"
                with pytest.raises(LeaseLost, match="belongs to another consumer"):
                    await slow.commit()
                await numbered(client, "stuck", range(3, 4))
                assert await take(other, 1) == [3]
            await numbered(client, "stuck", range(4, 5))
            assert await take(slow, 1) == [4], "it takes part again"


async def test_lost_groups_reach_the_reader_as_an_error_or_a_callback(client: Client) -> None:
    await client.admin.create_stream("told")
    await numbered(client, "told", range(2))
    lost: list[LostGroup] = []
    own: dict[str, Any] = {"progress_timeout_ms": 200, "heartbeat_interval_ms": 50}
    for consumer_group, on_lost in (("told-app", None), ("told-app-2", lost.extend)):

        async def gone(consumer_group: str = consumer_group) -> bool:
            return await holdings(client, consumer_group) == []

        async with (
            asyncio.timeout(TIMEOUT_S),
            client.group_consumer(consumer_group, "told", on_lost=on_lost, **own) as consumer,
        ):
            records = aiter(consumer)
            assert (await anext(records)).value == b"0"
            await until_found(gone)
            if on_lost is None:
                with pytest.raises(LeaseLost):
                    await anext(records)
                records = aiter(consumer)
            assert (await anext(records)).value == b"0"
    assert set(lost) == {LostGroup("told", 0, 0, 1)}  # more than once where the machine stands still


async def test_a_consumer_group_is_described_reset_and_deleted(client: Client) -> None:
    await client.admin.create_stream("reset", streamlets=2)
    for streamlet in range(2):
        await numbered(client, "reset", range(streamlet * 10, streamlet * 10 + 4), streamlet)
    async with client.group_consumer("reset-app", "reset") as consumer:
        taken = await take(consumer, 5)
        described = await client.admin.describe_consumer_group("reset-app")
        (member,) = described.members
        assert (member.member_id, len(member.held)) == (consumer.member_id, 2)
        assert member.bytes_consumed > 0
        assert sum(entry.lag.records for entry in described.entries if entry.lag) == 3
        assert all(entry.lag and (entry.lag.bytes > 0) == (entry.lag.records > 0) for entry in described.entries)
        assert [each.consumer_group for each in await client.admin.consumer_groups()].count("reset-app") == 1
        with pytest.raises(InvalidArgument, match="1 active consumer"):
            await client.admin.reset_consumer_group("reset-app", "reset", "earliest")
        await client.admin.reset_consumer_group("reset-app", "reset", "earliest", force=True)
        with pytest.raises(LeaseLost):
            await take(consumer, 1)
        assert sorted(await take(consumer, 8)) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert len(taken) == 5
    await client.admin.reset_consumer_group("reset-app", "reset", "latest")
    described = await client.admin.describe_consumer_group("reset-app")
    assert [entry.lag and entry.lag.records for entry in described.entries] == [0, 0]
    moment = datetime.datetime.now(datetime.UTC)
    await numbered(client, "reset", range(20, 22))
    await client.admin.reset_consumer_group("reset-app", "reset", moment)
    described = await client.admin.describe_consumer_group("reset-app")
    first, second = (entry.lag.records for entry in described.entries if entry.lag)
    assert first == 2, "the chunk of then"
    assert second == 0
    await client.admin.delete_consumer_group("reset-app")
    with pytest.raises(InvalidArgument, match="no consumer group"):
        await client.admin.describe_consumer_group("reset-app")


async def test_a_new_consumer_group_starts_at_latest_if_it_says_so(client: Client) -> None:
    await client.admin.create_stream("begin", entries=2)
    await numbered(client, "begin", range(3))
    async with client.group_consumer("begin-app", "begin", start="latest", heartbeat_interval_ms=50) as consumer:

        async def begun() -> bool:
            known = await client.admin.consumer_groups()
            return any(each.consumer_group == "begin-app" and each.streams for each in known)

        await until_found(begun)
        await numbered(client, "begin", range(3, 5))
        assert await take(consumer, 2) == [3, 4]


async def test_a_gap_is_reported_once_or_skipped(client: Client) -> None:
    await client.admin.create_stream("gap")
    await numbered(client, "gap", range(6))
    for consumer_group in ("gap-raise", "gap-skip"):
        async with client.group_consumer(consumer_group, "gap") as consumer:
            assert await take(consumer, 1) == [0]
    bounds = await client.bounds("gap")
    async with client.consumer("gap", start="earliest", end="latest", joined_bytes_max=0) as reader:
        chunks = [chunk async for chunk in reader.batches()]
    await client.admin.truncate_stream("gap", {0: [chunks[3].start]})
    assert bounds[0][0].end == chunks[-1].next
    async with client.group_consumer("gap-raise", "gap") as consumer:
        with pytest.raises(DataLost):
            await take(consumer, 1)
        assert await take(consumer, 3) == [3, 4, 5]
    async with client.group_consumer("gap-skip", "gap", on_data_lost="skip") as consumer:
        assert await take(consumer, 3) == [3, 4, 5]


@pytest.mark.slow
async def test_a_gap_up_to_a_later_group_is_reported_once_to_consumers_that_end_with_it(
    small_groups: RunningCluster,
) -> None:
    """The cursor is in a group of segments that is gone, as after older metadata were restored."""
    async with await Client.connect(small_groups.bootstrap) as client:
        await client.admin.create_stream("ends-with-it", group_segments=1)
        await fill(client, "ends-with-it", *(b"%01000d" % number for number in range(300)))
        async with client.group_consumer("ends-with-it", "ends-with-it") as consumer:
            assert await take(consumer, 1) == [0]
        ((start,),) = (await client.admin.truncate_stream("ends-with-it", "latest")).values()
        assert start.group_id > 2
        await numbered(client, "ends-with-it", range(300, 301))
        told: list[str] = []
        taken: list[int] = []
        while not taken:
            async with client.group_consumer("ends-with-it", "ends-with-it") as consumer:
                try:
                    taken = await take(consumer, 1)
                except DataLost as error:
                    told.append(error.message)
            assert len(set(told)) == len(told), "told again"
        assert told
        assert all("removed by retention or truncation" in each for each in told)
        assert taken == [300]


@pytest.mark.slow
async def test_groups_removed_before_any_consumer_found_them_are_reported_once() -> None:
    """This includes consumers and a coordinator that did not run at that time."""
    with LocalCluster.running(arena_bytes=64 * MIB, segment_bytes=64 * KIB) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("hurry", group_segments=1, retention_bytes=256 * KIB)
            for consumer_group in ("late", "skips"):
                async with client.group_consumer(consumer_group, "hurry"):

                    async def begun(name: str = consumer_group) -> bool:
                        known = await client.admin.consumer_groups()
                        return any(each.consumer_group == name and each.streams for each in known)

                    await until_found(begun)
            await fill(client, "hurry", *(b"%08d" % number + bytes(1000) for number in range(1500)))

            async def gone() -> bool:
                return (await client.bounds("hurry"))[0][0].length_bytes < 320 * KIB  # a segment more than is kept

            await until_found(gone)
            cluster.kill("coordinator")
            await asyncio.to_thread(cluster.restart, "coordinator")
            first = (await client.bounds("hurry"))[0][0].first_record
            assert 0 < first < 1500

            async def take_rest(consumer: GroupConsumer, count: int) -> list[int]:
                numbers: list[int] = []
                async with asyncio.timeout(TIMEOUT_S):
                    async for batch in consumer.batches():
                        numbers += [int(value[:8]) for value in batch.batch["value"].to_pylist()]
                        if len(numbers) >= count:
                            break
                return numbers

            async with client.group_consumer("late", "hurry") as consumer:
                with pytest.raises(DataLost) as raised:
                    await take_rest(consumer, 1)
                assert raised.value.attributes["lost_records"] == [[0, first]]
                assert raised.value.attributes["records"] == first
                await consumer.commit()
            async with client.group_consumer("late", "hurry") as consumer:
                assert await take_rest(consumer, 1500 - first) == list(range(first, 1500)), "told once"
            for consumer_group in ("skips", "new"):
                policy = "skip" if consumer_group == "skips" else "raise"
                async with client.group_consumer(consumer_group, "hurry", on_data_lost=policy) as consumer:
                    assert await take_rest(consumer, 1500 - first) == list(range(first, 1500))


@pytest.mark.slow
async def test_retention_removes_records_that_a_consumer_group_has_read(small_groups: RunningCluster) -> None:
    """Brokers know the group's cursors: retention by consumption depends on them."""
    async with await Client.connect(small_groups.bootstrap) as client:
        rules: dict[str, Any] = {"retention_consumer_groups": ["cleaner"], "retention_consumed": True}
        await client.admin.create_stream("consumed", group_segments=1, **rules)
        values = [b"%d" % number + bytes(1000) for number in range(500)]
        await fill(client, "consumed", *values)
        async with client.group_consumer("cleaner", "consumed", commit_interval_ms=50) as consumer:
            async with asyncio.timeout(TIMEOUT_S):
                taken = 0
                async for batch in consumer.batches():
                    taken += batch.batch.num_rows
                    if taken == 500:
                        break
                await consumer.commit()

            async def gone() -> bool:
                return (await client.bounds("consumed"))[0][0].start.group_id > 1

            await until_found(gone)


async def test_consumers_keep_their_groups_through_a_restart_of_the_coordinator() -> None:
    """A new coordinator knows which member has which groups."""
    with LocalCluster.running() as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", streamlets=2)
            own: dict[str, Any] = {"heartbeat_interval_ms": 100}
            async with client.group_consumer("app", "s", **own) as one, client.group_consumer("app", "s", **own) as two:
                taken: list[int] = []
                tasks = [asyncio.create_task(read(consumer, taken)) for consumer in (one, two)]
                for streamlet in range(2):
                    await numbered(client, "s", range(streamlet * 10, streamlet * 10 + 3), streamlet)
                await until(lambda: len(taken) == 6)
                await one.commit()
                await two.commit()
                before = [one.positions(), two.positions()]
                cluster.kill("coordinator")
                await asyncio.to_thread(cluster.restart, "coordinator")
                for streamlet in range(2):
                    await numbered(client, "s", range(streamlet * 10 + 3, streamlet * 10 + 6), streamlet)
                await until(lambda: len(taken) == 12)
                await one.commit()
                await two.commit()
                assert [set(one.positions()), set(two.positions())] == [set(each) for each in before]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(taken) == [*range(6), *range(10, 16)]


async def test_consumers_read_each_record_once_while_their_streamlet_moves(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("nomad", entries=2)
        taken: list[int] = []
        own: dict[str, Any] = {"heartbeat_interval_ms": 100, "commit_interval_ms": 50}
        async with (
            client.group_consumer("nomad-app", "nomad", **own) as one,
            client.group_consumer("nomad-app", "nomad", **own) as two,
        ):
            tasks = [asyncio.create_task(read(consumer, taken)) for consumer in (one, two)]
            for move in range(4):
                await numbered(client, "nomad", range(move * 10, move * 10 + 10))
                stream = await client.admin.describe_stream("nomad")
                here = stream.assignments[0].broker_id
                request = coordinator_pb2.MoveStreamletRequest(stream="nomad", broker_id=3 - here)
                await client._cluster.ask(api.MOVE_STREAMLET, request)
            await numbered(client, "nomad", range(40, 50))
            await until(lambda: len(taken) == 50)
            await one.commit()
            await two.commit()
            described = await client.admin.describe_consumer_group("nomad-app")
            assert [entry.lag and entry.lag.records for entry in described.entries] == [0, 0]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(taken) == list(range(50))
        await client.admin.reset_consumer_group("nomad-app", "nomad", "earliest")
        described = await client.admin.describe_consumer_group("nomad-app")
        assert sum(entry.lag.records for entry in described.entries if entry.lag) == 50


async def test_a_plain_consumer_starts_at_the_committed_cursors_of_its_group(client: Client) -> None:
    await client.admin.create_stream("plain", streamlets=2)
    for streamlet in range(2):
        await numbered(client, "plain", range(streamlet * 10, streamlet * 10 + 3), streamlet)
    taken: list[bytes] = []
    for count in (4, 2):
        async with asyncio.timeout(TIMEOUT_S):
            async with client.consumer("plain", start="committed", consumer_group="plain-app") as consumer:
                async for record in consumer:
                    taken.append(record.value or b"")
                    count -= 1  # noqa: PLW2901 - this many are left
                    if not count:
                        break
                await consumer.commit()
    assert sorted(taken) == sorted(b"%d" % number for number in (0, 1, 2, 10, 11, 12))
    described = await client.admin.describe_consumer_group("plain-app")
    assert [entry.lag and entry.lag.records for entry in described.entries] == [0, 0]


@pytest.mark.slow
def test_the_command_line_consumes_lists_resets_and_deletes_a_group(cluster: RunningCluster) -> None:
    def kera(*arguments: str, stdin: bytes = b"") -> bytes:
        environment = {**os.environ, "KERA_BOOTSTRAP": cluster.bootstrap}
        argv = [sys.executable, "-m", "kera.cli", *arguments]
        return subprocess.run(argv, env=environment, input=stdin, capture_output=True, check=True, timeout=60).stdout

    kera("stream", "create", "typed-out")
    for text in (b"one\n", b"two\n", b"three\n"):  # a chunk each
        kera("produce", "typed-out", stdin=text)
    assert kera("consume", "typed-out", "--group", "desk", "--count", "2") == b"one\ntwo\n"
    assert kera("consume", "typed-out", "--group", "desk", "--count", "1") == b"three\n"
    (found,) = [each for each in json.loads(kera("group", "list", "--json")) if each["consumer_group"] == "desk"]
    assert (found["streams"], found["members"], found["expires_in_ms"]) == (["typed-out"], 0, None)
    assert 0 <= found["idle_ms"] < 60_000
    assert b"no group" not in kera("group", "delete", "--idle", "1ms", "--dry-run")
    described = json.loads(kera("group", "describe", "desk", "--json"))
    assert [entry["lag"]["records"] for entry in described["entries"]] == [0]
    kera("group", "reset", "desk", "typed-out", "--to", "earliest", "--yes")
    assert kera("consume", "typed-out", "--group", "desk", "--count", "3") == b"one\ntwo\nthree\n"
    kera("group", "delete", "desk", "--yes")
    assert b"desk" not in kera("group", "list")


@pytest.mark.slow
async def test_unused_unnamed_groups_expire_and_groups_in_use_stay() -> None:
    async with (
        LocalCluster(coordinator_settings={"unnamed_group_retention_ms": 400}) as cluster,
        await Client.connect(cluster.bootstrap) as client,
    ):
        await client.admin.create_stream("s")
        nowhere = {EntryId((await client.admin.describe_stream("s")).stream_id, 0, 0): EARLIEST}
        await client.commit("chosen", "s", nowhere)
        for name in ("dead", "quiet"):
            await client.commit(name, "s", nowhere, unnamed=True)
        names = {"chosen", "dead", "quiet"}
        async with asyncio.timeout(TIMEOUT_S):
            while "dead" in names:
                await client.commit("quiet", "s", nowhere, unnamed=True)  # it has read nothing, but it lives
                names = {each.consumer_group for each in await client.admin.consumer_groups()}
        assert names == {"chosen", "quiet"}


def test_an_interrupted_command_has_committed_the_printed_records(cluster: RunningCluster) -> None:
    environment = {**os.environ, "KERA_BOOTSTRAP": cluster.bootstrap}
    argv = [sys.executable, "-m", "kera.cli"]
    subprocess.run([*argv, "stream", "create", "stopped"], env=environment, check=True, timeout=60)
    for text in (b"one\n", b"two\n", b"three\n"):
        subprocess.run([*argv, "produce", "stopped"], env=environment, input=text, check=True, timeout=60)
        consume = [*argv, "consume", "stopped", "--group", "desk"]
        with subprocess.Popen(consume, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == text, "and nothing that was printed before"
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == b""
            assert process.wait(timeout=60) == 130


async def test_a_consumer_group_is_reset_to_record_offsets_and_by_shifts(client: Client) -> None:
    """The reset goes to the chunk that has the record: it skips only records that it was asked to skip."""
    await client.admin.create_stream("by-record", streamlets=2)
    for first in range(0, 40, 10):
        await fill(client, "by-record", *(b"%d" % number for number in range(first, first + 10)), streamlet=0)
    await fill(client, "by-record", *(b"%d" % number for number in range(100, 105)), streamlet=1)
    admin = client.admin

    async def offsets(to: ResetTo, streamlets: list[int] | None = None) -> list[tuple[int, int | None, int]]:
        """By streamlet, the old offset and the new offset, which the group then has."""
        plan = await admin.plan_reset("by-record", "by-record", to, streamlets=streamlets)
        await admin.reset_consumer_group("by-record", "by-record", plan, streamlets=streamlets)
        return [(change.streamlet, change.old_offset, change.new_offset) for change in plan.changes]

    with pytest.raises(InvalidArgument, match="has no cursor to shift in streamlet 0"):
        await admin.plan_reset("by-record", "by-record", ShiftBy(-1))
    assert await offsets(ToOffset(25)) == [(0, None, 20), (1, None, 5)]
    assert await offsets(ShiftBy(-10), [0]) == [(0, 20, 10)]
    assert await offsets(ShiftBy(-3), [0]) == [(0, 10, 0)], "in the middle of the first chunk"
    assert await offsets(ShiftBy(39), [0]) == [(0, 0, 30)]
    back = await admin.plan_reset("by-record", "by-record", ToOffset(12))
    assert [(change.records_again, change.records_skipped) for change in back.changes] == [(20, 0), (0, 0)]
    assert [change.note for change in back.changes] == ["", "offset 12 is beyond the end, 5"]
    await admin.reset_consumer_group("by-record", "by-record", back)
    async with client.group_consumer("by-record", "by-record") as consumer:
        assert await take(consumer, 30) == list(range(10, 40))
        await consumer.commit()
    assert await offsets(ShiftBy(-1)) == [(0, 40, 30), (1, 5, 0)]
    assert await offsets("earliest") == [(0, 30, 0), (1, 0, 0)]
    forward = await admin.plan_reset("by-record", "by-record", "latest")
    assert (forward.records_again, forward.records_skipped) == (0, 45)
    with pytest.raises(StreamletOutOfRange):
        await admin.plan_reset("by-record", "by-record", "latest", streamlets=[2])
    with pytest.raises(InvalidArgument, match="not for 'other'"):
        await admin.reset_consumer_group("other", "by-record", forward)
