"""How long a broker takes to start with a long history, and what history and idle streams cost in memory.

The index of ``--segments`` closed segments is written directly; there are no files behind it, as a start does not look
at any. Compared with a broker with an empty index: after a clean stop, and after kill -9 (then a process of its own
copies the index first). Each segment is a group of its own, so that memory per group is that per segment.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from bench.common import BROKER, Broker, Figures, alternating, broker, directory, parser, say
from kera.broker.records import EntryRecord, SegmentAddress, SegmentRecord
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import put_entry, put_segment
from kera.client import Client
from kera.core.base.ids import EntryId, Position
from kera.core.base.settings import KIB, MIB

LENGTH = 64 * KIB
PER_COMMIT = 10_000
STREAMS_AT_ONCE = 16


def write_history(index_path: Path, stream_id: int, segments: int) -> None:
    """Write closed segments of one stream, a group each, as if they had been flushed before a clean stop."""
    index = SegmentIndex.open(index_path, durable=False)
    for first in range(1, segments + 1, PER_COMMIT):
        index.commit(
            put_segment(
                SegmentAddress(stream_id, 0, 0, group_id, 1),
                SegmentRecord(group_id, LENGTH, False, 4, 1, (group_id - 1) * 64, 64, 1, 1, 1),  # noqa: FBT003 - a field
            )
            for group_id in range(first, min(first + PER_COMMIT, segments + 1))
        )
    entry = EntryRecord(Position(1, 1, 0), 0, segments * 64, segments * LENGTH, segments, segments, 1)
    meta = dict(index.meta(), next_physical_id=segments + 1, first_unsettled_id=segments + 1)
    index.commit([put_entry(EntryId(stream_id, 0, 0), entry)], meta)
    index.close(clean=True)


async def start_seconds(made: Broker, *, kill: bool) -> float:
    """Seconds from the start of the process until it serves. Loading Python is included, as for the empty broker."""
    child = made.cluster._child(BROKER)
    if kill:
        await child.kill()
    else:
        await child.stop(grace_s=60)
    begun_s = time.monotonic()
    await made.cluster.restart(BROKER)
    return time.monotonic() - begun_s


async def resident(made: Broker) -> int:
    """Memory of the process without the arena."""
    found = made.memory()
    return found["anon"] + found["file"]


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Measure both brokers, side by side."""
    figures = Figures("log_start", arguments, root)
    sizes = {"arena_bytes": 16 * MIB, "segment_bytes": 64 * KIB}
    long, empty = f"{arguments.segments:,} segments", "empty"
    async with broker(root / "long", **sizes) as with_history, broker(root / "empty", **sizes) as without:
        brokers = {long: with_history, empty: without}
        async with await Client.connect(with_history.cluster.bootstrap) as client:
            stream = await client.admin.create_stream("s", group_segments=1)
        await with_history.cluster._child(BROKER).stop(grace_s=60)
        say(f"writing the index of {long}")
        write_history(root / "long" / BROKER / "log" / "index", stream.stream_id, arguments.segments)
        await with_history.cluster.restart(BROKER)
        async with await Client.connect(with_history.cluster.bootstrap) as client:
            ((bounds,),) = (await client.bounds("s")).values()
            if bounds.next_record != arguments.segments * 64:
                raise SystemExit(f"the broker has not taken the index: it has {bounds.next_record} records")
        for kill, how in ((False, "after a clean stop"), (True, "after kill -9")):
            for name in alternating([long, empty], arguments.rounds):
                say(f"start {how}: {name}")
                figures.add(f"start {how}, {name}", await start_seconds(brokers[name], kill=kill), "s")
            ratio = figures.median(f"start {how}, {long}") / figures.median(f"start {how}, {empty}")
            figures.add(f"start {how}, ratio to empty", ratio, "")
        memory = {name: made.memory() for name, made in brokers.items()}
        for kind in ("anon", "file"):
            per_group = (memory[long][kind] - memory[empty][kind]) / arguments.segments
            figures.add(f"memory per closed group ({kind})", per_group, "B")
        say(f"creating {arguments.streams:,} streams")
        before = without.memory()
        async with await Client.connect(without.cluster.bootstrap) as client:
            for first in range(0, arguments.streams, STREAMS_AT_ONCE):
                names = range(first, min(first + STREAMS_AT_ONCE, arguments.streams))
                await asyncio.gather(*(client.admin.create_stream(f"idle-{number}") for number in names))
        after = without.memory()
        for kind in ("anon", "file"):
            figures.add(f"memory per idle stream ({kind})", (after[kind] - before[kind]) / arguments.streams, "B")
    figures.print()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--segments", type=int, default=100_000)
    made.add_argument("--streams", type=int, default=1_000)
    made.add_argument("--rounds", type=int, default=3)
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
