"""The cost of a record for the SDK, one by one, with and without the native core: ``python -m bench.record_cost``.

`send`: the call; and all its work up to the frame for the transport, and from the answer on, with a call of `drain` for
every hundred records. `records()`: from the message about a chunk in the broker's memory to the loop of the caller,
checksums included. Records have 100 bytes, chunks up to 256 KiB; no broker, and no socket. Each core runs in processes
of its own, in turns; the least counts.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from bench.native_cost import beside
from bench.producer_cost import answer
from bench.stages.around import Cluster, batch_of, until_sent
from bench.stages.consuming import Pushes
from bench.stages.part import RECORD_BYTES, Samples, now_ns, since
from kera.cli.bench._payload import make_value
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings

ROUNDS = 40
TOGETHER = 100
"""Records between two calls of `drain`."""
KEYS = [b"key-%d" % number for number in range(TOGETHER)]
CHUNK = Pushes.RECORDS_LOAD


class Kind(NamedTuple):
    """Records of one kind."""

    keyed: bool = False
    streamlets: int = 1

    def __str__(self) -> str:
        return ("with a key" if self.keyed else "a value") + (f", {self.streamlets} streamlets" * (self.streamlets > 1))


KINDS = [Kind(), Kind(keyed=True), Kind(keyed=True, streamlets=16)]


async def measure_send(kind: Kind) -> tuple[float, float]:
    """Nanoseconds of a record: of the call alone, and of all its work."""
    cluster: Any = Cluster(streamlets=kind.streamlets)
    value, rounds = make_value(RECORD_BYTES), 10 * batch_of(CHUNK.chunk_bytes).num_rows // TOGETHER
    calls: list[float] = []
    everything: list[float] = []
    async with Producer(cluster, ProducerSettings(linger_ms=1000)) as producer:
        await producer.prepare("s")
        send = producer.send
        for _ in range(ROUNDS):
            called_ns = other_ns = 0
            for _ in range(rounds):
                begun_ns = now_ns()
                if kind.keyed:
                    for key in KEYS:
                        send("s", value, keys=key)
                else:
                    for _ in range(TOGETHER):
                        send("s", value)
                called_ns += since(begun_ns)
                begun_ns = now_ns()
                await producer.drain()
                other_ns += since(begun_ns)
                while cluster.wire.sent:
                    other_ns += (await answer(cluster))[1]
            begun_ns = now_ns()
            flushing = asyncio.create_task(producer.flush())
            await until_sent(cluster.wire)
            other_ns += since(begun_ns)
            while not flushing.done():
                while cluster.wire.sent:
                    other_ns += (await answer(cluster))[1]
                begun_ns = now_ns()
                await asyncio.sleep(0)
                other_ns += since(begun_ns)
            calls.append(called_ns / rounds / TOGETHER)
            everything.append((called_ns + other_ns) / rounds / TOGETHER)
    cluster.close()
    return min(calls), min(everything)


async def measure() -> dict[str, float]:
    """Nanoseconds of each kind, with the core of this process."""
    found: dict[str, float] = {}
    for kind in KINDS:
        call_ns, all_ns = await measure_send(kind)
        found |= {f"`send`, {kind}: the call": call_ns, f"`send`, {kind}: all": all_ns}
    samples = Samples()
    for _ in range(3):
        await Pushes([CHUNK], verify=True).rounds(CHUNK, samples)
    return found | {"`records()`": min(samples.records["records()"])}


def table(python: dict[str, float], fast: dict[str, float]) -> str:
    """Both cores beside each other, in Markdown."""
    rows = ["| a record | Python, ns | native, ns | native, millions a second | |", "|---|--:|--:|--:|--:|"]
    rows += [
        f"| {name} | {python[name]:,.0f} | {fast[name]:,.0f} | {1000 / fast[name]:.1f} |"
        f" {python[name] / fast[name]:.1f}× |"
        for name in fast
    ]
    return "\n".join(rows)


def main() -> None:
    """Measure as the command line says."""
    beside("bench.record_cost", lambda: asyncio.run(measure()), table, "Measure what a record costs the SDK.")


if __name__ == "__main__":
    main()
