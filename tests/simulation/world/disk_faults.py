"""Faults of disks: a power loss of one machine or of all at once, errors, and full disks.

No loss of data is legitimate: power is lost only where acknowledged records are elsewhere or on the disk; and no disk
fails on which a stopping process must store the only copy of records.
"""

from __future__ import annotations

import errno
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world.cluster import Cluster
    from tests.simulation.world.plan import Fault, Plan

POWER, BLACKOUT, MIDDLE, FULL, BROKEN = (
    "power lost",
    "power of all lost",
    "power lost in the middle",
    "disk full",
    "disk broken",
)
KINDS = (POWER, BLACKOUT, MIDDLE, FULL, BROKEN)
BITS = "bits flipped"
"""Bits flip in the files of one backup when another one has copies of all records, or when a scenario says so."""
AMOUNTS = {MIDDLE: (0, 40), BITS: (1, 8)}
"""Least and most: the changes that a disk still makes before the power loss, and the flipped bits per file."""
_ERRORS = {FULL: errno.ENOSPC, BROKEN: errno.EIO}


def targets(plan: Plan, random: Random, kind: str) -> tuple[str, ...]:
    """The targets of a fault; empty when it is not allowed."""
    mortal = [*plan.coordinator_names]
    if plan.replication or plan.durability == "persisted":
        mortal += plan.broker_names
    if plan.may_kill_backups:
        mortal += plan.backup_names
    match kind:
        case "power of all lost":
            return tuple(mortal) if plan.durability == "persisted" else ()
        case "power lost" | "power lost in the middle":
            return (random.choice(mortal),)
        case "bits flipped":
            return (plan.backup_names[0],) if plan.replication > 1 else ()
    failing = [*plan.broker_names, *(plan.coordinator_names if plan.coordinators == 1 else [])]
    if plan.may_kill_backups or "stop" not in plan.kinds:
        failing += plan.backup_names
    return (random.choice(failing),)


class DiskFaults:
    """Begins and ends faults of disks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._failing: Counter[str] = Counter()
        """The number of present faults of a machine's disk."""

    def begin(self, fault: Fault) -> None:
        """Begin a fault, if it is one of a disk."""
        if fault.kind not in (*KINDS, BITS):
            return
        for name in fault.targets:
            daemon = self._cluster.daemons[name]
            match fault.kind:
                case "power lost" | "power of all lost":
                    daemon.power_lost()
                case "power lost in the middle":
                    daemon.disk.operations_left = int(fault.amount)
                case "bits flipped":
                    daemon.flip_bits(int(fault.amount))
                case _:
                    daemon.disk.error = _ERRORS[fault.kind]
                    self._failing[name] += 1

    def end(self, fault: Fault) -> None:
        """End a fault, if it is one of a disk."""
        if fault.kind not in KINDS:
            return
        for name in fault.targets:
            disk = self._cluster.daemons[name].disk
            disk.operations_left = None
            if fault.kind in _ERRORS:
                self._failing[name] -= 1
                if self._failing[name] <= 0:
                    disk.error = 0
            else:
                self._cluster.back(name)

    def end_all(self) -> None:
        """Make all disks work again."""
        for daemon in self._cluster.daemons.values():
            daemon.disk.operations_left, daemon.disk.error = None, 0
        self._failing.clear()
