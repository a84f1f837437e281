"""``kera top``: a live view of a cluster in the terminal, and the same figures as a document.

    _sample     raw figures of one moment
    _rates      rates of counters, from two answers
    _rows       the rows to show; made by _members, _groups, _constraints and _snapshot
    _text       numbers as text
    _views      columns, order, filter: which rows are on the screen
    _details    one row in full
    _document   a snapshot as JSON or YAML, and as tables
    _polling    repeats questions, and never waits for slow daemons
    _collector  gathers samples
    _input      the terminal for Textual
    _app        the screen, with Textual

Everything but the last four is pure. Only the last two import Textual, so printing a document does not need it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from typing import TYPE_CHECKING

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._output import INTERNAL_OPTION, OUTPUT_OPTION, Output, show_document
from kera.cli._run import UsageError, extra, run_async
from kera.cli._streams import silence_stdout
from kera.core.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kera.cli.top._app import Options
    from kera.cli.top._collector import Collector
    from kera.cli.top._rows import Snapshot
    from kera.cli.top._sample import Sample

INTERVAL_S = 2.0
INTERVAL_S_MIN = 0.2
INTERVAL_S_MAX = 3600.0
RETRY_MS = 1000
REQUEST_MS = 3000
"""A view shows that a daemon does not answer, and asks again: so it waits for less time than other programs."""
PATIENCE_S = 4.0
"""How long a single output, and the first look of a view, wait for slow daemons."""
ROWS = 20
"""Maximum of each table that is printed."""
VIEW_NAMES = ("brokers", "backups", "streams", "groups", "findings", "latency")


def top(
    interval: float = typer.Option(
        INTERVAL_S,
        "--interval",
        "-i",
        metavar="SECONDS",
        help=f"Time between refreshes, over which rates are measured: {INTERVAL_S_MIN} to {INTERVAL_S_MAX:.0f}.",
    ),
    view: str | None = typer.Option(
        None, "--view", metavar="NAME", help=f"To begin with: {', '.join(VIEW_NAMES)}. Default: {VIEW_NAMES[0]}."
    ),
    wanted: str = typer.Option(
        "", "--filter", metavar="TEXT", help="Only streams, groups and latency constraints that have it in a row."
    ),
    once: bool = typer.Option(False, "--once", help="Print one snapshot and end; so does --output json or yaml."),
    rows: int | None = typer.Option(
        None, "--rows", min=1, max=1_000_000, metavar="N", help=f"Rows of each table, with --once. Default: {ROWS}."
    ),
    internal: bool = INTERNAL_OPTION,
    output: Output = OUTPUT_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Watch brokers, backups, streams, consumer groups and Spark queries: rates, lag, latency, and slow parts.

    Press ? in it for its keys. Without a terminal, --json or --once print what it shows.
    """
    if not INTERVAL_S_MIN <= interval <= INTERVAL_S_MAX:
        raise UsageError(f"--interval: {interval:g} is not from {INTERVAL_S_MIN} to {INTERVAL_S_MAX:.0f} seconds")
    if view is not None and view not in VIEW_NAMES:
        raise UsageError(f"--view: there is no {view!r}; there are {', '.join(VIEW_NAMES)}")
    _check_together(view, wanted, rows, once=once, document=output.is_document)
    if once or output.is_document:
        _print(run_async(_once(bootstrap, interval, internal=internal)), output, wanted, rows or ROWS)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("kera top needs a terminal; without one, --json or --once print one snapshot")
    with extra("top"):
        from kera.cli.top._app import Options
    try:
        options = Options(interval, view or VIEW_NAMES[0], wanted)
        run_async(_live(bootstrap, options, internal=internal), logged_from=logging.CRITICAL)
    except typer.Exit as ended:
        if ended.exit_code == 128 + signal.SIGHUP:
            silence_stdout()  # the terminal is gone
        raise


def _check_together(view: str | None, wanted: str, rows: int | None, *, once: bool, document: bool) -> None:
    """Raise `UsageError` for an option that would have no effect."""
    if document and (wanted or rows is not None):
        raise UsageError(f"{'--filter' if wanted else '--rows'} has no effect on JSON and YAML, which have all rows")
    if view is not None and (once or document):
        raise UsageError("--view has no effect on a snapshot, which has all views")
    if rows is not None and not once:
        raise UsageError("--rows needs --once: the live view shows as many rows as the terminal has")


def _print(found: Snapshot, output: Output, wanted: str, rows: int) -> None:
    from kera.cli.top._document import document, tables

    if output.is_document:
        show_document(document(found), output)
    else:
        print(tables(found, wanted, rows))


@contextlib.asynccontextmanager
async def _collecting(bootstrap: str, *, internal: bool, in_full: bool = False) -> AsyncIterator[Collector]:
    """Context manager that yields a collector for the cluster; see `Collector`.

    `internal`: include internal streams and groups. `in_full`: include the hops of latency constraints.
    """
    from kera.cli.top._collector import HOPS_OF_MAX, Collector
    from kera.client.admin.watching import Watch

    async with connected(bootstrap, retry_timeout_ms=RETRY_MS, request_timeout_ms=REQUEST_MS) as client:
        collector = Collector(Watch(client.admin), hops_of_max=HOPS_OF_MAX if in_full else 0, internal=internal)
        try:
            yield collector
        finally:
            await collector.close()


async def _first(collector: Collector, bootstrap: str) -> Sample:
    """Return the first sample. Raises `Unavailable` when no coordinator that leads answers."""
    sample = await collector.sample(patience_s=PATIENCE_S)
    trouble = sample.cluster_trouble
    if sample.cluster is None and trouble is not None and not trouble.refused:
        raise Unavailable(f"no coordinator that leads answers at {bootstrap}: {trouble.text}")
    return sample


async def _once(bootstrap: str, interval_s: float, *, internal: bool) -> Snapshot:
    """Return a snapshot after an interval, with rates over the interval."""
    import asyncio

    from kera.cli.top._snapshot import snapshot

    async with _collecting(bootstrap, internal=internal, in_full=True) as collector:
        await _first(collector, bootstrap)
        await asyncio.sleep(interval_s)
        return snapshot(await collector.sample(patience_s=PATIENCE_S))


async def _live(bootstrap: str, options: Options, *, internal: bool) -> None:
    import asyncio

    from kera.cli.top._app import Top

    async with _collecting(bootstrap, internal=internal) as collector:
        first = await _first(collector, bootstrap)
        await Top(collector, options, first).run_async()
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # by a signal, at which Textual returns as if a key had ended it
        raise asyncio.CancelledError
