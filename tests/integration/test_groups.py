"""Consumers of a consumer group, each a process: they share a stream, and continue when one of them is lost or
stuck.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pytest

from kera.client import Client, Producer
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster
from tests.integration.control_support import broker_name, connect, control_cluster, now_us, until_recovered
from tests.integration.support import TIMEOUT_S, until

STREAM = "shared"
CONSUMER_GROUP = "app"
STREAMLETS, ENTRIES = 2, 4
RECORD = bytes(2 * KIB)
SHARE_TOLERANCE = 0.5
"""Consumers are not equally fast on a busy machine."""

Record = tuple[int, int, int]
"""Streamlet, entry, ordinal."""


class Worker:
    """A consumer in a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.ready = False
        self.taken = Counter[Record]()
        self.uncommitted: set[Record] = set()
        """Records that it has taken and not reported as committed."""
        self._committing: set[Record] = set()
        self.leases_lost = 0
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, bootstrap: str, **settings: Any) -> Self:
        task = {
            "bootstrap": bootstrap,
            "consumer_group": CONSUMER_GROUP,
            "stream": STREAM,
            "settings": {"heartbeat_interval_ms": 200, **settings},
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.group_worker", json.dumps(task)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
            cwd=Path(__file__).resolve().parents[2],
        )
        return cls(process)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            event = json.loads(line)
            if "taken" in event:
                streamlet, entry, first, count = event["taken"]
                records = {(streamlet, entry, first + at) for at in range(count)}
                self.taken.update(records)
                self.uncommitted |= records
            elif "committing" in event:
                self._committing = set(self.uncommitted)
            elif "committed" in event:
                self.uncommitted -= self._committing
            elif "lost" in event:
                self.leases_lost += 1
            self.ready = self.ready or "ready" in event

    @property
    def count(self) -> int:
        """The number of records."""
        return self.taken.total()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill as a crash would; its earlier events are still read."""
        self._process.kill()
        await self._listening
        await self._process.wait()

    async def stop(self) -> None:
        """Let the worker leave."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            async with asyncio.timeout(TIMEOUT_S):
                await self._listening
                assert await self._process.wait() == 0

    def abandon(self) -> None:
        """Leave nothing of it behind, whatever happened."""
        if self._process.returncode is None:
            self._process.kill()
        self._listening.cancel()


@contextlib.asynccontextmanager
async def workers(bootstrap: str, count: int, **settings: Any) -> AsyncIterator[list[Worker]]:
    """Workers that are ready."""
    started = await asyncio.gather(*(Worker.start(bootstrap, **settings) for _ in range(count)))
    try:
        await until(lambda: all(each.ready for each in started), TIMEOUT_S)
        yield list(started)
    finally:
        for each in started:
            each.abandon()


class Feed:
    """Writes to all entries of all streamlets all the time: every fourth producer writes to the same entry."""

    def __init__(self, producers: Sequence[Producer], pause_s: float) -> None:
        self._producers = producers
        self._pause_s = pause_s
        self.stopping = False

    async def run(self) -> None:
        batch = pa.record_batch({"value": [RECORD] * 8})
        while not self.stopping:
            for producer in self._producers:
                for streamlet in range(STREAMLETS):
                    await producer.send_batch(STREAM, batch, streamlet=streamlet)
            await asyncio.sleep(self._pause_s)
        for producer in self._producers:
            await producer.flush()


@contextlib.asynccontextmanager
async def feeding(client: Client, pause_s: float = 0.05) -> AsyncIterator[Feed]:
    """A feed in the background."""
    async with contextlib.AsyncExitStack() as stack:
        producers = [await stack.enter_async_context(client.producer()) for _ in range(2 * ENTRIES)]
        feed = Feed(producers, pause_s)
        task = asyncio.create_task(feed.run())
        try:
            yield feed
            feed.stopping = True
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])


async def all_records(client: Client) -> Counter[Record]:
    """All records of the stream."""
    found = Counter[Record]()
    for streamlet, entries in (await client.bounds(STREAM)).items():
        for entry, bounds in enumerate(entries):
            found.update((streamlet, entry, ordinal) for ordinal in range(bounds.next_record))
    return found


def together(group: Sequence[Worker]) -> Counter[Record]:
    """The records that all of them have taken."""
    return sum((each.taken for each in group), Counter[Record]())


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[LocalCluster, Client]]:
    """A cluster with the stream."""
    running = LocalCluster(brokers=1, arena_bytes=256 * MIB, segment_bytes=128 * KIB)
    async with running, await Client.connect(running.bootstrap) as client:
        await client.admin.create_stream(STREAM, streamlets=STREAMLETS, entries=ENTRIES, group_segments=1)
        yield running, client


@pytest.mark.slow
async def test_six_consumers_share_all_entries_and_redo_only_the_uncommitted_work_of_a_killed_one() -> None:
    async with cluster() as (running, client), workers(running.bootstrap, 6, session_timeout_ms=1_500) as group:
        async with feeding(client):
            await until(lambda: all(each.count for each in group), TIMEOUT_S)
            before = [each.count for each in group]
            enough = sum(before) + 6_000
            await until(lambda: sum(each.count for each in group) >= enough, TIMEOUT_S)
            shares = [each.count - count for each, count in zip(group, before, strict=True)]
            mean = sum(shares) / len(shares)
            assert all(abs(share - mean) <= SHARE_TOLERANCE * mean for share in shares), shares

            killed = group[2]
            await killed.kill()
            entries = {(streamlet, entry) for streamlet in range(STREAMLETS) for entry in range(ENTRIES)}
            counts = [each.count for each in group]
            await until(
                lambda: all(each.count > count for each, count in zip(group, counts, strict=True) if each is not killed)
            )
        everything = await all_records(client)
        assert {record[:2] for record in everything} == entries, "every entry was written to"
        await until(lambda: together(group).keys() >= everything.keys(), TIMEOUT_S)
        for each in group:
            if each is not killed:
                await each.stop()
        again = together(group) - everything
        assert again.keys() <= killed.uncommitted
        assert max(again.values(), default=1) == 1, "no more than once again"
        assert not any(each.leases_lost for each in group)


@pytest.mark.slow
async def test_a_consumer_that_sleeps_too_long_loses_its_groups_and_only_they_are_read_again() -> None:
    async with cluster() as (running, client), workers(running.bootstrap, 3, session_timeout_ms=1_000) as group:
        async with feeding(client):
            await until(lambda: all(each.count > 100 for each in group), TIMEOUT_S)
            asleep, *others = group
            asleep.signal(signal.SIGSTOP)
            try:
                held = asleep.count
                describe = client.admin.describe_consumer_group
                async with asyncio.timeout(TIMEOUT_S):
                    while len((await describe(CONSUMER_GROUP)).members) > len(others):
                        await asyncio.sleep(0.05)
                counts = [each.count for each in others]
                await until(lambda: all(each.count > count for each, count in zip(others, counts, strict=True)))
            finally:
                asleep.signal(signal.SIGCONT)
            await until(lambda: asleep.count > held + 100, TIMEOUT_S)  # it has joined again
        everything = await all_records(client)
        await until(lambda: together(group).keys() >= everything.keys(), TIMEOUT_S)
        for each in group:
            await each.stop()
        again = together(group) - everything
        assert set(again.values()) <= {1}
        assert again.keys() <= asleep.taken.keys(), "only what it had taken, and others had to do again"
        assert asleep.leases_lost


@pytest.mark.slow
async def test_consumers_continue_after_a_broker_recovery_and_a_coordinator_restart(
    tmp_path: Path,
) -> None:
    """Each consumer keeps its groups: no record is skipped, and as no consumer dies, no record is read twice."""
    async with control_cluster(tmp_path) as running, await connect(running) as client:
        await client.admin.create_stream(
            STREAM, streamlets=STREAMLETS, entries=ENTRIES, group_segments=1, replication=2, durability="replicated"
        )
        async with workers(running.bootstrap, 3) as group:
            async with feeding(client):
                await until(lambda: all(each.count > 100 for each in group), TIMEOUT_S)
                begun_us = now_us()
                owner_id = (await client.admin.describe_stream(STREAM)).assignments[0].broker_id
                await running.kill(broker_name(running, owner_id))
                await until_recovered(client, [owner_id], begun_us)
                await running.kill("coordinator")
                await running.restart("coordinator")
                counts = [each.count for each in group]
                await until(
                    lambda: all(each.count > count + 100 for each, count in zip(group, counts, strict=True)), TIMEOUT_S
                )
            everything = await all_records(client)
            await until(lambda: together(group).keys() >= everything.keys(), TIMEOUT_S)
            for each in group:
                await each.stop()
        assert together(group) == everything
        assert not any(each.leases_lost for each in group)
