"""Shows the progress of a copy: a bar at a terminal, JSON lines for programs, or a line now and then for logs."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any, Protocol, Self

from kera.connect.pieces import Progress
from kera.connect.planning.outages import Resumed
from kera.connect.planning.rates import Rates, Standing

LINES_S = 10.0
JSON_S = 1.0
BAR_S = 0.1


class Teller(Protocol):
    """Receives the progress of a copy."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def began(self, name: str, progress: Progress, notes: list[str]) -> None:
        """Show that the copy begins, or continues from earlier progress."""
        ...

    def going(self, rates: Rates) -> None:
        """Show the rates after the copy has written records."""
        ...

    def noted(self, note: str) -> None:
        """Show a note for the user."""
        ...

    def failing(self, error: Exception) -> None:
        """Show that the copy has failed, and tries again."""
        ...

    def resumed(self, outage: Resumed) -> None:
        """Show that the copy goes on after failures."""
        ...

    def ended(self, rates: Rates | None, how: str) -> None:
        """Show that the copy is ``done``, or was ``stopped``."""
        ...


def teller(*, as_json: bool) -> Teller:
    """Return JSON lines if they are wanted, else a bar if standard error is a terminal, else lines of text."""
    if as_json:
        return JsonLines()
    return Bar() if sys.stderr.isatty() else Lines()


class _Quiet:
    """The pacing that all receivers share, as they are notified more often than they print."""

    every_s = LINES_S

    def __init__(self) -> None:
        self._told_s = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _is_time(self, now_s: float) -> bool:
        if now_s - self._told_s < self.every_s:
            return False
        self._told_s = now_s
        return True


class JsonLines(_Quiet):
    """Prints a JSON object for each event on standard output."""

    every_s = JSON_S

    def began(self, name: str, progress: Progress, notes: list[str]) -> None:
        """See `Teller`."""
        self._print("began", name=name, records_before=progress.records, notes=notes)

    def going(self, rates: Rates) -> None:
        """See `Teller`."""
        now_s = time.monotonic()
        if self._is_time(now_s):
            self._print("progress", **_fields(rates.standing(now_s)))

    def noted(self, note: str) -> None:
        """See `Teller`."""
        self._print("note", note=note)

    def failing(self, error: Exception) -> None:
        """See `Teller`."""
        self._print("failing", error=str(error))

    def resumed(self, outage: Resumed) -> None:
        """See `Teller`."""
        self._print("resumed", down_s=round(outage.down_s, 1), attempts=outage.attempts)

    def ended(self, rates: Rates | None, how: str) -> None:
        """See `Teller`."""
        self._print(how, **({} if rates is None else _fields(rates.average(time.monotonic()))))

    def _print(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), flush=True)


def _fields(standing: Standing) -> dict[str, Any]:
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in standing._asdict().items()}


class Lines(_Quiet):
    """Prints a line of text now and then on standard error."""

    def began(self, name: str, progress: Progress, notes: list[str]) -> None:
        """See `Teller`."""
        for line in _opening(name, progress, notes):
            self._print(line)
        self._told_s = time.monotonic()

    def going(self, rates: Rates) -> None:
        """See `Teller`."""
        now_s = time.monotonic()
        if self._is_time(now_s):
            self._print(_text(rates.standing(now_s)))

    def noted(self, note: str) -> None:
        """See `Teller`."""
        self._print(f"note: {note}")

    def failing(self, error: Exception) -> None:
        """See `Teller`."""
        self._print(f"failing, and trying again: {error}")

    def resumed(self, outage: Resumed) -> None:
        """See `Teller`."""
        attempts = "1 attempt" if outage.attempts == 1 else f"{outage.attempts} attempts"
        self._print(f"going on after {outage.down_s:.1f} s and {attempts}")

    def ended(self, rates: Rates | None, how: str) -> None:
        """See `Teller`."""
        self._print(how if rates is None else f"{how}: {_text(rates.average(time.monotonic()))}")

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar(Lines):
    """Shows a bar on standard error."""

    every_s = BAR_S

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            BarColumn(bar_width=14),  # with the text, that fits into 80 columns
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("copying", total=None, text="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def going(self, rates: Rates) -> None:
        """See `Teller`."""
        now_s = time.monotonic()
        if self._is_time(now_s):
            standing = rates.standing(now_s)
            total = None if standing.left is None else standing.records + standing.left
            self._bar.update(self._task, completed=standing.records, total=total, text=_text(standing))

    def ended(self, rates: Rates | None, how: str) -> None:
        """See `Teller`."""
        self._bar.stop()
        super().ended(rates, how)

    def _print(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)


def _opening(name: str, progress: Progress, notes: list[str]) -> list[str]:
    lines = [f"note: {note}" for note in notes]
    if progress.records:
        lines.append(f"copy {name} goes on after {progress.records:,} records")
    elif progress.places:
        lines.append(f"copy {name} goes on")
    else:
        lines.append(f"copy {name} begins")
    return lines


def _text(standing: Standing) -> str:
    text = (
        f"{standing.records:,} {'record' if standing.records == 1 else 'records'},"
        f" {standing.records_per_s:,.0f} records/s, {standing.bytes_per_s / 1e6:,.1f} MB/s"
    )
    if standing.left and standing.eta_s is not None:
        text += f", {standing.left:,} left, {_span(standing.eta_s)}"
    return text


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
