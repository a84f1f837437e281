"""Kill a broker again and again under load, and look at what is there: ``make chaos-kill ROUNDS=200``.

Idempotent producers write all the time, one to a stream of each durability, and readers follow. A round waits for a
random number of acknowledgements, kills the broker at a random moment, and starts it again. With ``--lose-memory`` its
arena is deleted as often, as when the host crashes; then there is no stream of durability ``leader``, which may lose.

Promised, and checked: after each restart all that was acknowledged is there; followers see every record once, in order,
with all its bytes; at the end, so does a reader from the start, and each record has the ordinal that was acknowledged.
With the same seed the broker is killed at the same moments, as far as a scheduler lets it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kera.client import Client
from kera.core.settings import KIB, MIB
from kera.core.telemetry import configure_logging
from kera.local.cluster import RunningCluster
from tests.integration.support import (
    BROKER,
    Follower,
    Load,
    keeping_cluster,
    load,
    lose_host,
    metric,
    read,
    tell,
    until,
)

STREAMLETS = 2
ROUND_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 24 * 3600.0
ROUNDS_PER_LINE = 10
PAUSE_S = 0.01


class Wrong(Exception):
    """A promise was broken."""


class Watched:
    """A stream, its load and its follower."""

    def __init__(self, client: Client, load_: Load, follower: Follower) -> None:
        self._client = client
        self.load = load_
        self.follower = follower

    async def check_restart(self, acknowledged: int) -> None:
        """What was acknowledged before the broker died is there."""
        bounds = await self._client.bounds(self.load.stream)
        stored = sum(entry.next_record for entries in bounds.values() for entry in entries)
        if stored < acknowledged:
            raise Wrong(f"{self.load.stream}: {acknowledged} records were acknowledged, {stored} are there")

    def check_follower(self) -> None:
        """It has seen no record twice, and none out of order."""
        if self.follower.error is not None:
            raise Wrong(f"{self.load.stream}: the follower was told {self.follower.error.message}")
        for streamlet, seen in self.follower.seen.items():
            wanted = range(streamlet, streamlet + STREAMLETS * len(seen), STREAMLETS)
            if (
                at := next((at for at, (a, b) in enumerate(zip(seen, wanted, strict=True)) if a != b), None)
            ) is not None:
                raise Wrong(f"{self.load.stream}/{streamlet}: record {seen[at]} came where {wanted[at]} was due")

    async def check_end(self) -> None:
        """All that was sent is there, once, where it was acknowledged to be."""
        sent, name = self.load.sent, self.load.stream
        with contextlib.suppress(TimeoutError):
            await until(lambda: sum(map(len, self.follower.seen.values())) >= sent, ROUND_TIMEOUT_S)
        self.check_follower()
        stored = await read(self._client, name, STREAMLETS, timeout_s=RUN_TIMEOUT_S)
        for streamlet in range(STREAMLETS):
            delivered = self.load.of(streamlet)
            numbers = list(range(streamlet, sent, STREAMLETS))
            if not numbers == [number for number, _ in delivered] == stored[streamlet]:
                raise Wrong(f"{name}/{streamlet}: {len(numbers)} sent, {len(stored[streamlet])} there")
            if self.follower.seen[streamlet] != numbers:
                raise Wrong(f"{name}/{streamlet}: {len(numbers)} sent, {len(self.follower.seen[streamlet])} followed")
            # The answer to a repeat of a chunk that is on disk only names no place.
            places = [
                (each.record, ordinal) for ordinal, (_, each) in enumerate(delivered) if each.position is not None
            ]
            if any(record != ordinal for record, ordinal in places):
                raise Wrong(f"{name}/{streamlet}: records were acknowledged with other ordinals")


async def run(arguments: argparse.Namespace, cluster: RunningCluster) -> None:
    """All rounds, and the end."""
    moments = random.Random(arguments.seed)
    durabilities = ["persisted"] if arguments.lose_memory else ["leader", "persisted"]
    lost = 0
    begun_s = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(await Client.connect(cluster.bootstrap))
        watched = []
        followers = await stack.enter_async_context(asyncio.TaskGroup())
        for name in durabilities:
            await client.admin.create_stream(name, streamlets=STREAMLETS, group_segments=2, durability=name)
            producer = await stack.enter_async_context(client.producer(chunk_bytes_max=4 * KIB))
            await producer.prepare(name)
            consumer = await stack.enter_async_context(client.consumer(name, start="earliest", fetch_wait_ms=50))
            follower = Follower(consumer, STREAMLETS)
            following = followers.create_task(follower.run())
            stack.callback(following.cancel)
            running = load(producer, name, STREAMLETS, timeout_s=RUN_TIMEOUT_S, pause_s=PAUSE_S)
            watched.append(Watched(client, await stack.enter_async_context(running), follower))
        for number in range(1, arguments.rounds + 1):
            for each in watched:
                wanted = len(each.load.deliveries) + moments.randrange(1, 1000)
                await until(lambda each=each, wanted=wanted: len(each.load.deliveries) >= wanted, ROUND_TIMEOUT_S)  # type: ignore[misc]
            await asyncio.sleep(moments.random() * 0.05)  # sleep: a moment is what is wanted
            if moments.random() < arguments.lose_memory:
                lost += 1
                await asyncio.to_thread(lose_host, cluster)
            else:
                await asyncio.to_thread(cluster.kill, BROKER)
            acknowledged = [len(each.load.deliveries) for each in watched]
            await asyncio.to_thread(cluster.restart, BROKER)
            for each, count in zip(watched, acknowledged, strict=True):
                await each.check_restart(count)
                each.check_follower()
            if number % ROUNDS_PER_LINE == 0 or number == arguments.rounds:
                records = ", ".join(f"{each.load.stream} {len(each.load.deliveries):,}" for each in watched)
                print(
                    f"round {number}: {time.monotonic() - begun_s:.0f} s; acknowledged: {records}; memory lost"
                    f" {lost} times; last found in memory: {metric(cluster, 'start_segments_in_memory')} segments",
                    flush=True,
                )
        for each in watched:
            each.load.stopping = True
        for each in watched:
            await until(lambda each=each: len(each.load.deliveries) == each.load.sent, ROUND_TIMEOUT_S)  # type: ignore[misc]
            await each.check_end()


def main() -> int:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the moments; printed")
    parser.add_argument("--lose-memory", type=float, default=0.0, metavar="P", help="how often, from 0 to 1")
    parser.add_argument("--arena-bytes", type=int, default=32 * MIB)
    arguments = parser.parse_args()
    configure_logging("error", daemon="chaos")  # that clients try again is what is wanted
    print(f"{arguments.rounds} rounds, seed {arguments.seed}, memory lost with {arguments.lose_memory:g}", flush=True)
    failures: list[Exception] = []
    with tempfile.TemporaryDirectory(prefix="kera-chaos-") as directory:
        try:
            with keeping_cluster(Path(directory), arena_bytes=arguments.arena_bytes) as cluster:
                try:
                    asyncio.run(run(arguments, cluster))
                except BaseException:
                    tell(cluster)
                    raise
        except* Exception as errors:  # noqa: BLE001 - whatever it is, it is the verdict
            failures = list(leaves(errors))
    for failure in failures:
        print(f"FAILED: {failure!r}")
    if failures:
        repeat = f"--seed {arguments.seed} --lose-memory {arguments.lose_memory:g}"
        print(f"again: make chaos-kill ROUNDS={arguments.rounds} CHAOS_ARGS='{repeat}'")
        return 1
    print("PASSED: every acknowledged record is there, once, in order")
    return 0


def leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    """The errors in a group, and in the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main())
