"""``kera produce``: sends lines of standard input as records of a stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._durations import parse_duration_ms
from kera.cli._partitioner import PARTITIONER_OPTION, PartitionerChoice
from kera.cli._run import UsageError, run_async

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from kera.client import Producer, StreamDescription

ToBatch = Callable[[bytes, int], "pa.RecordBatch"]
"""Converts a block of lines to records; the number of its first line is for messages."""


def produce(
    stream: str = typer.Argument(..., metavar="STREAM", help="Name of the stream."),
    key_separator: str | None = typer.Option(
        None,
        "--key-separator",
        "-K",
        metavar="TEXT",
        help=r"Split each line at TEXT into key and value; a line without TEXT is a value. \t is a tab.",
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Each line is a JSON object with key, value, headers, timestamp; typed streams: a row."
    ),
    header: list[str] | None = typer.Option(
        None, "--header", "-H", metavar="NAME=VALUE", help="Header of each record; may be repeated."
    ),
    durability: str | None = typer.Option(
        None, metavar="LEVEL", help="Acknowledge at leader, replicated or persisted. Default: the stream's level."
    ),
    latency_target: str | None = typer.Option(
        None,
        metavar="TIME",
        help="Time within which records are acknowledged, such as 50ms; they are gathered for as long as it allows.",
    ),
    partitioner: PartitionerChoice | None = PARTITIONER_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Send each line of standard input as a record.

    Prints the number of records and their rate to standard error once all are acknowledged.
    """
    if as_json and key_separator is not None:
        raise UsageError("--json and --key-separator are mutually exclusive")
    if as_json and header:
        raise UsageError("--json and --header are mutually exclusive: lines have headers of their own")
    headers = [_header(text) for text in header or ()]
    if key_separator == "":
        raise UsageError("--key-separator must not be empty")
    separator = None if key_separator is None else _unescaped(key_separator)
    options: dict[str, Any] = {"durability": durability, "partitioner": partitioner}
    if latency_target is not None:
        options["latency_target_ms"] = parse_duration_ms(latency_target, name="--latency-target")
    run_async(_produce(bootstrap, stream, separator, headers, as_json, options))


def _unescaped(key_separator: str) -> bytes:
    from kera.cli._format import unescaped

    return unescaped(key_separator, "--key-separator")


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--header: {text!r} is not of the form name=value")
    return name, value.encode(errors="surrogateescape")


async def _produce(
    bootstrap: str,
    name: str,
    key_separator: bytes | None,
    headers: Sequence[tuple[str, bytes]],
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    import asyncio

    async with connected(bootstrap) as client:
        description = await client.describe(name)
        to_batch = _converter(description, key_separator, headers, as_json)
        async with client.producer(**options) as producer:
            sender = _Sender(producer, name)
            try:
                await _send_all(sender, to_batch)
            except asyncio.CancelledError:  # Ctrl-C: records that were read are still sent
                await sender.finish()
                raise
            except BaseException:
                sender.print_summary()
                raise
            await sender.finish()


def _converter(
    stream: StreamDescription, key_separator: bytes | None, headers: Sequence[tuple[str, bytes]], as_json: bool
) -> ToBatch:
    from kera.client.json_form import records_of_lines, rows_of_lines
    from kera.connect.files.lines import lines_to_batch

    if stream.typed:
        if not as_json:
            raise UsageError(f"{stream.name} is typed: give its rows as JSON objects, with --json")
        return lambda block, first_line: rows_of_lines(block, stream.schema, first_line)
    if as_json:
        return records_of_lines
    return lambda block, _: lines_to_batch(block, key_separator, headers)


async def _send_all(sender: _Sender, to_batch: ToBatch) -> None:
    from kera.cli._stdin import line_blocks

    first_line = 1
    async for block in line_blocks(sys.stdin.fileno()):
        await sender.send(to_batch(block, first_line), len(block))
        first_line += block.count(b"\n")


class _Sender:
    """Sends batches, counts acknowledged records, and keeps the first error."""

    def __init__(self, producer: Producer, stream: str) -> None:

        self._producer = producer
        self._stream = stream
        self._waits: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._records = 0
        self._input_bytes = 0
        self._started_s: float | None = None
        """Time of the first batch: a user may take a while to type it, which must not count."""

    async def send(self, batch: pa.RecordBatch, input_bytes: int) -> None:
        """Hand `batch` to the producer, once that has room for it. Raises the first error of earlier batches."""
        import asyncio

        if self._error is not None:
            raise self._error
        if self._started_s is None:
            self._started_s = time.perf_counter()
        pending = await self._producer.send_batch(self._stream, batch)

        async def wait() -> None:
            await pending
            self._records += batch.num_rows
            self._input_bytes += input_bytes

        task = asyncio.create_task(wait())
        self._waits.add(task)
        task.add_done_callback(partial(self._note_end))

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._waits.discard(task)
        if not task.cancelled() and task.exception() is not None and self._error is None:
            self._error = task.exception()

    async def finish(self) -> None:
        """Wait for all acknowledgements and print their number. Raises the first error."""
        import asyncio

        try:
            await self._producer.flush()
            if self._waits:
                await asyncio.wait(self._waits)
        finally:
            self.print_summary()
        if self._error is not None:
            raise self._error

    def print_summary(self) -> None:
        """Print how many records were acknowledged and, for 1,000 or more, at which rate."""
        seconds = 0.0 if self._started_s is None else time.perf_counter() - self._started_s
        text = f"{self._records:,} {'record' if self._records == 1 else 'records'} in {seconds:.2f} s"
        if self._records >= 1000:
            text += f": {self._records / seconds:,.0f} records/s, {self._input_bytes / 1e6 / seconds:,.1f} MB/s"
        print(text, file=sys.stderr)
