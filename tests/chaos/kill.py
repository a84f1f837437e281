"""Kill a broker again and again under load, and look at what is there: ``make chaos-kill ROUNDS=200``.

The load and the verdict are those of `kera check`, one for a stream of each durability. A round waits for a random
number of acknowledgements, kills the broker at a random moment, starts it again, and waits until every streamlet takes
records and readers have what was there by then. With ``--lose-memory`` its arena is deleted as often, as when the host
crashes; then there is no stream of durability ``leader``, which may lose.

With the same seed the broker is killed at the same moments, as far as a scheduler lets it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from kera.cli.check._options import Options
from kera.core.base.settings import MIB
from kera.core.base.telemetry import configure_logging
from kera.local.cluster import RunningCluster
from tests.chaos.checked import LOAD_S_MAX, WITHIN_S, Load, under_check
from tests.chaos.verdict import leaves
from tests.integration.support import BROKER, keeping_cluster, lose_host, metric, tell

STREAMLETS = 2
ROUND_TIMEOUT_S = 60.0
ROUNDS_PER_LINE = 10
RATE = 2000.0
"""Records a second, to each stream."""
BETWEEN_RECORDS_MAX = 1000


class Kills:
    """The rounds."""

    def __init__(self, arguments: argparse.Namespace, cluster: RunningCluster) -> None:
        self._arguments = arguments
        self._cluster = cluster
        self._moments = random.Random(arguments.seed)
        self._lost = 0
        self.went_on_s: list[float] = []
        """After each restart: until every streamlet has taken a record, and readers had what was there by then."""

    async def run(self, loads: list[Load]) -> None:
        """All of them."""
        begun_s = time.monotonic()
        for number in range(1, self._arguments.rounds + 1):
            async with asyncio.timeout(2 * ROUND_TIMEOUT_S):
                await self._round(loads)
            if number % ROUNDS_PER_LINE == 0 or number == self._arguments.rounds:
                print(
                    f"round {number}: {time.monotonic() - begun_s:.0f} s; acknowledged:"
                    f" {' and '.join(f'{load.acknowledged:,}' for load in loads)}; memory lost {self._lost} times;"
                    f" last found in memory: {metric(self._cluster, 'start_segments_in_memory')} segments",
                    flush=True,
                )

    async def _round(self, loads: list[Load]) -> None:
        moments, cluster = self._moments, self._cluster
        for load in loads:
            await load.until_acknowledged(load.acknowledged + moments.randrange(1, BETWEEN_RECORDS_MAX))
        await asyncio.sleep(moments.random() * 0.05)  # sleep: a moment is what is wanted
        if moments.random() < self._arguments.lose_memory:
            self._lost += 1
            await asyncio.to_thread(lose_host, cluster)
        else:
            await asyncio.to_thread(cluster.kill, BROKER)
        await asyncio.to_thread(cluster.restart, BROKER)
        times = await asyncio.gather(*(load.goes_on() for load in loads))
        self.went_on_s.append(max(read_s for _, read_s in times))


async def run(arguments: argparse.Namespace, cluster: RunningCluster) -> None:
    """All rounds, and the verdict. Raises `Wrong`."""
    durabilities = ["persisted"] if arguments.lose_memory else ["leader", "persisted"]
    options = Options(
        LOAD_S_MAX,
        streamlets=STREAMLETS,
        replication=0,
        producers=1,
        readers=1,
        members=0,
        rate=RATE,
        within_s=WITHIN_S,
        seed=arguments.seed,
    )
    kills = Kills(arguments, cluster)
    async with AsyncExitStack() as stack:
        loads = {
            durability: await stack.enter_async_context(
                under_check(cluster.bootstrap, replace(options, durability=durability))
            )
            for durability in durabilities
        }
        await kills.run(list(loads.values()))
    for durability, load in loads.items():
        outcome = load.outcome
        print(f"{durability}: {outcome.acknowledged:,} of {outcome.sent:,} records acknowledged, {outcome.verdict}")
    print(f"all went on within s: p50 {statistics.median(kills.went_on_s):.2f}, longest {max(kills.went_on_s):.2f}")


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


if __name__ == "__main__":
    sys.exit(main())
