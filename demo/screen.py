"""The display: a table that fills while the year goes by, plain lines without a terminal, and the verdict."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo.check import SKIES, Tallies, Tally, total
from demo.progress import Progress, Week

LINES_EVERY_S = 5.0
NAME_WIDTH = 22
WIDTH_WITHOUT_WEEKS = 66
WEEKS_MAX = 53
BLOCKS = "▁▂▃▄▅▆▇█"
DELAY_MIN, DELAY_MAX = -8.0, 40.0
"""The delays in minutes that the lowest and the highest block represent."""
CALM, WARM, HOT = "sea_green3", "gold3", "indian_red"


class Screen:
    """Shows `Progress`: as a live table on a terminal, otherwise as a line every few seconds."""

    def __init__(self, console: Console, cluster: str) -> None:
        self.console = console
        self._cluster = cluster
        self._line_at = time.monotonic()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show a step while it runs, and afterwards how long it took."""
        began = time.monotonic()
        with self.console.status(f"{what} …", spinner="dots"):
            yield
        self.console.print(f"[dim]  {what} [/][cyan]{time.monotonic() - began:.1f} s[/]", highlight=False)

    @contextlib.contextmanager
    def live(self, progress: Progress) -> Iterator[None]:
        """Refresh the table while the block runs; without a terminal, `tick` writes lines instead."""
        if not self.console.is_terminal:
            yield
            return
        with Live(
            console=self.console,
            get_renderable=lambda: self.render(progress),
            refresh_per_second=4,
            transient=True,
        ):
            yield

    def tick(self, progress: Progress) -> None:
        """Write a line every few seconds if there is no terminal. Called often while the demo runs."""
        if self.console.is_terminal or time.monotonic() - self._line_at < LINES_EVERY_S:
            return
        self._line_at = time.monotonic()
        when = f"{progress.event_time:%d %b %Y}" if progress.event_time else "not begun"
        print(
            f"{when}: {progress.fed:,} flights in, {progress.processed:,} processed,"
            f" {progress.rate:,.0f}/s, lag {progress.lag_s:.1f} s",
            flush=True,
        )

    def final(self, progress: Progress, verdict: RenderableType, logs: Path) -> None:
        """Print the final picture, which stays."""
        table = delays(progress, weeks_max=self.console.width - WIDTH_WITHOUT_WEEKS)
        self.console.print("", table, "", verdict, next_steps(logs), sep="\n")

    def render(self, progress: Progress) -> RenderableType:
        """Return the whole picture."""
        weeks_max = self.console.width - WIDTH_WITHOUT_WEEKS
        table = delays(progress, rows_max=self.console.height - 9, weeks_max=weeks_max)
        note = Text("  mean delays in minutes; a week counts when the watermark has passed it", style="dim italic")
        return Group(self._header(progress), Text(), table, note)

    def _header(self, progress: Progress) -> RenderableType:
        when = f"{progress.event_time:%e %b %Y}" if progress.event_time else "waiting"
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        bar = ProgressBar(total=progress.flights, completed=progress.fed, width=36, complete_style="cyan")
        replay = Table.grid(padding=(0, 2))
        replay.add_row(bar, Text(when, style="bold"), Text(f"{progress.fed / progress.flights:4.0%}", style="dim"))
        grid.add_row("  cluster", Text(self._cluster))
        grid.add_row("  replay", replay)
        grid.add_row(
            "  flights",
            Text.assemble(
                (f"{progress.fed:,}", "bold"), (" in   ", "dim"),
                (f"{progress.processed:,}", "bold"), (" processed   ", "dim"),
                (f"{progress.rate:,.0f}", "bold"), (" /s   lag ", "dim"),
                (f"{progress.lag_s:.1f}", f"bold {HOT if progress.lag_s > 10 else ''}"), (" s", "dim"),
            ),
        )  # fmt: skip
        title = Text.assemble(("  KerA  ", "bold cyan"), ("flights out of New York, 2013, as they happen", "dim"))
        return Group(Text(), title, grid)


def delays(progress: Progress, *, weeks_max: int, rows_max: int = 100) -> Table:
    """Return the table of mean delays per carrier in minutes, the busiest carrier first."""
    found, weeks = progress.found, progress.weeks
    last = max((week.start for week in weeks), default=None)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("  carrier", no_wrap=True, width=NAME_WIDTH)
    for name in ("flights", "depart", "arrive", "fair", "rain"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    newest = f"until {last + dt.timedelta(days=6):%d %b}" if last else ""
    table.add_column(Text(newest, justify="right"), no_wrap=True)
    per_carrier = {carrier: total(tally for (its, _), tally in found.items() if its == carrier) for carrier, _ in found}
    for carrier, tally in sorted(per_carrier.items(), key=lambda item: -item[1].flights)[: max(rows_max, 1)]:
        table.add_row(
            "  " + progress.carriers[carrier].removesuffix(" Inc.").removesuffix(" Co.").removesuffix(" Corporation"),
            f"{tally.flights:,}",
            _minutes(tally.dep_delay, tally.departed),
            _minutes(tally.arr_delay, tally.arrived),
            *(_arrival(found, carrier, sky) for sky in ("fair", "rain")),
            _sparkline(weeks, carrier, last, min(weeks_max, WEEKS_MAX)),
        )
    return table


def verdict(progress: Progress, right: Tallies, differences: list[str], stored: int, batch_s: float) -> RenderableType:
    """Return a panel with the result of the check, and the measurements."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right")
    grid.add_column()
    if differences:
        title, colour = f"✘ {len(differences)} sums differ from the source", HOT
        for line in differences[:10]:
            grid.add_row("", line)
        if progress.late:
            grid.add_row(f"{progress.late:,}", "rows were behind the watermark: this machine stood still for seconds")
    else:
        carriers = len({carrier for carrier, _ in right})
        title, colour = (
            f"✔ equal to the source, by {carriers} carriers and {len(SKIES)} kinds of weather",
            CALM,
        )
        every = total(right.values())
        unknown = total(tally for (_, sky), tally in right.items() if sky == "unknown").flights
        for amount, what in (
            (every.flights, f"flights, each of them once ({every.flights - every.departed:,} were cancelled)"),
            (every.flights - unknown, f"joined with the weather of their hour ({unknown:,} have none)"),
            (every.dep_delay, "minutes late at departure"),
            (every.arr_delay, "minutes late at arrival"),
            (every.distance, "miles"),
        ):
            grid.add_row(Text(f"{amount:,}", style="bold"), Text(what, style="dim"))
    seconds = progress.steps[-1].at - progress.steps[0].at
    grid.add_row()
    for figure, what in (
        (f"{progress.fed / seconds:,.0f} /s", f"flights for {seconds:.0f} s: the pace of the replay, not the limit"),
        (f"{progress.latency_s(0.5):.1f} s", f"from acknowledged to processed (p99 {progress.latency_s(0.99):.1f} s)"),
        (f"{batch_s:.1f} s", f"to read all {stored:,} rows again as a batch"),
    ):
        grid.add_row(Text(figure, style="bold"), Text(what, style="dim"))
    return Panel(grid, title=Text(title, style=f"bold {colour}"), border_style=colour, padding=(1, 3), expand=False)


def next_steps(logs: Path) -> RenderableType:
    """Return suggestions for what to look at next."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan")
    grid.add_column(style="dim")
    grid.add_row("  kera dev", "a cluster to play with on this machine")
    grid.add_row("  demo/job.py", "the Spark query of this demo")
    grid.add_row("  docs/spark.md", "the connector and its options")
    grid.add_row(f"  {logs}", "logs of Spark and of the cluster")
    return grid


def _minutes(amount: int, count: int) -> Text:
    if not count:
        return Text("–", style="dim")
    mean = amount / count
    return Text(f"{mean:+.1f}", style=_colour(mean))


def _arrival(found: Tallies, carrier: str, sky: str) -> Text:
    tally = found.get((carrier, sky), Tally())
    return _minutes(tally.arr_delay, tally.arrived)


def _sparkline(weeks: dict[Week, Tally], carrier: str, last: dt.datetime | None, count: int) -> Text:
    """Return a line of blocks for the mean delays at arrival in the last `count` weeks."""
    line = Text()
    if last is None:
        return line
    for back in reversed(range(count)):
        tally = weeks.get(Week(carrier, last - dt.timedelta(weeks=back)), Tally())
        if tally.arrived:
            mean = tally.arr_delay / tally.arrived
            level = (min(max(mean, DELAY_MIN), DELAY_MAX) - DELAY_MIN) / (DELAY_MAX - DELAY_MIN)
            line.append(BLOCKS[round(level * (len(BLOCKS) - 1))], style=_colour(mean))
        else:
            line.append(" ")
    return line


def _colour(mean: float) -> str:
    return CALM if mean < 8 else WARM if mean < 20 else HOT
