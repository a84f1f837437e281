"""``kera consume``: prints the records of a stream on standard output."""

from __future__ import annotations

import contextlib
import enum
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._durations import parse_duration_ms
from kera.cli._run import UsageError, run_async
from kera.cli._streams import silence_stdout, warn
from kera.cli._times import parse_time_us
from kera.core.errors import CorruptChunk, DataLost, InvalidArgument

if TYPE_CHECKING:
    import asyncio

    from kera.cli._format import Formatter
    from kera.client import Client, Consumer, EntryBounds, GroupConsumer, OrderedConsumer, StreamDescription
    from kera.client.positions import Places


OFFSET_MAX = (1 << 63) - 1


class CorruptChunks(enum.StrEnum):
    """The treatment of a chunk that cannot be read, as in the consumer's settings."""

    FAIL = "fail"
    SKIP = "skip"


class StartPosition(enum.StrEnum):
    """The values of ``--from``."""

    EARLIEST = "earliest"
    LATEST = "latest"


def consume(
    streams: list[str] = typer.Argument(
        ..., metavar="STREAM...", help="Name of the stream; with --ordered there may be several."
    ),
    start: StartPosition | None = typer.Option(
        None, "--from", help="Start at the oldest record (the default), or at the next new one."
    ),
    since: str | None = typer.Option(
        None,
        "--since",
        metavar="TIME",
        help="Start at a time: 30s, 10min, 2h or 1d ago, or 2026-01-31T12:00 (local) or …Z.",
    ),
    offset: int | None = typer.Option(
        None,
        "--offset",
        min=0,
        max=OFFSET_MAX,
        metavar="N",
        help="Start at the record with this offset, in each streamlet and entry.",
    ),
    last: int | None = typer.Option(
        None, "--last", min=1, metavar="N", help="Start with the last N records of each streamlet and entry."
    ),
    streamlet: list[int] | None = typer.Option(
        None, "--streamlet", min=0, metavar="K", help="Read only this streamlet; may be repeated. Default: all."
    ),
    group: str | None = typer.Option(
        None,
        "--group",
        "-g",
        metavar="NAME",
        help="Consume as a member of this consumer group, starting from its committed cursors.",
    ),
    count: int | None = typer.Option(None, "--count", "-c", min=1, metavar="N", help="Stop after N records."),
    until_end: bool = typer.Option(
        False, "--until-end", "-e", help="Stop at the current end instead of waiting for more."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object per record."),
    template: str | None = typer.Option(
        None,
        "--format",
        "-f",
        metavar="TEXT",
        help=r"%s value, %k key, %h headers, %t stream, %p streamlet, %e entry, %o offset, %T time (µs), %%; \n, …",
    ),
    raw: bool = typer.Option(
        False, "--raw", help="Do not escape control characters on a terminal; they are never escaped in a pipe."
    ),
    corrupt_chunks: CorruptChunks = typer.Option(
        CorruptChunks.FAIL,
        "--corrupt-chunks",
        help="How to treat a chunk that cannot be read: fail, or skip it with a warning.",
    ),
    skip_lost: bool = typer.Option(
        False, "--skip-lost", help="Continue behind records that are gone, with a warning, instead of failing."
    ),
    ordered: bool = typer.Option(
        False,
        "--ordered",
        help="Deliver in the order of time, the same for all readers; for streams with epochs, see docs/epochs.md.",
    ),
    epoch: str | None = typer.Option(
        None, "--epoch", metavar="TIME", help="With --ordered: epochs of this length, a multiple of the streams'."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    r"""Print the records of a stream as they arrive.

    Prints the values, one per line, unless --format or --json is given. The format is kcat's: -f '%k %s\n'
    prints key and value. Records of an entry are printed in order. Typed streams are printed as JSON rows
    unless there is a format. With --group, each record is delivered to one consumer of the group, and --from
    is where a new group starts. With --ordered, records come when their epoch is closed.
    """
    if as_json and template is not None:
        raise UsageError("--json and --format are mutually exclusive")
    if group is not None and until_end:
        raise UsageError("--group and --until-end are mutually exclusive: the end of what a group reads keeps changing")
    _check_begin({"--from": start, "--since": since, "--offset": offset, "--last": last}, streamlet, group)
    since_us = None if since is None else parse_time_us(since, time.time_ns() // 1000, name="--since")
    begin = _Begin("latest" if start is StartPosition.LATEST else "earliest", since_us, offset, last, streamlet or None)
    shape = _Shape(as_json, template, raw)
    _check_order(streams, group, epoch, ordered=ordered, skip_lost=skip_lost)
    if ordered:
        if begin.is_by_place:
            raise UsageError("--offset, --last and --streamlet do not go with --ordered, which reads all by time")
        length_ms = None if epoch is None else parse_duration_ms(epoch, name="--epoch")
        run_async(_consume_ordered(bootstrap, streams, length_ms, begin, count, until_end, shape, corrupt_chunks.value))
    else:
        settings = {"corrupt_chunks": corrupt_chunks.value, "on_data_lost": "skip" if skip_lost else "raise"}
        run_async(_consume(bootstrap, streams[0], group, begin, count, until_end, shape, settings))


class _Begin(NamedTuple):
    """Which records to read; at most one of `since_us`, `offset` and `last` is set."""

    where: Literal["earliest", "latest"]
    since_us: int | None
    offset: int | None
    last: int | None
    streamlets: list[int] | None
    """None: all."""

    @property
    def is_by_place(self) -> bool:
        return self.offset is not None or self.last is not None or self.streamlets is not None

    async def places(
        self, client: Client, stream: StreamDescription, *, until_end: bool
    ) -> Literal["earliest", "latest"] | Places:
        """Return the places where a consumer starts; it leaves out earlier records, also within a chunk.

        With `until_end`, raises `InvalidArgument` for an offset beyond the end, as there would be nothing to read.
        """
        chosen = sorted(stream.assignments) if self.streamlets is None else self.streamlets
        for streamlet in chosen:
            stream.entry_id(streamlet, 0)  # fails for an unknown streamlet before brokers are asked
        if self.since_us is not None:
            places = await client.positions_at(stream.name, self.since_us, unit="record")
            return {streamlet: places[streamlet] for streamlet in chosen}
        if self.offset is None and self.last is None:
            return self.where
        bounds = await client.bounds(stream.name)
        entries = [entry for each in chosen for entry in bounds[each]]
        self._check_offset(stream.name, [entry.next_record for entry in entries], until_end)
        self._warn_of_removed(stream.name, [entry.first_record for entry in entries])
        return await client.positions_of(
            stream.name, {streamlet: [self._first(entry) for entry in bounds[streamlet]] for streamlet in chosen}
        )

    def _check_offset(self, name: str, ends: Sequence[int], until_end: bool) -> None:
        end = max(ends, default=0)
        if self.offset is None or self.offset <= end:
            return
        text = f"offset {self.offset} is beyond the end of stream {name!r}: its next record has offset {end}"
        if until_end:
            raise InvalidArgument(text, stream=name, offset=self.offset)
        warn(f"{text}; waiting for offset {self.offset}")

    def _warn_of_removed(self, name: str, starts: Sequence[int]) -> None:
        """`starts`: the offset of the oldest record of each entry."""
        removed = sum(self.offset < start for start in starts) if self.offset is not None else 0
        if removed:
            warn(
                f"stream {name!r} no longer has offset {self.offset} in {removed} of {len(starts)} entries, which are"
                " read from their oldest record"
            )

    def _first(self, entry: EntryBounds) -> int:
        """Return the offset to start at: the nearest to the wanted one that the entry has."""
        wanted = entry.next_record - (self.last or 0) if self.offset is None else self.offset
        return min(max(wanted, entry.first_record), entry.next_record)


def _check_begin(begins: Mapping[str, object], streamlets: Sequence[int] | None, group: str | None) -> None:
    """Raise `UsageError` for several places to begin, or one that a group cannot take."""
    given = [option for option, value in begins.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} are mutually exclusive")
    not_for_groups = [*(option for option in given if option != "--from"), *(["--streamlet"] if streamlets else [])]
    if group is not None and not_for_groups:
        raise UsageError(
            f"{not_for_groups[0]} and --group are mutually exclusive: use kera group reset to move a group's offsets"
        )


def _check_order(
    streams: Sequence[str], group: str | None, epoch: str | None, *, ordered: bool, skip_lost: bool
) -> None:
    """Raise `UsageError` for options that do not go with the order of reading."""
    if ordered and group is not None:
        raise UsageError(
            "--ordered and --group are mutually exclusive: the consumers of a group share the entries of a stream"
        )
    if not ordered and len(streams) > 1:
        raise UsageError("several streams are read in one order only: add --ordered")
    if ordered and skip_lost:
        raise UsageError("--skip-lost does not go with --ordered: readers would no longer get the same epochs")
    if not ordered and epoch is not None:
        raise UsageError("--epoch goes with --ordered")


class _Shape(NamedTuple):
    """How records are printed."""

    as_json: bool
    template: str | None
    raw: bool

    def formatter(self, stream: StreamDescription) -> Formatter:
        printable = sys.stdout.isatty() and not self.raw
        return _formatter(stream, self.as_json, self.template, printable=printable)


async def _consume(
    bootstrap: str,
    name: str,
    group: str | None,
    begin: _Begin,
    count: int | None,
    until_end: bool,
    shape: _Shape,
    settings: dict[str, Any],
) -> None:
    if count is not None:
        settings["joined_bytes_max"] = 0  # a batch that is printed in part is not committed: make it a single chunk
    async with connected(bootstrap) as client:
        stream = await client.describe(name)
        formatter = shape.formatter(stream)
        consumer: Consumer | GroupConsumer
        if group is not None:
            consumer = client.group_consumer(group, name, start=begin.where, **settings)
        else:
            start = await begin.places(client, stream, until_end=until_end)
            end: Literal["latest"] | None = "latest" if until_end else None
            consumer = client.consumer(name, start=start, end=end, streamlets=begin.streamlets, **settings)
        await _until_reader_closes(_print_batches(consumer, count, formatter, begin.offset or 0))


async def _consume_ordered(
    bootstrap: str,
    names: list[str],
    epoch_ms: int | None,
    begin: _Begin,
    count: int | None,
    until_end: bool,
    shape: _Shape,
    corrupt_chunks: str,
) -> None:
    async with connected(bootstrap) as client:
        start: Literal["earliest", "latest"] | int = begin.where
        if begin.since_us is not None:
            streams = [await client.describe(name) for name in names]
            length_ms = epoch_ms or max(stream.config.epoch_ms for stream in streams)
            # A stream without epochs is refused by the consumer.
            start = begin.since_us // (1000 * length_ms) if length_ms else begin.where
        consumer = client.ordered_consumer(
            *names,
            epoch_ms=epoch_ms,
            start=start,
            end="latest" if until_end else None,
            corrupt_chunks=corrupt_chunks,
        )
        await _until_reader_closes(_print_ordered(consumer, count, shape, begin.since_us))


async def _until_reader_closes(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, which prints, until it ends or the reader of standard output closes it."""
    import asyncio

    printing = asyncio.ensure_future(work)
    with _cancelled_when_reader_closes(printing) as reader_gone:
        try:
            await printing
        except CorruptChunk as error:
            text = error.message.replace('corrupt_chunks="skip"', "--corrupt-chunks skip")
            raise CorruptChunk(text, **error.attributes) from error
        except DataLost as error:
            raise DataLost(f"{error.message}, with --skip-lost", **error.attributes) from error
        except BrokenPipeError:
            reader_gone.set()
        except asyncio.CancelledError:
            if not reader_gone.is_set():
                raise
    if reader_gone.is_set():
        silence_stdout()


def _formatter(stream: StreamDescription, as_json: bool, template: str | None, *, printable: bool) -> Formatter:
    """Return the formatter. `printable`: escape the control characters of records, which a terminal would obey."""
    from kera.cli._format import for_terminal, json_formatter, text_formatter

    if template is not None:
        formatter = text_formatter(template, stream)
    elif as_json or stream.typed:
        formatter = json_formatter(stream)
    else:
        formatter = text_formatter(r"%s\n", stream)
    if not printable:
        return formatter
    return lambda batch, place: for_terminal(formatter(batch, place))


async def _print_batches(
    consumer: Consumer | GroupConsumer, count: int | None, formatter: Formatter, first_offset: int
) -> None:
    """Print records from `first_offset` on: the consumer reads an entry that has not reached it yet from its end."""
    from kera.cli._format import RecordOrigin
    from kera.client import GroupConsumer

    remaining = count
    async with consumer:
        async for chunk in consumer.batches():
            skipped = max(0, first_offset - chunk.header.first_record)
            batch = chunk.batch.slice(skipped, remaining)
            if not batch.num_rows:
                continue
            origin = RecordOrigin(chunk.entry.streamlet_id, chunk.entry.entry, chunk.header.first_record + skipped)
            await _write_all(sys.stdout.fileno(), formatter(batch, origin))
            if remaining is not None:
                remaining -= batch.num_rows
                if remaining == 0:
                    if isinstance(consumer, GroupConsumer) and batch.num_rows == chunk.batch.num_rows:
                        await consumer.commit()  # but a chunk that was printed in part goes to other consumers again
                    return


async def _print_ordered(consumer: OrderedConsumer, count: int | None, shape: _Shape, since_us: int | None) -> None:
    import pyarrow.compute as pc

    remaining = count
    formatters: dict[str, Formatter] = {}
    async with consumer:
        async for ordered in consumer.batches():
            batch, origins = ordered.batch, ordered.origins
            if since_us is not None and ordered.epoch * consumer.epoch_ms * 1000 <= since_us:
                # Only the epoch with `since_us` is filtered, so that late records in later epochs are printed.
                wanted = pc.greater_equal(origins["timestamp_us"], since_us)
                batch, origins = batch.filter(wanted), origins.filter(wanted)
            batch, origins = batch.slice(0, remaining), origins.slice(0, remaining)
            formatter = formatters.get(ordered.stream.name)
            if formatter is None:
                formatter = formatters[ordered.stream.name] = shape.formatter(ordered.stream)
            if batch.num_rows:
                await _write_all(sys.stdout.fileno(), formatter(batch, origins))
            if remaining is not None:
                remaining -= batch.num_rows
                if remaining == 0:
                    return


async def _write_all(fd: int, data: Any) -> None:
    """Write `data` to standard output.

    A slow reader holds up the caller on purpose, as records must not pile up here. It does not hold up the event loop,
    which ends the command at a signal, and keeps a consumer in its group.
    """
    view, poll = memoryview(data), select.poll()
    poll.register(fd, select.POLLOUT)
    while view and poll.poll(0):  # then a pipe has room for this much, or an error to raise
        view = view[os.write(fd, view[: select.PIPE_BUF]) :]
    if view:
        await _write_in_thread(fd, view)


async def _write_in_thread(fd: int, view: memoryview) -> None:
    """Write in a thread that a command does not wait for when it ends, unlike those of the event loop."""
    import asyncio

    loop = asyncio.get_running_loop()
    written: asyncio.Future[None] = loop.create_future()

    def settle(error: OSError | None) -> None:
        if written.cancelled():
            return
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(error)

    def write() -> None:
        rest = view
        error: OSError | None = None
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=write, name="kera-output", daemon=True).start()
    await written


@contextlib.contextmanager
def _cancelled_when_reader_closes(task: asyncio.Future[None]) -> Iterator[asyncio.Event]:
    """Cancel `task` when the reader of our pipe closes it (``| head``), even if no record arrives."""
    import asyncio

    gone, loop, fd = asyncio.Event(), asyncio.get_running_loop(), sys.stdout.fileno()

    def note() -> None:
        gone.set()
        task.cancel()

    def watch() -> None:
        # The loop would make the pipe non-blocking, also for other programs that write to it.
        poll = select.poll()
        poll.register(fd, 0)  # errors are always reported
        poll.poll()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(note)

    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        threading.Thread(target=watch, name="kera-stdout", daemon=True).start()
    yield gone
