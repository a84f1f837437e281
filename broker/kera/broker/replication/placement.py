"""Chooses the backups of a virtual segment, from the state of all backups. Pure.

Two replicas never go to the same backup. If enough backups are available, no replica goes to the broker's own node, no
two go to the same node, and no two to the same rack. Among equal candidates, two are drawn at random, and the one with
more free memory is taken. So the replicas of a broker are scattered over all backups, which makes recovery fast (thesis
6.6), and no backup is overloaded.
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
    """The backup's rack; empty: unknown."""
    free_bytes: int
    """The backup's last known free memory."""


def place(replication: int, candidates: Iterable[Candidate], *, node_id: str, random: Random) -> list[int] | None:
    """Choose `replication` backups for data of the broker on node `node_id`; None if there are too few."""
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
    """Return the reasons against a backup, the worst first."""
    return each.node_id in nodes, each.node_id == own, bool(each.rack) and each.rack in racks
