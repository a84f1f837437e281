"""Consumers on the broker's host: pushed through shared memory, against pulled through its sockets.

* ``read``: the stream is in the broker's memory, and nobody writes. 1 to 8 consumers, each a process, read all of it at
  the same time: GB handed over per second, and per processor second of broker and consumers together. ``read again``
  is the same for consumers that have read it before: they have the broker's memory in their page tables.
* ``write``: producers send as fast as they can while so many consumers follow, each of them everything: what producers
  reach, and what consumers do. Producers alone are the third side.
* ``latency``: records one by one at a fixed rate; from the creation of a chunk at its producer to the moment when a
  consumer has it. On a machine that is idle otherwise, and while another stream is written and read at full speed.
  With it, for comparison, how long producers wait for their acknowledgement: the way to the broker and back.

Sides alternate in each round; a round has a stream of its own. Values are of 100 bytes, batches fill chunks, checksums
are verified by broker and consumers (``--no-verify``: not by consumers). Each consumer opens each chunk as an Arrow
batch and counts its rows; it does not look at values.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import Broker, Figures, alternating, broker, directory, parser, say, size
from bench.cpu import run_s
from kera.cli.bench._latency import Latencies
from kera.cli.bench._processes import Worker, workers
from kera.cli.bench._worker import WARM_UP_BYTES, Result, Task
from kera.client import Client
from kera.core.base.settings import KIB, MIB

PARTS = ("read", "write", "latency")
SIDES = {"pushed": "always", "pulled": "never"}
SEGMENT_BYTES = 8 * MIB
RECORD_BYTES = 100
STORED_SHARE = 1.3
"""Maximum size of a round in the broker's memory for each byte of its values."""


@dataclasses.dataclass
class Round:
    """The figures of one round."""

    produced: list[Result]
    consumed: list[Result]
    broker_s: float
    """Processor time of the broker."""

    @property
    def produced_mb_per_s(self) -> float:
        """All producers together."""
        return _rate(self.produced) / 1e6

    @property
    def through_mb_per_s(self) -> float:
        """The same until the last consumer has everything: who falls behind leaves producers more of the machine."""
        begun_ns, ended_ns = min(each.start_ns for each in self.produced), max(each.end_ns for each in self.consumed)
        return sum(each.record_bytes for each in self.produced) / 1e6 / ((ended_ns - begun_ns) / 1e9)

    @property
    def consumed_gb_per_s(self) -> float:
        """All consumers together."""
        return _rate(self.consumed) / 1e9

    @property
    def gb_per_core_s(self) -> float:
        """GB that consumers got for each second of a core that they and the broker took."""
        return sum(each.record_bytes for each in self.consumed) / 1e9 / (self.broker_s + self.consumers_s)

    @property
    def consumers_s(self) -> float:
        """Processor time of all consumers."""
        return sum(each.cpu_s for each in self.consumed)


def _rate(results: Sequence[Result]) -> float:
    begun_ns, ended_ns = min(each.start_ns for each in results), max(each.end_ns for each in results)
    return sum(each.record_bytes for each in results) / ((ended_ns - begun_ns) / 1e9)


class Bench:
    """Rounds with one broker."""

    def __init__(self, arguments: argparse.Namespace, figures: Figures, made: Broker, client: Client) -> None:
        self._arguments = arguments
        self._figures = figures
        self._broker = made
        self._client = client
        self._names = map("round-{}".format, itertools.count())

    # -- parts ---------------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Measure reading from memory, without writers."""
        async with self._streams(1) as streams:
            producer = self._producer(streams, records=self._records)
            async with workers([producer]) as (filling,):
                await filling.ready()
                filling.go()
                await filling.result()
            for side, consumers in self._sides(SIDES):
                # Whoever warms up by reading the same stream has the broker's memory in its page tables.
                for name, known in (("read", streams), ("read again", streams[:1])):
                    async with workers([self._consumer(known, side)] * consumers) as readers:
                        await asyncio.gather(*(each.ready() for each in readers))
                        done = await self._measured([], readers, total=self._records)
                    self._add(f"{name}, {consumers} {side}", done)

    async def write(self) -> None:
        """Producers as fast as they can, and consumers behind them."""
        for side, consumers in self._sides([*SIDES, "alone"]):
            if side == "alone" and consumers != self._arguments.consumers[0]:
                continue
            async with self._streams(1) as streams:
                tasks = [
                    self._producer(streams, self._records // self._arguments.producers)
                ] * self._arguments.producers
                followers = [] if side == "alone" else [self._consumer(streams, side)] * consumers
                async with workers(tasks) as producers, workers(followers) as readers:
                    for group in (producers, readers):  # the consumers' warm-up reads what producers sent in theirs
                        await asyncio.gather(*(each.ready() for each in group))
                    done = await self._measured(producers, readers)
                if side == "alone":
                    self._figures.add("write, producers alone: produced", done.produced_mb_per_s, "MB/s")
                else:
                    self._add(f"write, {consumers} {side}", done)

    async def latency(self) -> None:
        """Records at a fixed rate, beside nothing and beside a load."""
        for loaded in (False, True):
            found: dict[tuple[str, int], tuple[Latencies, Latencies]] = {}
            where = "beside a load" if loaded else "idle machine"
            rounds = self._sides(SIDES)
            for number, (side, consumers) in enumerate(rounds, 1):
                # Each takes its seconds and about as many to start: minutes in all, in which it should not look stuck.
                say(f"latency, {where}: round {number} of {len(rounds)}, {consumers} {side}")
                acknowledged, arrived = found.setdefault((side, consumers), (Latencies(), Latencies()))
                async with self._streams(2) as streams, contextlib.AsyncExitStack() as stack:
                    steady = dataclasses.replace(
                        self._producer(streams, sys.maxsize),
                        mode="send",
                        rate=self._arguments.rate,
                        seconds=self._arguments.seconds,
                    )
                    producers = await stack.enter_async_context(workers([steady]))
                    readers = await stack.enter_async_context(workers([self._consumer(streams, side)] * consumers))
                    beside: list[Worker] = []
                    if loaded:
                        load = [
                            dataclasses.replace(
                                self._producer(streams[1:], sys.maxsize), rate=self._arguments.load_rate
                            ),
                            self._consumer(streams[1:], side),
                        ]
                        load[0].seconds = self._arguments.seconds + 2
                        beside = await stack.enter_async_context(workers(load))
                    for group in (producers + beside[:1], readers + beside[1:]):
                        await asyncio.gather(*(each.ready() for each in group))
                    for each in reversed(beside):
                        each.go()
                    done = await self._measured(producers, readers)
                    acknowledged.add_encoded(*(each.latencies for each in done.produced))
                    arrived.add_encoded(*(each.latencies for each in done.consumed))
                    if beside:
                        sent = await beside[0].result()
                        beside[1].tell_total(sent.records)
                        await beside[1].result()
            for (side, consumers), times in found.items():
                for what, of in zip(("acknowledged", "arrived"), times, strict=True):
                    for name, value_us in (of.summary() or {}).items():
                        if name != "samples":
                            self._figures.add(f"{where}, {consumers} {side}: {what}, {name}", value_us / 1e3, "ms")

    # -- rounds --------------------------------------------------------------------------------------------------

    @property
    def _records(self) -> int:
        return int(self._arguments.bytes) // RECORD_BYTES

    def _sides(self, sides: Sequence[str] | dict[str, str]) -> list[tuple[str, int]]:
        """All sides and numbers of consumers, each as often as there are rounds."""
        numbers: list[int] = self._arguments.consumers
        pairs = [f"{side} {number}" for number in numbers for side in sides]
        found = []
        for pair in alternating(pairs, self._arguments.rounds):
            side, _, number = pair.partition(" ")
            found.append((side, int(number)))
        return found

    @contextlib.asynccontextmanager
    async def _streams(self, count: int) -> AsyncIterator[list[str]]:
        """New ones to measure, and as the last one another to warm up."""
        names = [next(self._names) for _ in range(count + 1)]
        for name in names:
            await self._client.admin.create_stream(
                name, streamlets=self._arguments.streamlets, replication=self._arguments.replication
            )
        try:
            yield names
        finally:
            for name in names:
                await self._client.admin.delete_stream(name)
            await self._broker.until(lambda metrics: metrics["arena_slots_leased"] == 0)

    def _producer(self, streams: Sequence[str], records: int) -> Task:
        chunk_bytes = self._arguments.chunk_bytes
        return Task(
            role="produce",
            mode="send_batch",
            records=records,
            chunk_bytes=chunk_bytes,
            producer_settings={"chunk_bytes_max": chunk_bytes, "buffer_bytes_max": 16 * MIB},
            **self._shared(streams),
        )

    def _consumer(self, streams: Sequence[str], side: str) -> Task:
        settings = {
            "shared_memory": SIDES[side],
            "verify_checksums": self._arguments.verify,
            "validate_chunks": self._arguments.verify,
        }
        return Task(role="consume", mode="batches", consumer_settings=settings, **self._shared(streams))

    def _shared(self, streams: Sequence[str]) -> dict[str, Any]:
        return {
            "bootstrap": self._broker.cluster.bootstrap,
            "stream": streams[0],
            "warm_up_stream": streams[-1],
            "record_bytes": RECORD_BYTES,
            "transport": self._arguments.transport,
        }

    async def _measured(
        self, producers: Sequence[Worker], readers: Sequence[Worker], total: int | None = None
    ) -> Round:
        """Let them go, and wait for them. `total`: how many records there are already."""
        before_s = run_s(self._broker.pid)
        for each in (*readers, *producers):
            each.go()
        produced = list(await asyncio.gather(*(each.result() for each in producers)))
        for each in readers:
            each.tell_total(sum(result.records for result in produced) if total is None else total)
        consumed = list(await asyncio.gather(*(each.result() for each in readers)))
        return Round(produced, consumed, run_s(self._broker.pid) - before_s)

    def _add(self, name: str, done: Round) -> None:
        add = self._figures.add
        size_gb = sum(each.record_bytes for each in done.consumed) / 1e9
        if done.produced:
            add(f"{name}: produced", done.produced_mb_per_s, "MB/s")
            add(f"{name}: produced and with all consumers", done.through_mb_per_s, "MB/s")
        add(f"{name}: handed over", done.consumed_gb_per_s, "GB/s")
        add(f"{name}: broker's CPU", done.broker_s / size_gb, "s/GB handed over")
        add(f"{name}: consumers' CPU", done.consumers_s / size_gb, "s/GB handed over")
        if not done.produced:
            add(f"{name}: handed over per core", done.gb_per_core_s, "GB/s")


def table(arguments: argparse.Namespace, figures: Figures) -> None:
    """Sides side by side."""
    print("\n| consumers | figure | pushed | pulled | pushed / pulled |\n|---|---|---|---|---|")
    for number in arguments.consumers:
        for name in figures.names:
            before, found, after = name.partition(f", {number} pushed: ")
            if found:
                pushed, pulled = figures.median(name), figures.median(f"{before}, {number} pulled: {after}")
                ratio = f"{pushed / pulled:.2f}" if pulled else ""
                print(f"| {number} | {before}: {after}, {figures.unit(name)} | {pushed:.3g} | {pulled:.3g} | {ratio} |")


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """All parts that are wanted."""
    figures = Figures("locality", arguments, root)
    rounds_bytes = int(arguments.bytes * STORED_SHARE)
    if "latency" in arguments.parts:
        load_bytes = (arguments.load_rate or 10_000_000) * RECORD_BYTES * (arguments.seconds + 2) * STORED_SHARE
        rounds_bytes = max(rounds_bytes, int(load_bytes + arguments.rate * KIB * arguments.seconds))
    arena_bytes = rounds_bytes + 2 * arguments.producers * WARM_UP_BYTES + 16 * SEGMENT_BYTES * arguments.streamlets
    async with (
        broker(
            None,
            arena_bytes=arena_bytes // SEGMENT_BYTES * SEGMENT_BYTES,
            segment_bytes=SEGMENT_BYTES,
            backups=arguments.replication,
        ) as made,
        await Client.connect(made.cluster.bootstrap) as client,
    ):
        bench = Bench(arguments, figures, made, client)
        for part in arguments.parts:
            say(part)
            await getattr(bench, part)()
    figures.print()
    table(arguments, figures)


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--consumers", type=int, nargs="+", default=[1, 2, 4, 8])
    made.add_argument("--producers", type=int, default=1)
    made.add_argument("--bytes", type=size, default=10**9, help="of the values of a round of read or write")
    made.add_argument("--chunk-bytes", type=size, default=256 * KIB)
    made.add_argument("--streamlets", type=int, default=2)
    made.add_argument("--replication", type=int, default=0, help="R; so many backups are started")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--rate", type=int, default=1000, help="records per second of latency")
    made.add_argument("--seconds", type=float, default=5.0, help="how long a round of latency measures")
    made.add_argument("--load-rate", type=int, default=3_000_000, help="records per second of the load beside it")
    made.add_argument("--transport", choices=("auto", "unix", "tcp"), default="auto")
    made.add_argument(
        "--no-verify", dest="verify", action="store_false", help="consumers check neither checksums nor payloads"
    )
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
