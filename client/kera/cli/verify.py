"""``kera verify``: is a broker's data directory what was once written? Needs no broker, and changes nothing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer

from kera.cli._client import JSON_OPTION
from kera.cli._run import EXIT_ERROR, extra, interruptible
from kera.cli._sizes import format_size
from kera.cli._table import plural

if TYPE_CHECKING:
    from kera.broker.verify import Finding, Totals

QUIET_S = 1.0
"""A check that is done sooner shows no progress."""
PROGRESS_INTERVAL_S = 0.2


def verify(
    data_dir: Path = typer.Argument(
        ..., metavar="DATA_DIR", exists=True, file_okay=False, help="Data directory of a broker that does not run."
    ),
    as_json: bool = JSON_OPTION,
) -> int:
    """Check a broker's data directory: its identity, its index, and every chunk of its segments.

    Changes nothing. Prints a line for each damage and each oddity; the exit code is 1 when there is damage.
    """
    with extra("server"):
        from kera.broker.verify import Totals, verify
    totals, found = Totals(), []
    with interruptible(), _Progress(totals) as progress:
        for finding in verify(data_dir, totals, progress.show):
            found.append(finding)
            progress.clear()
            if not as_json:
                print(_line(finding), flush=True)
    damages = sum(finding.severity == "damage" for finding in found)
    if as_json:
        print(json.dumps(_to_json(totals, found), indent=2))
    else:
        print(_summary(totals, damages, len(found) - damages))
    return EXIT_ERROR if damages else 0


def _line(finding: Finding) -> str:
    where = str(finding.path)
    if finding.offset is not None:
        where += f" at {finding.offset}, {plural(finding.length_bytes, 'byte')}"
    return f"{finding.severity}: {where}: {finding.text}"


def _summary(totals: Totals, damages: int, warnings: int) -> str:
    whole = (
        f"{plural(totals.segments, 'segment')}, {plural(totals.chunks, 'chunk')}, {plural(totals.records, 'record')},"
        f" {format_size(totals.bytes)}"
    )
    if not damages and not warnings:
        return f"{whole}: all is well"
    return f"{whole}: {plural(damages, 'damage')}, {plural(warnings, 'warning')}"


def _to_json(totals: Totals, found: list[Finding]) -> dict[str, object]:
    return {
        "segments": totals.segments,
        "chunks": totals.chunks,
        "records": totals.records,
        "bytes": totals.bytes,
        "findings": [
            {
                "severity": finding.severity,
                "path": str(finding.path),
                "offset": finding.offset,
                "length_bytes": finding.length_bytes,
                "text": finding.text,
            }
            for finding in found
        ],
    }


class _Progress:
    """One line on the terminal that is written over and over; nothing when standard error is none."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
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
            done, expected = self._totals.segments, self._totals.segments_expected
            text = f"\r{done:,} of {expected:,} segments, {format_size(self._totals.bytes)}\x1b[K"
            print(text, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
