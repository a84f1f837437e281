"""The screen of ``kera top``: keys, tables, and the time between refreshes. Other modules decide what it shows.

One task asks and shows, so that a slow answer only delays the next refresh: keys work all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, ClassVar, NamedTuple

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Input, Static

from kera.cli.top._collector import Collector
from kera.cli.top._details import details
from kera.cli.top._document import heading
from kera.cli.top._input import TolerantDriver
from kera.cli.top._rows import Snapshot
from kera.cli.top._sample import Sample
from kera.cli.top._snapshot import snapshot
from kera.cli.top._text import time_of_day
from kera.cli.top._views import BY_NAME, FILTERED, VIEWS, Column, Order, View, shown

PROSE = {"WHY", "WORST HOP"}
"""Columns of words, aligned to the left, although their largest values come first."""
INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""The intervals that + and - choose from."""
KEYS = "1-6 view  Enter open  / filter  < > sort  r reverse  p pause  ? help  q quit"
HELP = """\
 1 to 6, Tab    brokers, backups, streams, groups, findings, latency
 up, down       choose a row; what is wrong with it is below the table
 Enter          look at it in full; Esc goes back
 < >            sort by the column to the left, to the right
 r              sort the other way round
 /              filter: only rows with this text; an empty one shows all
 Esc            no filter
 + -            refresh less often, more often
 p, Space       pause, go on
 q, Ctrl-C      quit

 REC/S          records written per second
 IN/S, OUT/S    bytes written and read per second, of chunks
 P99            99 of 100 writes were answered within this time
 LOOP           part of the time for which the event loop is at work;
                near 100% everybody waits for it
 MEM            part of a broker's arena, of a backup's memory, in use
 LAG            of brokers and streams: bytes that backups do not have;
                of groups: records that they have not read
 LAG/S          by so many records a second the lag of a group grows
 BEHIND         age of the oldest record that a group has not read
 KIND           consumers that share streams; spark: a query; cursor: of a
                query or a program that has named it itself
 MEAN, P99      what records take for the path of a latency constraint
 USED           part of its limit, of that which the limit is of
 VIOL           windows in which it was not held

 - is what nobody knows (yet). Any key goes back."""


class Options(NamedTuple):
    """The arguments of the command."""

    interval_s: float
    view: str
    wanted: str
    """The filter of the views that have one."""


class Help(ModalScreen[None]):
    """The help: keys, and the meaning of columns."""

    def compose(self) -> ComposeResult:
        """See `Screen`."""
        with VerticalScroll():
            yield Static(HELP, id="help", markup=False)

    def on_key(self) -> None:
        """Go back, at any key."""
        self.dismiss()


class Details(Screen[None]):
    """The screen with one row in full."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,left,backspace", "app.pop_screen", "back"),
        Binding("question_mark", "app.help", "help"),
    ]

    def __init__(self, view: View, key: str) -> None:
        super().__init__()
        self.view = view
        self.key = key
        self._is_there = False
        """Whether the widgets on the screen exist, and can be changed."""

    def compose(self) -> ComposeResult:
        """See `Screen`."""
        yield Static("", id="heading", markup=False)
        with VerticalScroll(can_focus=True):
            yield Static("", id="details", markup=False)
        yield Static("Esc back  up, down scroll  p pause  ? help  q quit", id="keys", markup=False)

    def on_mount(self) -> None:
        """Show the latest snapshot."""
        self._is_there = True
        if isinstance(self.app, Top):
            self.app.show()

    def show(self, found: Snapshot, status: str) -> None:
        """Show the row as it is in a new snapshot."""
        if self._is_there:
            self.query_one("#heading", Static).update("\n".join(_lines(found, status)))
            self.query_one("#details", Static).update(details(self.view, self.key, found))


def _lines(found: Snapshot, status: str) -> tuple[str, ...]:
    first, second = heading(found)
    return f"{first}  {status}", second


class Top(App[None]):
    """The application `kera top`. Its keys work while a slow answer delays the next refresh."""

    CSS = """
    Screen { background: $background; }
    #heading { height: auto; text-style: bold; padding: 0 1; }
    #notes { height: auto; max-height: 4; padding: 0 1; color: $warning; text-style: bold; display: none; }
    #tabs { height: auto; max-height: 2; padding: 0 1; background: $panel; }
    DataTable { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; background: $background; }
    #why { height: auto; max-height: 3; padding: 0 1; color: $warning; }
    #filter { height: 1; border: none; padding: 0 1; display: none; }
    #keys { height: 1; padding: 0 1; background: $panel; }
    VerticalScroll { scrollbar-size-vertical: 1; }
    #help, #details { padding: 0 1; height: auto; }
    Help { align: center middle; }
    Help VerticalScroll { width: 78; max-width: 100%; height: 90%; background: $panel; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"view({view.name!r})", view.title) for number, view in enumerate(VIEWS, 1)),
        Binding("tab", "next_view(1)", "next view", priority=True),
        Binding("shift+tab", "next_view(-1)", "view before", priority=True),
        Binding("less_than_sign,comma", "sort(-1)", "sort by the column to the left"),
        Binding("greater_than_sign,full_stop", "sort(1)", "sort by the column to the right"),
        Binding("r", "reverse", "the other way round"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "no_filter", "no filter"),
        Binding("plus,equals_sign", "interval(1)", "refresh less often"),
        Binding("minus", "interval(-1)", "refresh more often"),
        Binding("p,space", "pause", "pause"),
        Binding("question_mark", "help", "help"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
    ]

    def __init__(self, collector: Collector, options: Options, first: Sample) -> None:
        super().__init__(driver_class=TolerantDriver)
        self._collector = collector
        self._interval_s = options.interval_s
        self._view = BY_NAME[options.view]
        self._orders = {view.name: Order.of(view) for view in VIEWS}
        for name in FILTERED:
            self._orders[name] = self._orders[name]._replace(filter=options.wanted)
        self._found = snapshot(first)
        self._paused = False
        self._soon = asyncio.Event()
        """Set when the next refresh must not wait for its time."""
        self._at = ""
        """The key of the row that the cursor is on."""
        self._keys: list[str] = []
        """Keys of the table's rows."""
        self._whys: list[str] = []
        self._columns: tuple[str, ...] = ()
        """Titles of the table's columns."""

    def compose(self) -> ComposeResult:
        """See `App`."""
        yield Static("", id="heading", markup=False)
        yield Static("", id="notes", markup=False)
        yield Static("", id="tabs", markup=False)
        yield DataTable(cursor_type="row", zebra_stripes=False)
        yield Static("", id="why", markup=False)
        yield Input(placeholder="filter", id="filter", compact=True)
        yield Static(KEYS, id="keys", markup=False)

    def on_mount(self) -> None:
        """Show the first sample, and start the task that asks."""
        self.title = "kera top"
        self.query_one(DataTable).focus()
        self.show()
        self.run_worker(self._ask_again(), exit_on_error=True)

    async def _ask_again(self) -> None:
        while True:
            begun_s = time.monotonic()
            self._soon.clear()
            if not self._paused:
                await self.look()
            left_s = self._interval_s - (time.monotonic() - begun_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, left_s)):
                    await self._soon.wait()

    async def look(self) -> None:
        """Ask once, and show the answers."""
        screen = self.screen
        view, key = (screen.view.name, screen.key) if isinstance(screen, Details) else ("", "")
        self._collector.wanted_group = key if view == "groups" else ""
        self._collector.wanted_constraint = key if view == "latency" else ""
        sample = await self._collector.sample()
        found = await asyncio.to_thread(snapshot, sample)  # with ten thousand streams it is slow, and keys must work
        if not self._paused:
            self._found = found
            self.show()

    # -- showing ---------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        state = "paused" if self._paused else f"every {self._interval_s:g} s"
        return f"{time_of_day(self._found.at_us)}, {state}"

    def show(self) -> None:
        """Show the latest snapshot on all screens."""
        for screen in self.screen_stack:
            if isinstance(screen, Details):
                screen.show(self._found, self._status)
        base = self.screen_stack[0]
        base.query_one("#heading", Static).update("\n".join(_lines(self._found, self._status)))
        notes = base.query_one("#notes", Static)
        notes.display = bool(self._found.notes)
        notes.update("\n".join(f"! {note}" for note in self._found.notes))
        self._show_table(base.query_one(DataTable))

    def _show_table(self, table: DataTable[Text]) -> None:
        view, order = self._view, self._orders[self._view.name]
        found = shown(view, self._found, order)
        titles = tuple(
            f"{column.title}{_arrow(column.falling is not order.reverse) if number == order.column else ''}"
            for number, column in enumerate(view.columns)
        )
        at = self._at
        if titles != self._columns:
            table.clear(columns=True)
            table.add_columns(*titles)
            self._columns = titles
        scrolled = table.scroll_offset
        self._keys = [view.key(row) for row in found.rows]
        self._whys = ["; ".join(view.why(row)) for row in found.rows]
        with self.batch_update(), self.prevent(DataTable.RowHighlighted):
            table.clear()
            for row in found.rows:
                table.add_row(*(_cell(column, row) for column in view.columns))
            if at in self._keys:
                table.move_cursor(row=self._keys.index(at), animate=False, scroll=False)
                table.scroll_to(scrolled.x, scrolled.y, animate=False)
        self._at = at if at in self._keys else self._keys[0] if self._keys else ""
        self._show_why()
        tabs = [
            f"[{number} {each.title}]" if each is view else f" {number} {each.title} "
            for number, each in enumerate(VIEWS, 1)
        ]
        told = f"  {found.text}" + (f'  filter "{order.filter}"' if order.filter else "")
        self.screen_stack[0].query_one("#tabs", Static).update("".join(tabs) + told)

    def _show_why(self) -> None:
        why = self._whys[self._keys.index(self._at)] if self._at in self._keys else ""
        self.screen_stack[0].query_one("#why", Static).update(f"! {why}" if why else "")

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Remember the row when the cursor has moved, and show its problems."""
        if 0 <= event.cursor_row < len(self._keys):
            self._at = self._keys[event.cursor_row]
            self._show_why()

    # -- keys ------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the table's actions while another screen is on top."""
        del parameters
        on_top = len(self.screen_stack) == 1
        if action in {"view", "next_view", "sort", "reverse", "filter", "no_filter", "interval"}:
            return on_top
        return True

    def action_view(self, name: str) -> None:
        """Show another view."""
        self._end_filter()  # what is typed there is for the view before
        self._view, self._at = BY_NAME[name], ""
        self.show()

    def action_next_view(self, by: int) -> None:
        """Show the view beside this one."""
        names = [view.name for view in VIEWS]
        self.action_view(names[(names.index(self._view.name) + by) % len(names)])

    def action_sort(self, by: int) -> None:
        """Sort by the column beside the present one."""
        order = self._orders[self._view.name]
        column = (order.column + by) % len(self._view.columns)
        self._orders[self._view.name] = order._replace(column=column, reverse=False)
        self.show()

    def action_reverse(self) -> None:
        """Reverse the order of rows."""
        order = self._orders[self._view.name]
        self._orders[self._view.name] = order._replace(reverse=not order.reverse)
        self.show()

    def action_filter(self) -> None:
        """Open the field to type a filter."""
        field = self.query_one("#filter", Input)
        field.value = self._orders[self._view.name].filter
        field.display = True
        self.screen.set_focus(field)  # at once, so that the next key goes to the field

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter as it is typed."""
        if event.input.display:
            self._filter(event.value)

    def on_input_submitted(self) -> None:
        """Keep the filter, and give the focus back to the table."""
        self._end_filter()

    def _filter(self, text: str) -> None:
        self._orders[self._view.name] = self._orders[self._view.name]._replace(filter=text)
        self.show()

    def _end_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.screen.set_focus(self.query_one(DataTable))

    def action_no_filter(self) -> None:
        """Remove the filter."""
        self._filter("")
        self._end_filter()

    def action_interval(self, by: int) -> None:
        """Choose the next longer or shorter interval."""
        longer = [each for each in INTERVALS_S if each > self._interval_s]
        shorter = [each for each in INTERVALS_S if each < self._interval_s]
        if by > 0 and longer:
            self._interval_s = longer[0]
        elif by < 0 and shorter:
            self._interval_s = shorter[-1]
        self.show()

    def action_pause(self) -> None:
        """Pause, or go on."""
        self._paused = not self._paused
        self.show()

    def action_help(self) -> None:
        """Show the help."""
        if not isinstance(self.screen, Help):
            self.push_screen(Help())

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the details of the selected row."""
        if 0 <= event.cursor_row < len(self._keys):
            self.push_screen(Details(self._view, self._keys[event.cursor_row]))
            if self._view.name == "latency":
                self._soon.set()  # a refresh, as hops are only asked for the constraint that is open


def _arrow(falling: bool) -> str:
    return " ▼" if falling else " ▲"


def _cell(column: Column, row: Any) -> Text:
    """Return the text of a cell, without markup, as users choose names. Numbers go to the right, bad states are red."""
    text = column.text(row)
    if column.well:
        return Text(text, style="" if text in column.well else "bold red")
    return Text(text, justify="right" if column.falling and column.title not in PROSE else "left")
