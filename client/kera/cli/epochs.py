"""``kera epochs``: shows the epochs of a stream, and the entries that hold up the next one."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._durations import parse_duration_ms
from kera.cli._output import OUTPUT_OPTION, Output, show_list
from kera.cli._run import UsageError
from kera.cli._table import format_time
from kera.cli._times import parse_time_us
from kera.core.base.spans import format_ms
from kera.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kera.client import Epoch, StreamDescription
    from kera.client.epochs.settled import Settled

app = Commands(help="Look at the epochs of a stream, and close them.", no_args_is_help=True)

NAME_ARGUMENT = typer.Argument(..., metavar="STREAM", help="Name of the stream.")
LENGTH_OPTION = typer.Option(
    None, "--epoch", metavar="TIME", help="Epochs of this length, a multiple of the stream's. Default: the stream's."
)
EPOCHS_MAX = 1000
_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""Epochs are numbered from 1970 on, so epochs before it have negative numbers."""


@app.command("list")
async def list_(
    name: str = NAME_ARGUMENT,
    epoch: str | None = LENGTH_OPTION,
    start: str = typer.Option("earliest", "--from", metavar="NUMBER|earliest", help="The first epoch."),
    limit: int = typer.Option(100, "--limit", min=1, max=EPOCHS_MAX, metavar="N", help="Maximum of epochs to list."),
    digest: bool = typer.Option(
        False, "--digest", help="Show a digest of each one's records: the same for all readers."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """List the epochs that are closed and have records. This reads all their records."""
    first = _first(start)
    length_ms = None if epoch is None else parse_duration_ms(epoch, name="--epoch")
    found: list[dict[str, Any]] = []
    async with (
        connected(bootstrap) as client,
        client.epochs(name, epoch_ms=length_ms, start=first, end="latest") as epochs,
    ):
        async for each in epochs:
            found.append(_to_json(each, digest=digest))
            if len(found) == limit:
                break
    heading = ("EPOCH", "FROM", "TO", "RECORDS", "LATE", *(["DIGEST"] if digest else []))
    rows = [
        (
            each["epoch"],
            *(format_time(each[end], milliseconds=True) for end in ("start_us", "end_us")),
            *list(each.values())[3:],
        )
        for each in found
    ]
    show_list(found, heading, rows, output)


def _first(text: str) -> Any:
    if text == "earliest":
        return text
    if not _NUMBER.fullmatch(text):
        raise UsageError(f"--from: {text!r} is neither the number of an epoch nor earliest")
    return int(text)


def _to_json(epoch: Epoch, *, digest: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "epoch": epoch.number,
        "start_us": epoch.start_us,
        "end_us": epoch.end_us,
        "records": epoch.records,
        "late_records": epoch.late_records,
    }
    return told | ({"digest": epoch.digest} if digest else {})


@app.command()
async def lag(
    name: str = NAME_ARGUMENT,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Show up to which time each entry is settled: the entry that is furthest behind holds up the next epoch."""
    from kera.client.epochs.settled import settled_entries

    async with connected(bootstrap) as client:
        bounds = await client.bounds(name)
        stream = await client.describe(name)
    if not stream.config.epoch_ms:
        raise InvalidArgument(
            f"stream {name!r} has no epochs; kera stream alter {name} --epoch says how long they are", stream=name
        )
    now_us = time.time_ns() // 1000
    entries = [_settled_to_json(stream, each, now_us) for each in settled_entries(stream.config, bounds)]
    rows = [
        (
            entry["streamlet"],
            entry["entry"],
            entry["broker"],
            "-" if entry["settled_us"] is None else format_time(entry["settled_us"], milliseconds=True),
            "-" if entry["behind_ms"] is None else format_ms(entry["behind_ms"]),
            entry["by"],
        )
        for entry in entries
    ]
    show_list(entries, ("STREAMLET", "ENTRY", "BROKER", "SETTLED UP TO", "BEHIND", "BY"), rows, output)


def _settled_to_json(stream: StreamDescription, each: Settled, now_us: int) -> dict[str, Any]:
    return {
        "streamlet": each.streamlet_id,
        "entry": each.entry,
        "broker": stream.assignments[each.streamlet_id].broker_id,
        "settled_us": each.settled_us,
        "behind_ms": each.behind_ms(now_us),
        "by": each.by,
    }


@app.command()
async def punctuate(
    name: str = NAME_ARGUMENT,
    at: str | None = typer.Option(
        None, "--time", metavar="TIME", help="ISO 8601, or a time ago: 90s, 10min, 2h or 3d. Default: now."
    ),
    durability: str | None = typer.Option(
        None, metavar="LEVEL", help="Acknowledge at leader, replicated or persisted. Default: the stream's level."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Declare that no records older than a time will be written any more, so that epochs up to then close."""
    now_us = time.time_ns() // 1000
    at_us = now_us if at is None else parse_time_us(at, now_us, name="--time")
    async with connected(bootstrap) as client, client.producer(durability=durability) as producer:
        entries, written = await producer.punctuate(name, at_us)
    if not entries:
        print(f"stream {name}: nothing was ever written to it, so there was nowhere to write a punctuation")
        return
    print(
        f"stream {name}: what is older than {format_time(at_us)} is late from now on (entries with records: {entries},"
        f" punctuations written: {written})"
    )
