"""The programs of chaos by name: ``python -m tests.chaos`` lists them, ``… kill --rounds 20`` runs one.

``make chaos RUN="kill --rounds 20"`` does the same, and before that prepares what the program needs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from tests.chaos.running import Program, carry_out


class Entry(NamedTuple):
    """A line of the list."""

    place: str
    """Module and name of its `Program`."""
    text: str


PROGRAMS = {
    "kill": Entry("control:KILL", "a broker is killed under load, with its memory or without"),
    "control": Entry(
        "control:CONTROL", "brokers, backups, coordinators are killed and frozen, also in moves and drains"
    ),
    "restart": Entry("control:RESTART", "every daemon is restarted as an operator does, without a recovery"),
    "replicas": Entry("replicas:REPLICAS", "backups and their broker are killed; the bytes of those left are read"),
    "network": Entry("partitions:NETWORK", "links between two roles are cut, lose packets, or are slow (root)"),
    "silence": Entry("partitions:SILENCE", "hosts are cut off silently, and clients vanish (root)"),
    "access": Entry("access:ACCESS", "rights are revoked while leaders are killed (ZooKeeper)"),
    "crowd": Entry("crowd:CROWD", "a secured cluster is attacked from its network"),
    "hostile": Entry("hostile:HOSTILE", "brokers are lost whose logs have a hostile writer's chunks"),
    "latency": Entry("latency:LATENCY", "a latency constraint is held while brokers die and clocks jump"),
    "push": Entry("push:PUSH", "readers of shared memory and their broker are killed and frozen (Spark)"),
    "columnar": Entry("columnar:COLUMNAR", "executors of the columnar engine die, stall and run out of memory (Spark)"),
    "spark": Entry("spark:SPARK", "a job from stream to stream is killed, and its broker (Spark)"),
    "epochs": Entry("epochs:EPOCHS_CHAOS", "micro-batches of epochs are compared: live, killed, as a backfill (Spark)"),
}


def program_of(name: str) -> Program:
    """The program of this name."""
    module, _, attribute = PROGRAMS[name].place.partition(":")
    found = getattr(importlib.import_module(f"tests.chaos.{module}"), attribute)
    assert isinstance(found, Program)
    return found


def main(arguments: Sequence[str]) -> int:
    """List the programs, or run one; returns the exit code."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        width = max(map(len, PROGRAMS))
        print("python -m tests.chaos NAME [OPTION …]; NAME --help lists the options.\n")
        print(*(f"  {name:{width}}  {entry.text}" for name, entry in PROGRAMS.items()), sep="\n")
        return 0
    name, *rest = arguments
    if name not in PROGRAMS:
        print(f"tests.chaos: there is no program {name}: python -m tests.chaos lists them", file=sys.stderr)
        return 2
    return carry_out(name, program_of(name), rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
