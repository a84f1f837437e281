"""A broker with data is killed: how long producers wait, and how fast the others recover the data.

A round starts a cluster, fills a stream whose streamlets are all at one broker, kills that broker while a steady
producer writes to all of them, and waits for the reports of the survivors: noticed, fenced, taken over, all readable,
all restored. Then everything is read and compared. Times are seconds after the kill.

Everything shares this machine, so that figures are those of its cores and its disk divided by all.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from bench.common import TIMEOUT_S, Figures, alternating, directory, parser, say, size
from bench.steady import Filled, check, fill, steady
from kera.client import Client, RecoveryDescription
from kera.core.base.settings import GIB, MIB
from kera.core.base.telemetry import configure_logging
from kera.local.cluster import LocalCluster

STREAM = "recovered"


async def until_over(client: Client, broker_id: int) -> RecoveryDescription:
    """The recovery of a broker, after it is done."""
    shown = ""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            for found in await client.admin.recoveries():
                if found.broker_id == broker_id:
                    if found.phase != shown:
                        say(f"  {(shown := found.phase)}")
                    if found.phase == "done":
                        return found
            await asyncio.sleep(0.05)


async def one(arguments: argparse.Namespace, root: Path, replication: int, figures: Figures) -> None:
    """Run one round."""
    cluster = LocalCluster(
        data_dir=root,
        brokers=arguments.brokers,
        backups=arguments.backups,
        arena_bytes=arguments.arena_bytes,
        backup_memory_bytes=arguments.backup_memory_bytes,
        segment_bytes=arguments.segment_bytes,
    )
    names = [f"broker-{number}" for number in range(1, arguments.brokers + 1)]
    try:
        async with cluster, await Client.connect(cluster.bootstrap) as client:
            made = await client.admin.create_stream(
                STREAM, streamlets=arguments.streamlets, brokers=1, replication=replication
            )
            (broker_id,) = {assignment.broker_id for assignment in made.assignments.values()}
            name = next(each for each in names if cluster.ready[each]["broker_id"] == broker_id)
            filled = Filled(arguments.streamlets, arguments.record_bytes, arguments.chunk_bytes)
            seconds = await fill(client, STREAM, filled, arguments.bytes)
            say(f"  {filled.bytes / 1e9:.2f} GB in {seconds:.1f} s; killing {name}")
            async with steady(client, STREAM, pause_s=0.01) as load:
                await load.go_on()
                killed_s, killed_us = time.monotonic(), time.time_ns() // 1000
                await cluster.kill(name)
                info = await until_over(client, broker_id)
                await load.go_on()
                stall_s = load.stall_s(range(arguments.streamlets), killed_s, time.monotonic())
            read_s = await check(client, STREAM, filled, load.sent)
    finally:
        for name in names:
            if name in cluster.ready:
                Path(cluster.ready[name]["arena_path"]).unlink(missing_ok=True)  # the file of the killed broker
    of = f"R={replication}: "
    for what, at_us in (
        ("noticed", info.detected_us),
        ("backups refuse it", info.fenced_us),
        ("all streamlets have an owner", info.opened_us),
        ("all readable", info.readable_us),
        ("all restored", info.restored_us),
    ):
        figures.add(of + what, (at_us - killed_us) / 1e6, "s")
    figures.add(of + "longest without acknowledgement", stall_s, "s")
    figures.add(of + "recovered", info.bytes_recovered / 1e9, "GB")
    for what, at_us in (("readable", info.readable_us), ("restored", info.restored_us)):
        rate = info.bytes_recovered / 1e3 / (at_us - info.fenced_us)
        figures.add(of + f"from the fence until {what}", rate, "GB/s")
    figures.add(of + "reading all of it afterwards", filled.bytes / 1e9 / read_s, "GB/s")
    if info.records_lost:
        figures.notes[of + "lost"] = f"{info.records_lost} records that no replica has"


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Run all rounds."""
    figures = Figures("recovery", arguments, root)
    kinds = [str(replication) for replication in arguments.replication]
    for number, kind in enumerate(alternating(kinds, arguments.rounds)):
        say(f"round {number + 1}, R={kind}")
        await one(arguments, root / str(number), int(kind), figures)
    figures.notes["checked"] = "everything was read after each round, and nothing was lost, repeated or changed"
    figures.print()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--bytes", type=size, default=GIB, help="that the broker has when it is killed")
    made.add_argument("--replication", type=int, nargs="+", default=[1, 2])
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--brokers", type=int, default=3)
    made.add_argument("--backups", type=int, default=3)
    made.add_argument("--streamlets", type=int, default=8)
    made.add_argument("--record-bytes", type=int, default=1000)
    made.add_argument("--chunk-bytes", type=size, default=MIB, help="of the records in a chunk")
    made.add_argument("--arena-bytes", type=size, default=2 * GIB, help="memory of each broker")
    made.add_argument("--backup-memory-bytes", type=size, default=512 * MIB, help="memory of each backup")
    made.add_argument("--segment-bytes", type=size, default=8 * MIB)
    arguments = made.parse_args()
    configure_logging("error", daemon="bench")  # clients log their search for new owners, which is measured
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
