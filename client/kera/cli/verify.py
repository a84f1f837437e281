"""``kera verify``: checks the data of daemons on disk for damage. Needs no daemon, and changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer

from kera.cli._output import OUTPUT_OPTION, Output, show_document
from kera.cli._run import extra, interruptible
from kera.cli._streams import EXIT_ERROR
from kera.core.base.sizes import format_size
from kera.core.base.spelling import plural

if TYPE_CHECKING:
    from kera.backup import verify as of_backup
    from kera.broker import verify as of_broker
    from kera.server.verifying import Defect

QUIET_S = 1.0
"""Time before a check shows its progress."""
PROGRESS_INTERVAL_S = 0.2


def verify(
    data_dirs: list[Path] = typer.Argument(
        ...,
        metavar="DATA_DIR...",
        exists=True,
        file_okay=False,
        help="Data directories of stopped brokers and backups, and the --log-dirs of backups.",
    ),
    output: Output = OUTPUT_OPTION,
) -> int:
    """Verify the data directories of brokers and backups.

    Checks a broker's index and every chunk of its segments, and every replica of a backup. Given several backups,
    compares their replicas of each virtual segment; given brokers too, compares their chunks with the replicas. Changes
    nothing. Prints a line per damage or warning; the exit code is 1 if there is damage.
    """
    with extra("server"):
        from kera.backup.verify import is_backup

        check = _Check()
    found: list[Defect] = []
    backups = [path for path in data_dirs if is_backup(path)]
    brokers = [path for path in data_dirs if path not in backups]
    with interruptible(), _Progress(check) as progress:
        for finding in check.run(brokers, backups, progress):
            found.append(finding)
            progress.clear()
            if not output.is_document:
                print(_line(finding), flush=True)
    damages = sum(finding.severity == "damage" for finding in found)
    if output.is_document:
        show_document(_to_json(check, found), output)
    else:
        print(_summary(check, damages, len(found) - damages))
    return EXIT_ERROR if damages else 0


class _Check:
    """A check of data directories, and its progress."""

    def __init__(self) -> None:
        from kera.backup import verify as of_backup
        from kera.broker import verify as of_broker

        self._broker, self._backup = of_broker, of_backup
        self.segments: list[of_broker.SegmentsChecked] = []
        """The segments of each broker."""
        self.replicas: of_backup.ReplicasChecked | None = None
        """The replicas of all backups; None: no backup was given."""

    def run(self, brokers: Sequence[Path], backups: Sequence[Path], progress: _Progress) -> Iterator[Defect]:
        """Yield all damage and all warnings."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(self._backup.BackupFiles.opened(path)) for path in backups]
            for path in brokers:
                self.segments.append(self._broker.SegmentsChecked())
                yield from self._broker.verify(path, self.segments[-1], progress.show)
            if not files:
                return
            self.replicas = self._backup.ReplicasChecked(replicas_expected=sum(each.count for each in files))
            for each in files:
                yield from each.check(self.replicas, progress.show)
            yield from self._backup.compare(files)
            yield from self._compare_logs([path.absolute() for path in brokers], files)

    @property
    def all_segments(self) -> of_broker.SegmentsChecked:
        """The segments of all brokers."""
        return self._broker.SegmentsChecked(*map(sum, zip(*map(dataclasses.astuple, self.segments), strict=True)))

    def _compare_logs(self, brokers: Sequence[Path], files: Sequence[of_backup.BackupFiles]) -> Iterator[Defect]:
        """Compare the chunks of brokers' logs, and the replicas in their indexes, with the replicas on backups."""
        from kera.broker.registration import BrokerIdentity
        from kera.cli._log_and_replicas import LogAndReplicas
        from kera.server.verifying import unused

        with contextlib.ExitStack() as stack:
            indexes = {}
            for path in brokers:
                stack.enter_context(unused(path))
                copy = stack.enter_context(self._broker.index_copy(path / "log" / "index"))
                if copy.index is not None:  # the check of the broker has reported a missing index
                    indexes[path] = copy.index
            for path, index in indexes.items():
                identity = None
                for name in BrokerIdentity.names():
                    with contextlib.suppress(OSError, ValueError):
                        identity = identity or BrokerIdentity.read(path / name)
                if identity is not None:
                    others = [other for other in indexes.values() if other is not index]
                    yield from LogAndReplicas(path, index, identity.member_id, files, others).check()


def _line(finding: Defect) -> str:
    where = str(finding.path)
    if finding.offset is not None:
        where += f" at {finding.offset}, {plural(finding.length_bytes, 'byte')}"
    return f"{finding.severity}: {where}: {finding.text}"


def _summary(check: _Check, damages: int, warnings: int) -> str:
    wholes = []
    if check.segments:
        totals = check.all_segments
        wholes.append(
            f"{plural(totals.segments, 'segment')}, {plural(totals.chunks, 'chunk')},"
            f" {plural(totals.records, 'record')}, {format_size(totals.bytes)}"
        )
    if check.replicas is not None:
        replicas = check.replicas
        wholes.append(
            f"{plural(replicas.replicas, 'replica')}, {plural(replicas.chunks, 'chunk')}, {format_size(replicas.bytes)}"
        )
    whole = "; ".join(wholes)
    if not damages and not warnings:
        return f"{whole}: no damage"
    return f"{whole}: {plural(damages, 'damaged place')}, {plural(warnings, 'warning')}"


def _to_json(check: _Check, found: Iterable[Defect]) -> dict[str, object]:
    document: dict[str, object] = {}
    if check.segments:
        document |= _counts(check.all_segments)
    if check.replicas is not None:
        document["replicas"] = _counts(check.replicas)
    return document | {"findings": [dataclasses.asdict(finding) | {"path": str(finding.path)} for finding in found]}


def _counts(totals: of_broker.SegmentsChecked | of_backup.ReplicasChecked) -> dict[str, int]:
    return {name: count for name, count in dataclasses.asdict(totals).items() if not name.endswith("_expected")}


class _Progress:
    """A line on the terminal that is updated in place; shows nothing if standard error is not a terminal."""

    def __init__(self, check: _Check) -> None:
        self._check = check
        self._next_s = time.monotonic() + QUIET_S
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self) -> None:
        if self._terminal and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PROGRESS_INTERVAL_S
            self._shown = True
            print(f"\r{self._text()}\x1b[K", end="", file=sys.stderr, flush=True)

    def _text(self) -> str:
        if self._check.replicas is not None:
            replicas = self._check.replicas
            done, expected, what, size = replicas.replicas, replicas.replicas_expected, "replicas", replicas.bytes
        else:
            segments = self._check.segments[-1]
            done, expected, what, size = segments.segments, segments.segments_expected, "segments", segments.bytes
        return f"{done:,} of {expected:,} {what}, {format_size(size)}"

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
