"""The clients of `tests.chaos.partitions`, as a process on a host of its own: the load and the verdict of `kera check`.

Lines of JSON on standard output, commands on standard input:

    → {"ready": true}                        the stream is there, each streamlet takes records, and all are read
    ← mark                                   from now on: how long until all goes on?
    → {"acked_s": 0.4, "read_s": 0.9}        until each streamlet has had an acknowledgement, and until each reader
                                             has had everything that was there by then
    ← stop
    → {"verdict": "kept", …}                 what `kera check` found, and it ends
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from kera.cli.check._options import Options
from kera.cli.check._run import Check, Outcome, carry_out
from kera.core.process import die_with_parent
from kera.core.telemetry import configure_logging

LOOK_S = 0.01
LOAD_S_MAX = 6 * 3600.0
"""The load ends when it is told to."""
WITHIN_S = 60.0
"""What `kera check` gives everything after the load; and each record, until it is given up."""


def tell(**what: Any) -> None:
    """A line for whoever has started this process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Watcher:
    """Obeys commands while a check runs."""

    def __init__(self, options: Options) -> None:
        self._options = options

    @contextlib.asynccontextmanager
    async def watching(self, check: Check) -> AsyncIterator[None]:
        """For `carry_out`."""
        task = asyncio.create_task(self._obey(check))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _obey(self, check: Check) -> None:
        commands = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        await self._goes_on(check, 0.0)
        tell(ready=True)
        while line := (await commands.readline()).strip():
            if line == b"stop":
                check.shared.stopping.set()
                return
            begun_s = check.now_s()
            acked_s, read_s = await self._goes_on(check, begun_s)
            tell(acked_s=acked_s - begun_s, read_s=read_s - begun_s)

    async def _goes_on(self, check: Check, begun_s: float) -> tuple[float, float]:
        """When each streamlet has had an acknowledgement, and when readers had all that was there by then."""
        while check.acknowledgements.since_s(self._options.streamlets) <= begun_s:
            await asyncio.sleep(LOOK_S)
        acked_s, wanted = check.now_s(), check.ledger.floors()
        readers = [f"reader {number}" for number in range(1, self._options.readers + 1)]
        while any(
            check.ledger.next_of(reader).get(entry, 0) < record
            for reader in readers
            for entry, record in wanted.items()
        ):
            await asyncio.sleep(LOOK_S)
        return acked_s, check.now_s()


def told(outcome: Outcome) -> dict[str, Any]:
    """What is to be known of the outcome."""
    return {
        "verdict": outcome.verdict,
        "impossible": outcome.impossible,
        "lines": outcome.lines,
        "sent": outcome.sent,
        "acknowledged": outcome.acknowledged,
        "refused": outcome.refused,
        "uncertain": outcome.uncertain,
        "calm_s": outcome.calm_s,
        "longest_pause_s": outcome.longest_pause_s,
        "notes": outcome.notes,
    }


def run() -> None:
    """Read the arguments and go."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("--rate", type=float, default=400.0)
    parser.add_argument("--replication", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    die_with_parent()
    configure_logging("error")
    options = Options(
        LOAD_S_MAX,
        replication=arguments.replication,
        rate=arguments.rate,
        within_s=WITHIN_S,
        seed=arguments.seed,
    )
    tell(**told(asyncio.run(carry_out(options, arguments.bootstrap, Watcher(options).watching))))


if __name__ == "__main__":
    run()
