"""The clients of `tests.chaos.partitions`, as a process on a separate host: the load and the verdict of `kera check`.

Lines of JSON on standard output, commands on standard input:

    → {"ready": true}                        the stream exists, each streamlet takes records, and all are read
    ← mark                                   measure from now on the time until all goes on
    → {"acked_s": 0.4, "read_s": 0.9}        until each streamlet had an acknowledgement, and until each reader
                                             had everything that was written by then
    ← stop
    → {"verdict": "kept", …}                 the result of `kera check`; then the process ends
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from kera.cli.check._options import Options
from kera.cli.check._run import Outcome
from kera.core.base.process import die_with_parent
from kera.core.base.telemetry import configure_logging
from tests.chaos.checked import LOAD_S_MAX, WITHIN_S, loaded


def tell(**what: Any) -> None:
    """Write a line to the parent process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def obey(bootstrap: str, options: Options) -> Outcome:
    """Obey commands until the load has to end."""
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async with loaded(bootstrap, options) as load:
        await load.goes_on()
        tell(ready=True)
        while (await commands.readline()).strip() == b"mark":
            acked_s, read_s = await load.goes_on()
            tell(acked_s=acked_s, read_s=read_s)
    return load.outcome


def told(outcome: Outcome) -> dict[str, Any]:
    """The reported part of the outcome."""
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
    """Read the arguments and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("--rate", type=float, default=400.0)
    parser.add_argument("--replication", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="auto")
    arguments = parser.parse_args()
    os.environ["KERA_CLIENT_TRANSPORT"] = arguments.transport
    die_with_parent()
    configure_logging("error")
    options = Options(
        LOAD_S_MAX,
        replication=arguments.replication,
        rate=arguments.rate,
        within_s=WITHIN_S,
        seed=arguments.seed,
    )
    tell(**told(asyncio.run(obey(arguments.bootstrap, options))))


if __name__ == "__main__":
    run()
