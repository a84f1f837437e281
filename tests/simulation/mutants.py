"""Deliberate defects, and the seeds that find them: ``python -m tests.simulation.mutants``.

Each mutant is a copy of the tree with a few changed lines, run without the native core. A mutant that no seed finds is
a hole in the simulation or in its checker; docs/testing.md has the table.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "broker", "backup", "coordinator", "client", "proto", "tests/simulation")


class Mutant(NamedTuple):
    """A defect: changes of lines in files."""

    name: str
    changes: tuple[tuple[str, str, str], ...]


BROKER, BACKUP, CLIENT = "broker/kera/broker/", "backup/kera/backup/", "client/kera/client/"
COORDINATOR = "coordinator/kera/coordinator/"
MUTANTS = (
    Mutant(
        "a chunk that is sent again is stored again",
        (
            (
                BROKER + "log/streamlet.py",
                "        if sequence < expected:\n            return self._find",
                "        if sequence < 0:\n            return self._find",
            ),
        ),
    ),
    Mutant(
        "another chunk with the sequence of a stored one is acknowledged as a repeat",
        (
            (
                BROKER + "log/streamlet.py",
                "        if same or producer_id in PRODUCER_IDS:\n",
                "        if same is not None or producer_id in PRODUCER_IDS:\n",
            ),
        ),
    ),
    Mutant(
        "a move loses how far producers got",
        (
            (
                BROKER + "ownership/sealing.py",
                "producers = list(streamlet.producers.items())",
                "producers = list(streamlet.producers.items())[:0]",
            ),
        ),
    ),
    Mutant(
        "a recovery loses how far producers got",
        ((BROKER + "recovery/plan.py", "_note_producers(plan.chunks, result)", "pass"),),
    ),
    Mutant(
        "readers see what is not replicated",
        ((BROKER + "log/read_plan.py", "segment.durable_head", "segment.head"),),
    ),
    Mutant(
        "a broker that restarts throws its memory away",
        (
            (
                BROKER + "engine.py",
                "arena = None if new else Arena.attach(settings.shm_dir, data_dir)",
                "arena = None",
            ),
        ),
    ),
    Mutant(
        "groups of several intervals are listed as if all were here",
        (
            (BROKER + "serving/descriptions.py", "if group.group_id < interval.end_group_id]", "if group.group_id]"),
            (
                BROKER + "serving/descriptions.py",
                "end_group_id=interval.end_group_id if interval.closed else 0",
                "end_group_id=0",
            ),
        ),
    ),
    Mutant(
        "neither a lease nor a fence keeps a lost broker from acknowledging",
        (
            (BROKER + "ownership/lease.py", "return self._now_s() < self.until_s", "return True"),
            (BACKUP + "store.py", "        if broker_epoch < known:\n", "        if broker_epoch < 0:\n"),
        ),
    ),
    Mutant(
        "one of several backups is enough for an acknowledgement",
        ((BROKER + "replication/virtual_log.py", "batch.missing.discard(backup_id)", "batch.missing.clear()"),),
    ),
    Mutant(
        "what is not acknowledged is sent as something new",
        (
            (
                CLIENT + "producing/lanes/lane.py",
                "        if error.retriable and now_s < chunk.deadline_s:",
                "        if isinstance(error, NotAccepted) and error.retriable and now_s < chunk.deadline_s:",
            ),
        ),
    ),
    Mutant(
        "the answer of a replica that was given up counts for the one in its place",
        (
            (
                BROKER + "replication/virtual_log.py",
                "        if batch.place is not place:\n            return []",
                "        if batch.place is None:\n            return []",
            ),
        ),
    ),
    Mutant(
        "a recovery gives a group again",
        (
            (
                BROKER + "recovery/plan.py",
                "result.next_group_id = max(groups) + 1 +",
                "result.next_group_id = max(groups) +",
            ),
            (
                BROKER + "storage/restart.py",
                "result.next_group_id = max(result.next_group_id, last + 1)",
                "result.next_group_id = max(result.next_group_id, last)",
            ),
        ),
    ),
    Mutant(
        "a streamlet that comes back gives groups that readers have passed",
        (
            (
                BROKER + "ownership/opener.py",
                "streamlet.next_group_id = max(streamlet.next_group_id, state.next_group_id)",
                "pass",
            ),
            (
                BROKER + "log/streamlet.py",
                "            self.next_group_id = max(self.next_group_id, last.first_group_id)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "assignments that are older than known ones are taken",
        (
            (
                BROKER + "ownership/streams.py",
                "if info.assignments_version < stream.assignments_version:",
                "if info.assignments_version < 0:",
            ),
            (
                BROKER + "ownership/orders.py",
                "and info.assignments_version < self._streams.get(info.stream_id).assignments_version",
                "and info.assignments_version < 0",
            ),
        ),
    ),
    Mutant(
        "what a consumer group has read goes on where nobody was",
        ((COORDINATOR + "consumer_groups/commits.py", "group.done = step.finished", "group.done = True"),),
    ),
    Mutant(
        "a member that is gone keeps its groups",
        (
            (
                COORDINATOR + "consumer_groups/members.py",
                "            return True\n        return self.busy",
                "            return False\n        return self.busy",
            ),
        ),
    ),
    Mutant(
        "a broker that a streamlet has left takes chunks again",
        ((BROKER + "log/streamlet.py", "self.takes_chunks = held.owned", "self.takes_chunks = True"),),
    ),
    Mutant(
        "a streamlet that is sealed for a move takes chunks",
        ((BROKER + "log/streamlet.py", "self.sealed, self.takes_chunks = True, False", "self.sealed = True"),),
    ),
    Mutant(
        "a move does not say how many records there were",
        (
            (
                BROKER + "ownership/sealing.py",
                "next_records=[entry.next_record for",
                "next_records=[0 * entry.next_record for",
            ),
        ),
    ),
    Mutant(
        "a restart forgets how far producers got",
        (
            (
                BROKER + "storage/restart.py",
                "        producers = self.index.producers(stream_id, streamlet_id)\n        numbers",
                "        producers = {}\n        numbers",
            ),
        ),
    ),
    Mutant(
        "a virtual segment is closed before backups have all of it",
        (
            (
                BROKER + "replication/virtual_log.py",
                "if place.closing is not None or place.pending:",
                "if place.closing is not None:",
            ),
        ),
    ),
    Mutant(
        "backups take chunks of a broker that was replaced",
        ((BACKUP + "store.py", "        if broker_epoch < known:\n", "        if broker_epoch < 0:\n"),),
    ),
    Mutant(
        "a damaged replica is freed before there is another one",
        (
            (
                BROKER + "replication/coverage.py",
                "        self._without(segment, backup_id)\n        if len(segment.backups) == segment.wanted:",
                "        if segment not in self.deficient:",
            ),
        ),
    ),
    Mutant(
        "a read does not say where it begins",
        ((BROKER + "serving/read_sessions.py", "result.begins_at = begins_at(plan, item.position)", "pass"),),
    ),
    Mutant(
        "where an interval begins is forgotten with the one before it",
        ((COORDINATOR + "cluster/starts.py", "    if index == 0:\n", "    if index < 0:\n"),),
    ),
    Mutant(
        "a streamlet in which nothing was found gives groups again",
        (
            (
                BROKER + "recovery/takeover.py",
                "origin.without_sources()",
                "origin._replace(sources=frozenset(), next_group_id=1)",
            ),
        ),
    ),
    Mutant(
        "a broker that is away when a stream is deleted keeps it",
        ((COORDINATOR + "operations/drops.py", "due.difference_update(set(told) - failed.keys())", "due.clear()"),),
    ),
    Mutant(
        "replicas of a stream that was deleted stay",
        (
            (
                BROKER + "replication/coverage.py",
                "in list(self._of_stream[stream_id].values()):\n            self._forget(segment)",
                "in list(self._of_stream[stream_id].values()):\n            self._forget(segment, free=False)",
            ),
        ),
    ),
    Mutant(
        "files are forgotten before it is durable that they were removed",
        ((BROKER + "storage/segment_files.py", "        self.disk.sync_removals(paths)\n", ""),),
    ),
    Mutant(
        "a producer that was fenced goes on",
        (
            (
                BROKER + "log/streamlet.py",
                "if self.first_epochs and producer_epoch < self",
                "if self.first_epochs and producer_epoch < 0 * self",
            ),
            (
                BROKER + "log/streamlet.py",
                "        elif producer_epoch < known_epoch:\n",
                "        elif producer_epoch < 0:\n",
            ),
        ),
    ),
    Mutant(
        "a broker does not sync what it stores",
        ((BROKER + "storage/disk.py", "offset + written, os.RWF_DSYNC)", "offset + written, 0)"),),
    ),
    Mutant(
        "a backup answers before it has synced",
        ((BACKUP + "performer.py", "                    disk.sync()\n", "                    pass\n"),),
    ),
    Mutant(
        "what is truncated goes before the coordinator knows",
        ((BROKER + "ownership/moved_starts.py", "        if replicated:\n", "        if not replicated:\n"),),
    ),
    Mutant(
        "the coordinator never hears where entries start",
        ((BROKER + "ownership/moved_starts.py", "return iter(self._untold)", "return iter(())"),),
    ),
    Mutant(
        "a broker that has lost its memory goes on as if it had not",
        (
            (
                BROKER + "storage/restart.py",
                "self.found.lost_memory = known_as_lost or (",
                "self.found.lost_memory = False and (",
            ),
        ),
    ),
    Mutant(
        "a coordinator that was deposed goes on writing",
        (
            (
                COORDINATOR + "store/leadership.py",
                "return not self.over.is_set() and self._now() < self._proven_until_s",
                "return True",
            ),
            (
                COORDINATOR + "store/leadership.py",
                "self._store.write(self._term.guard, *writes)",
                "self._store.write(*writes)",
            ),
        ),
    ),
)


def copy_of(mutant: Mutant, target: Path, root: Path = ROOT) -> None:
    """Make the tree with the defect. Raises ``ValueError`` if the lines to change are missing."""
    shutil.rmtree(target, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(root / package, target / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (target / "tests/__init__.py").touch()
    for name, before, after in mutant.changes:
        path = target / name
        text = path.read_text(encoding="utf-8")
        if before not in text:
            raise ValueError(f"{mutant.name}: {name} has no {before!r}")
        path.write_text(text.replace(before, after), encoding="utf-8")


def run(target: Path, first: int, seeds: int) -> tuple[int | None, str]:
    """The first seed that fails in a copy, and its first problem."""
    paths = [target / package for package in PACKAGES if package != "tests/simulation"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [target, *paths])), "KERA_NATIVE": "0"}
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(first), "--seeds", str(seeds)]
    done = subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"1 failed \[(\d+)\]", done.stdout)
    problem = re.search(r"^PROBLEM (.*)", done.stdout, re.MULTILINE)
    if failed is None and done.returncode:
        raise ValueError(f"the simulation did not run: {done.stderr[-2000:]}")
    return (int(failed[1]) if failed else None), (problem[1] if problem else "")


def found_at(target: Path, sound: Path, first: int, seeds: int) -> tuple[int | None, str]:
    """The first seed that fails in a copy with a defect and not in a sound one, and its first problem."""
    last = first + seeds
    while first < last:
        seed, problem = run(target, first, last - first)
        if seed is None or run(sound, seed, 1)[0] is None:
            return seed, problem
        print(f"seed {seed} fails without any defect", flush=True)
        first = seed + 1
    return None, ""


def main() -> int:
    """Print the table; return the number of mutants that no seed found."""
    parser = argparse.ArgumentParser(prog="make sim-mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=500, help="how many, of each mutant")
    parser.add_argument("--only", default="", help="those with this in their names")
    arguments = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory(prefix="kera-mutants-") as directory:
        sound, target = Path(directory, "sound"), Path(directory, "mutant")
        copy_of(Mutant("none", ()), sound)
        for mutant in MUTANTS:
            if arguments.only not in mutant.name:
                continue
            copy_of(mutant, target, sound)
            seed, problem = found_at(target, sound, arguments.seed, arguments.seeds)
            missed += seed is None
            told = f"not within {arguments.seeds} seeds" if seed is None else f"seed {seed}: {problem}"
            print(f"{mutant.name} | {told}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
