"""``kera consume``: records of a stream on standard output."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._run import UsageError, run_async, silence_stdout

if TYPE_CHECKING:
    from kera.cli._format import Formatter
    from kera.client import Consumer, GroupConsumer, StreamDescription


class Start(enum.StrEnum):
    """Where to begin."""

    EARLIEST = "earliest"
    LATEST = "latest"


def consume(
    stream: str = typer.Argument(..., metavar="STREAM", help="Name of the stream."),
    start: Start = typer.Option(
        Start.EARLIEST, "--from", help="Begin with the oldest record, or with the next new one."
    ),
    group: str | None = typer.Option(
        None,
        "--group",
        "-g",
        metavar="NAME",
        help="Share the stream with all who consume as this group, and go on where it has stopped.",
    ),
    count: int | None = typer.Option(None, "--count", "-c", min=1, metavar="N", help="Stop after N records."),
    until_end: bool = typer.Option(False, "--until-end", "-e", help="Stop at what is the end now; else wait for more."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object per record."),
    template: str | None = typer.Option(
        None,
        "--format",
        "-f",
        metavar="TEXT",
        help=r"%s value, %k key, %t stream, %p streamlet, %e entry, %o offset, %T time in µs, %%; \n, \t, …",
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    r"""Print the records of a stream as they come.

    That is the values, one per line, or what --format or --json say. The format is kcat's: -f '%k %s\n'
    prints key and value. Records of one entry come in their order. Typed streams are printed as JSON rows
    unless there is a format. With --group, each record goes to one consumer of the group, and --from says
    where a new group begins.
    """
    if as_json and template is not None:
        raise UsageError("--json and --format exclude each other")
    if group is not None and until_end:
        raise UsageError("--group and --until-end exclude each other: where a group is at its end changes all the time")
    run_async(_consume(bootstrap, stream, group, start, count, until_end, as_json, template))


async def _consume(
    bootstrap: str,
    name: str,
    group: str | None,
    start: Start,
    count: int | None,
    until_end: bool,
    as_json: bool,
    template: str | None,
) -> None:
    async with connected(bootstrap) as client:
        formatter = _formatter(await client.describe(name), as_json, template)
        consumer: Consumer | GroupConsumer
        if group is not None:
            consumer = client.group_consumer(group, name, start=start.value)
        else:
            consumer = client.consumer(name, start=start.value, end="latest" if until_end else None)
        printing = asyncio.ensure_future(_print_batches(consumer, count, formatter))
        with _cancelled_when_nobody_reads(printing) as reader_gone:
            try:
                await printing
            except BrokenPipeError:
                reader_gone.set()
            except asyncio.CancelledError:
                if not reader_gone.is_set():
                    raise
        if reader_gone.is_set():
            silence_stdout()


def _formatter(stream: StreamDescription, as_json: bool, template: str | None) -> Formatter:
    from kera.cli._format import json_formatter, text_formatter

    if template is not None:
        return text_formatter(template, stream)
    if as_json or stream.typed:
        return json_formatter(stream)
    return text_formatter(r"%s\n", stream)


async def _print_batches(consumer: Consumer | GroupConsumer, count: int | None, formatter: Formatter) -> None:
    from kera.cli._format import Place
    from kera.client import GroupConsumer

    remaining = count
    async with consumer:
        async for chunk in consumer.batches():
            batch = chunk.batch if remaining is None else chunk.batch.slice(0, remaining)
            place = Place(chunk.entry.streamlet_id, chunk.entry.entry, chunk.header.first_record)
            _write_all(formatter(batch, place))
            if remaining is not None:
                remaining -= batch.num_rows
                if remaining == 0:
                    if isinstance(consumer, GroupConsumer) and batch.num_rows == chunk.batch.num_rows:
                        await consumer.commit()  # of a chunk that was not printed to its end, others print all
                    return


def _write_all(data: Any) -> None:
    # Blocks when the reader is slow, and so holds up nothing but this command; records must not pile up here.
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


@contextlib.contextmanager
def _cancelled_when_nobody_reads(task: asyncio.Future[None]) -> Iterator[asyncio.Event]:
    """Cancel `task` when the pipe that we write to loses its reader (``| head``), even if nothing comes."""
    gone, loop, fd = asyncio.Event(), asyncio.get_running_loop(), sys.stdout.fileno()

    def note() -> None:
        gone.set()
        task.cancel()

    def watch() -> None:
        # Not on the loop: that would make the pipe non-blocking, for other programs that write to it as well.
        poll = select.poll()
        poll.register(fd, 0)  # errors are always told
        poll.poll()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(note)

    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        threading.Thread(target=watch, name="kera-stdout", daemon=True).start()
    yield gone
