"""``kera stream``: create, list, describe, alter, truncate and delete streams."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION, confirm
from kera.cli._durations import parse_duration_ms
from kera.cli._output import INTERNAL_OPTION, OUTPUT_OPTION, Output, show_document, show_list
from kera.cli._run import UsageError, run_async
from kera.cli._schema_files import arrow_schema_of
from kera.cli._sizes import parse_size
from kera.cli._streams import warn
from kera.cli._table import fields, format_time, table
from kera.core.base.internal_names import is_internal
from kera.core.base.sizes import format_size
from kera.core.base.spans import format_ms
from kera.core.base.spelling import plural
from kera.core.errors import KeraError, UnknownStream
from kera.core.push import DEFAULT_DOMAIN

if TYPE_CHECKING:
    import pyarrow as pa

    from kera.client import Client, EntryBounds, Position, StreamConfig, StreamDescription
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

app = Commands(help="Create, list, describe, alter, truncate and delete streams.", no_args_is_help=True)

NAME_ARGUMENT = typer.Argument(..., metavar="NAME", help="Name of the stream.")


EPOCH_HELP = "Length of epochs, batches of the records of a time span, such as 10s; 0s: no epochs."
PUNCTUATION_HELP = "How epochs of idle entries close: clock (of the brokers), or producers (declare it)."
GRACE_HELP = "How long brokers wait for late records before they close an epoch of an idle entry."
AHEAD_HELP = "With epochs: refuse records with times further ahead of the clock; 0s: take any."


def stream_document(stream: StreamDescription, bounds: dict[int, list[EntryBounds]] | None = None) -> dict[str, Any]:
    """Return `stream` as JSON; with `bounds`, also the offsets of each entry, under current and older names."""
    document: dict[str, Any] = {
        "name": stream.name,
        "stream_id": stream.stream_id,
        "created_us": stream.created_us,
        "created_by": stream.created_by,
        "config": dataclasses.asdict(stream.config),
        "typed": stream.typed,
        "schema_id": stream.schema_id,
        "schema": [
            {"name": field.name, "type": str(field.type), "nullable": field.nullable} for field in stream.schema
        ],
        "key_column": stream.key_column,
        "timestamp_column": stream.timestamp_column,
        "streamlets": [
            {
                "streamlet": streamlet,
                "broker_id": assignment.broker_id,
                "broker_epoch": assignment.broker_epoch,
            }
            for streamlet, assignment in sorted(stream.assignments.items())
        ],
    }
    if bounds is not None:
        for streamlet in document["streamlets"]:
            streamlet["entries"] = [
                {
                    "first_offset": bound.first_record,
                    "end_offset": bound.next_record,
                    "first_record": bound.first_record,
                    "next_record": bound.next_record,
                    "length_bytes": bound.length_bytes,
                    "start": bound.start._asdict(),
                    "end": bound.end._asdict(),
                }
                for bound in bounds.get(streamlet["streamlet"], [])
            ]
    return document


def parse_columns(columns: Iterable[str], *, option: str = "--column") -> pa.Schema:
    """Return a schema of ``name:type`` texts, values of `option`, such as ``fare:float64`` or ``tags:list<string>``.

    The names of types are Arrow's own, so that ``kera stream create`` takes the output of ``kera stream describe``.
    Raises `UsageError` that names the wrong text.
    """
    import pyarrow as pa

    from kera.core.format.arrow_types import arrow_type

    fields = []
    for column in columns:
        name, colon, kind = column.partition(":")
        if not (name and colon and kind):
            raise UsageError(f"{option} {column}: write NAME:TYPE, as in fare:float64", column=column)
        found = arrow_type(kind.strip())
        if found is None:
            known = "int64, float64, string, bool, timestamp[us, UTC]"
            message = f"{option} {column}: Arrow has no type {kind.strip()}; try {known}"
            raise UsageError(message, column=column)
        fields.append(pa.field(name, found))
    return pa.schema(fields)


@app.command()
def create(
    name: str = NAME_ARGUMENT,
    streamlets: int = typer.Option(
        1, min=1, metavar="M", help="Number of streamlets, the partitions of the stream; cannot be changed."
    ),
    brokers: int = typer.Option(0, min=0, metavar="N", help="Number of brokers to spread them over; 0 for all."),
    entries: int = typer.Option(
        1,
        min=1,
        metavar="Q",
        help="Entries per streamlet, append-only chains that take appends side by side; 1 keeps it totally ordered.",
    ),
    group_segments: int | None = typer.Option(
        None, min=1, metavar="P", help="Segments per group, the unit that consumers share; fixed. Default: 16."
    ),
    replication: int | None = typer.Option(
        None,
        min=0,
        metavar="R",
        help="Replication factor: backups per record; cannot be changed. Default: the cluster's.",
    ),
    virtual_logs: int = typer.Option(
        1, min=1, metavar="V", help="Virtual logs that carry the stream to backups; at most streamlets × entries."
    ),
    memory_priority: int = typer.Option(
        0, min=0, max=9, metavar="0-9", help="Streams with a higher one keep data on disk in memory longer."
    ),
    replication_priority: int = typer.Option(
        0, min=0, max=9, metavar="0-9", help="Records of streams with a higher one go to backups first."
    ),
    memory_domain: str = typer.Option(
        DEFAULT_DOMAIN, metavar="NAME", help="Keep it apart in shared memory from streams of other memory domains."
    ),
    epoch: str = typer.Option("0s", metavar="TIME", help=EPOCH_HELP),
    punctuation: str = typer.Option("clock", metavar="WHO", help=PUNCTUATION_HELP),
    epoch_grace: str = typer.Option("1s", metavar="TIME", help=GRACE_HELP),
    timestamp_ahead_max: str = typer.Option("1h", metavar="TIME", help=AHEAD_HELP),
    durability: str | None = typer.Option(
        None,
        metavar="LEVEL",
        help="leader, replicated or persisted. Default: replicated if the stream has backups, else leader.",
    ),
    codec: str = typer.Option("none", metavar="CODEC", help="Compression of chunks: none, lz4 or zstd."),
    column: list[str] | None = typer.Option(
        None,
        metavar="NAME:TYPE",
        help="Column of a typed stream, with an Arrow type name; may be repeated. Without: values are bytes.",
    ),
    schema: Path | None = typer.Option(
        None, metavar="FILE", help="File of Arrow's IPC format, or of Parquet, with the columns; in place of --column."
    ),
    key_column: str | None = typer.Option(
        None, metavar="NAME", help="Key column of a typed stream: rows with the same key go to the same streamlet."
    ),
    timestamp_column: str | None = typer.Option(None, metavar="NAME", help="Timestamp column of a typed stream."),
    retention_ms: int = typer.Option(0, min=0, metavar="MS", help="Delete records older than this; 0 keeps them."),
    retention_bytes: str = typer.Option(
        "0", metavar="SIZE", help="Delete the oldest records of a streamlet beyond this size; 0 keeps them."
    ),
    retention_consumer_group: list[str] | None = typer.Option(
        None, metavar="NAME", help="Keep records that this consumer group has yet to read; may be repeated."
    ),
    retention_consumed: bool = typer.Option(
        False, "--retention-consumed", help="Delete records once all these consumer groups have read them."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Create a stream."""
    if column and schema is not None:
        raise UsageError("--schema has all columns: give no --column with it")
    if not (column or schema) and (key_column or timestamp_column):
        raise UsageError("--key-column and --timestamp-column are for typed streams; give the columns with --column")
    arguments: dict[str, Any] = {
        "streamlets": streamlets,
        "brokers": brokers,
        "entries": entries,
        "replication": replication,
        "virtual_logs": virtual_logs,
        "memory_priority": memory_priority,
        "replication_priority": replication_priority,
        "memory_domain": memory_domain,
        **_epoch_settings(epoch, punctuation, epoch_grace, timestamp_ahead_max),
        "durability": durability,
        "codec": codec,
        "schema": parse_columns(column) if column else schema and arrow_schema_of(schema),
        "key_column": key_column,
        "timestamp_column": timestamp_column,
        "retention_ms": retention_ms,
        "retention_bytes": parse_size(retention_bytes, name="--retention-bytes"),
        "retention_consumer_groups": retention_consumer_group or [],
        "retention_consumed": retention_consumed,
    }
    if group_segments is not None:
        arguments["group_segments"] = group_segments
    run_async(_create(bootstrap, name, arguments))


async def _create(bootstrap: str, name: str, arguments: dict[str, Any]) -> None:
    async with connected(bootstrap, patient=False) as client:
        stream = await client.admin.create_stream(name, **arguments)
    owners = sorted({assignment.broker_id for assignment in stream.assignments.values()})
    where = "broker " + str(owners[0]) if len(owners) == 1 else "brokers " + ", ".join(map(str, owners))
    count = plural(stream.config.streamlets, "streamlet")
    copies = f", copies on {plural(stream.config.replication, 'backup')}" if stream.config.replication else ""
    print(f"created {stream.name}: id {stream.stream_id}, {count} on {where}{copies}")


@app.command("list")
async def list_(
    internal: bool = INTERNAL_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """List streams."""
    async with connected(bootstrap) as client:
        streams = await client.admin.list_streams()
    shown = (stream for stream in streams if internal or not is_internal(stream.name))
    streams = sorted(shown, key=lambda stream: stream.name)
    heading = ("NAME", "ID", "STREAMLETS", "ENTRIES", "BACKUPS", "DURABILITY", "CODEC", "VALUES", "CREATED")
    rows = [
        (
            stream.name,
            stream.stream_id,
            stream.config.streamlets,
            stream.config.entries,
            stream.config.replication,
            stream.config.durability,
            stream.config.codec,
            "typed" if stream.typed else "bytes",
            format_time(stream.created_us),
        )
        for stream in streams
    ]
    show_list(map(stream_document, streams), heading, rows, output, none="no streams")


@app.command()
async def describe(
    name: str = NAME_ARGUMENT, bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION
) -> None:
    """Show a stream: its settings, its schema, and the records of each entry."""
    async with connected(bootstrap) as client:
        stream = await client.describe(name)
        bounds = await client.bounds(name)
    if output.is_document:
        show_document(stream_document(stream, bounds), output)
        return
    config = stream.config
    pairs: list[tuple[str, object]] = [
        ("stream", f"{stream.name} (id {stream.stream_id})"),
        ("created", format_time(stream.created_us) + (f" by {stream.created_by}" if stream.created_by else "")),
        ("streamlets", config.streamlets),
        ("entries", f"{config.entries} per streamlet, groups of {plural(config.group_segments, 'segment')}"),
        ("durability", config.durability),
        ("replication", _replication(config)),
        *_priority_pairs(config),
        *_domain_pairs(config),
        *_epoch_pairs(config),
        ("codec", config.codec),
        ("schema", "\n".join(f"{field.name}: {field.type}" for field in stream.schema)),
    ]
    pairs += [("key column", stream.key_column)] if stream.key_column else []
    pairs += [("time column", stream.timestamp_column)] if stream.timestamp_column else []
    pairs += _retention_pairs(config)
    print(fields(pairs))
    print()
    heading = (
        "STREAMLET",
        "BROKER",
        "ENTRY",
        "RECORDS",
        "FIRST OFFSET",
        "END OFFSET",
        "SIZE",
        "HEAD (GROUP/SEGMENT+OFFSET)",
    )
    print(table(heading, _entry_rows(stream, bounds)))


def _replication(config: StreamConfig) -> str:
    if not config.replication:
        return "none"
    logs = plural(config.virtual_logs, "virtual log")
    return f"on {plural(config.replication, 'backup')}, through {logs} on each broker"


def _priority_pairs(config: StreamConfig) -> list[tuple[str, object]]:
    priorities = {"memory": config.memory_priority, "replication": config.replication_priority}
    told = ", ".join(f"{what} {priority}" for what, priority in priorities.items() if priority)
    return [("priority", told)] if told else []


def _domain_pairs(config: StreamConfig) -> list[tuple[str, object]]:
    return [("memory domain", config.memory_domain)] if config.memory_domain != DEFAULT_DOMAIN else []


def _epoch_settings(
    epoch: str | None, punctuation: str | None, grace: str | None, timestamp_ahead_max: str | None
) -> dict[str, Any]:
    """Return the settings of epochs for `create_stream` and `alter_stream`; None: not given."""
    spans = {
        "epoch_ms": (epoch, "--epoch"),
        "epoch_grace_ms": (grace, "--epoch-grace"),
        "timestamp_ahead_max_ms": (timestamp_ahead_max, "--timestamp-ahead-max"),
    }
    settings: dict[str, Any] = {
        field: None if text is None else parse_duration_ms(text, name=option) for field, (text, option) in spans.items()
    }
    return settings | {"punctuation": punctuation}


def _epoch_pairs(config: StreamConfig) -> list[tuple[str, object]]:
    if not config.epoch_ms:
        return []
    who = "producers say when they are closed"
    if config.punctuation == "clock":
        who = f"closed by the clock after {format_ms(config.epoch_grace_ms)}"
    ahead = "any times"
    if config.timestamp_ahead_max_ms:
        ahead = f"times at most {format_ms(config.timestamp_ahead_max_ms)} ahead of the clock"
    return [("epochs", f"of {format_ms(config.epoch_ms)}, {who}, {ahead}")]


def _retention_pairs(config: StreamConfig) -> list[tuple[str, object]]:
    """Describe when records are deleted, and which consumer groups delay that."""
    rules = []
    if config.retention_ms:
        rules.append(f"older than {config.retention_ms} ms")
    if config.retention_bytes:
        rules.append(f"beyond {format_size(config.retention_bytes)} per streamlet")
    if config.retention_consumed:
        rules.append("read by all consumer groups")
    pairs: list[tuple[str, object]] = [("retention", "\n".join(rules))] if rules else []
    if config.retention_consumer_groups:
        pairs.append(("held back by", ", ".join(config.retention_consumer_groups)))
    return pairs


def _entry_rows(stream: StreamDescription, bounds: dict[int, list[EntryBounds]]) -> list[tuple[object, ...]]:
    return [
        (
            streamlet,
            stream.assignments[streamlet].broker_id,
            entry,
            bound.next_record - bound.first_record,
            bound.first_record,
            bound.next_record,
            format_size(bound.length_bytes),
            _format_position(bound.end),
        )
        for streamlet, entries in sorted(bounds.items())
        for entry, bound in enumerate(entries)
    ]


def _format_position(position: Position) -> str:
    return f"{position.group_id}/{position.segment_id}+{position.offset}"


def _parse_position(text: str) -> Position:
    from kera.client import Position

    match = re.fullmatch(r"(\d+)/(\d+)\+(\d+)", text)
    if match is None:
        raise UsageError(
            f"--to: {text!r} is not a position: GROUP/SEGMENT+OFFSET, as kera stream describe shows the head"
        )
    return Position(*map(int, match.groups()))


@app.command()
async def alter(
    name: str = NAME_ARGUMENT,
    durability: str | None = typer.Option(None, metavar="LEVEL", help="leader, replicated or persisted."),
    virtual_logs: int | None = typer.Option(
        None, min=1, metavar="V", help="Virtual logs that carry the stream to backups; at most streamlets × entries."
    ),
    memory_priority: int | None = typer.Option(
        None, min=0, max=9, metavar="0-9", help="Streams with a higher one keep data on disk in memory longer."
    ),
    replication_priority: int | None = typer.Option(
        None, min=0, max=9, metavar="0-9", help="Records of streams with a higher one go to backups first."
    ),
    memory_domain: str | None = typer.Option(
        None, metavar="NAME", help="Memory domain whose shared memory has records from now on."
    ),
    epoch: str | None = typer.Option(None, metavar="TIME", help=EPOCH_HELP),
    punctuation: str | None = typer.Option(None, metavar="WHO", help=PUNCTUATION_HELP),
    epoch_grace: str | None = typer.Option(None, metavar="TIME", help=GRACE_HELP),
    timestamp_ahead_max: str | None = typer.Option(None, metavar="TIME", help=AHEAD_HELP),
    retention_ms: int | None = typer.Option(
        None, min=0, metavar="MS", help="Delete records older than this; 0 keeps them."
    ),
    retention_bytes: str | None = typer.Option(
        None, metavar="SIZE", help="Delete the oldest records of a streamlet beyond this size; 0 keeps them."
    ),
    retention_consumer_group: list[str] | None = typer.Option(
        None,
        metavar="NAME",
        help="Keep records that this consumer group has yet to read; may be repeated. Replaces the list.",
    ),
    no_retention_consumer_groups: bool = typer.Option(
        False, "--no-retention-consumer-groups", help="Clear the list of consumer groups that retention waits for."
    ),
    retention_consumed: bool | None = typer.Option(
        None,
        "--retention-consumed/--no-retention-consumed",
        help="Delete records once all these consumer groups have read them.",
    ),
    brokers: int | None = typer.Option(
        None,
        min=0,
        metavar="N",
        help="Spread the streamlets over this many brokers; 0 for all. Older records stay at their brokers.",
    ),
    add_column: list[str] | None = typer.Option(
        None,
        metavar="NAME:TYPE",
        help="Add a column to a typed stream, after the others; may be repeated. It is null in existing records.",
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Change durability, virtual logs, priorities, memory, epochs, retention or spread of a stream, or add columns.

    Settings that are not given stay unchanged.
    """
    if retention_consumer_group and no_retention_consumer_groups:
        raise UsageError("--retention-consumer-group and --no-retention-consumer-groups are mutually exclusive")
    changes: dict[str, Any] = {
        "durability": durability,
        "virtual_logs": virtual_logs,
        "memory_priority": memory_priority,
        "replication_priority": replication_priority,
        "memory_domain": memory_domain,
        **_epoch_settings(epoch, punctuation, epoch_grace, timestamp_ahead_max),
        "retention_ms": retention_ms,
        "retention_bytes": (None if retention_bytes is None else parse_size(retention_bytes, name="--retention-bytes")),
        "retention_consumer_groups": retention_consumer_group or ([] if no_retention_consumer_groups else None),
        "retention_consumed": retention_consumed,
        "brokers": brokers,
        "add_columns": parse_columns(add_column, option="--add-column") if add_column else None,
    }
    if all(value is None for value in changes.values()):
        raise UsageError("no change is given; see kera stream alter --help")
    async with connected(bootstrap) as client:
        await client.admin.alter_stream(name, **changes)
    print(f"altered {name}")


@app.command()
async def truncate(
    name: str = NAME_ARGUMENT,
    streamlet: int | None = typer.Option(None, min=0, metavar="N", help="Streamlet, with --to."),
    entry: int | None = typer.Option(None, min=0, metavar="N", help="Entry of the streamlet. Default: 0."),
    to: str | None = typer.Option(
        None,
        metavar="GROUP/SEGMENT+OFFSET",
        help="Delete the records before this position: the start of a chunk, or the head.",
    ),
    everything: bool = typer.Option(False, "--all", help="Delete all current records."),
    yes: bool = YES_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Delete the oldest records of a stream, or all of them.

    Prints where the remaining records start. Producers and consumers keep running.
    """
    if everything and streamlet is None and entry is None and to is None:
        place, question = None, f"Delete all records of {name}?"
    elif not everything and streamlet is not None and to is not None:
        place = _parse_position(to), streamlet, entry or 0
        question = f"Delete the records before {to} from streamlet {streamlet}, entry {entry or 0} of {name}?"
    else:
        raise UsageError(
            "say what to delete: --all, or --streamlet and --to, with --entry if the streamlet has several"
        )
    confirm(f"truncating {name}", question, yes=yes)
    from kera.client import EARLIEST

    async with connected(bootstrap) as client:
        if place is None:
            starts = await client.admin.truncate_stream(name, "latest")
        else:
            position, streamlet, entry = place
            starts = await client.admin.truncate_stream(name, {streamlet: [*[EARLIEST] * entry, position]})
    rows = [
        (streamlet, entry, _format_position(start))
        for streamlet, entries in sorted(starts.items())
        for entry, start in enumerate(entries)
    ]
    print(table(("STREAMLET", "ENTRY", "START (GROUP/SEGMENT+OFFSET)"), rows))


@app.command()
async def delete(name: str = NAME_ARGUMENT, yes: bool = YES_OPTION, bootstrap: str = BOOTSTRAP_OPTION) -> None:
    """Delete a stream and all its records, and the journals in which copies into it keep their progress."""
    confirm(f"deleting {name}", f"Delete {name} and all its records?", yes=yes)
    from kera.connect.streams.journal import journal_stream

    async with connected(bootstrap) as client:
        copies = await _copies_into(client, name)
        await client.admin.delete_stream(name)
        print(f"deleted {name}")
        for copy in copies:
            with contextlib.suppress(UnknownStream):  # another process has deleted it meanwhile
                await client.admin.delete_stream(journal_stream(copy))
            print(f"deleted {journal_stream(copy)}, the journal of copy {copy} into {name}")


async def _copies_into(client: Client, name: str) -> list[str]:
    """Return the copies whose journals are useless without the stream; none if journals cannot be read."""
    from kera.connect.streams.journal import journals_of

    stream = await client.admin.describe_stream(name)
    try:
        return sorted(await journals_of(client, stream.stream_id))
    except KeraError as error:
        warn(f"journals of copies into {name} are kept: {error.message}")
        return []
