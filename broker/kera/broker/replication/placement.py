"""On which backups a virtual segment goes. Pure: backups and what is known of them in, a choice out.

Never two replicas on one backup. As far as there are enough backups: none on the broker's own node, no two on one node,
no two in one rack. Among equals two are drawn at random and the one with more free memory is taken: so the replicas of
a broker are scattered over all backups, which is what makes recovery fast (thesis 6.6), and none is overrun.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import NamedTuple


class Candidate(NamedTuple):
    """A backup that can take a replica."""

    backup_id: int
    node_id: str
    rack: str
    """Empty: not known."""
    free_bytes: int
    """Free memory of the backup, as far as known."""


def place(replication: int, candidates: Iterable[Candidate], *, node_id: str, random: Random) -> list[int] | None:
    """The backups for `replication` replicas of what the broker on node `node_id` writes; None: there are too few."""
    left = list(candidates)
    if len(left) < replication:
        return None
    nodes, racks = set[str](), set[str]()
    chosen: list[int] = []
    for _ in range(replication):
        best = min(_conflicts(each, node_id, nodes, racks) for each in left)
        equals = [each for each in left if _conflicts(each, node_id, nodes, racks) == best]
        pair = random.sample(equals, min(2, len(equals)))
        taken = max(pair, key=lambda each: each.free_bytes)
        chosen.append(taken.backup_id)
        left.remove(taken)
        nodes.add(taken.node_id)
        racks.add(taken.rack)
    return chosen


def _conflicts(each: Candidate, own: str, nodes: set[str], racks: set[str]) -> tuple[bool, bool, bool]:
    """The reasons against a backup, the worst first."""
    return each.node_id in nodes, each.node_id == own, bool(each.rack) and each.rack in racks
