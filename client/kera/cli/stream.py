"""``kera stream``: create, list, describe and delete streams."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._arrow_types import parse_columns
from kera.cli._client import BOOTSTRAP_OPTION, JSON_OPTION, connected
from kera.cli._run import UsageError, run_async
from kera.cli._sizes import format_size
from kera.cli._table import fields, format_time, plural, table

if TYPE_CHECKING:
    from kera.client import EntryBounds, StreamDescription

app = typer.Typer(help="Create, list, describe and delete streams.", no_args_is_help=True)

NAME_ARGUMENT = typer.Argument(..., metavar="NAME", help="Name of the stream.")


@app.command()
def create(
    name: str = NAME_ARGUMENT,
    streamlets: int = typer.Option(1, min=1, metavar="M", help="Partitions of the stream; fixed."),
    brokers: int = typer.Option(0, min=0, metavar="N", help="Over how many brokers they are spread; 0 for all."),
    entries: int = typer.Option(
        1, min=1, metavar="Q", help="Append lanes per streamlet; 1 keeps a streamlet totally ordered."
    ),
    group_segments: int | None = typer.Option(
        None, min=1, metavar="P", help="Segments per group; absent: the client's default."
    ),
    durability: str = typer.Option("leader", metavar="LEVEL", help="leader, replicated or persisted."),
    codec: str = typer.Option("none", metavar="CODEC", help="Compression of chunks: none, lz4 or zstd."),
    column: list[str] | None = typer.Option(
        None,
        metavar="NAME:TYPE",
        help="Column of a typed stream, Arrow's type names; repeat it. Without: any bytes.",
    ),
    key_column: str | None = typer.Option(None, metavar="NAME", help="Typed: rows of one key stay in one streamlet."),
    timestamp_column: str | None = typer.Option(None, metavar="NAME", help="Typed: the time of a row."),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Create a stream."""
    if not column and (key_column or timestamp_column):
        raise UsageError("--key-column and --timestamp-column are for typed streams; give the columns with --column")
    arguments: dict[str, Any] = {
        "streamlets": streamlets,
        "brokers": brokers,
        "entries": entries,
        "durability": durability,
        "codec": codec,
        "schema": parse_columns(column) if column else None,
        "key_column": key_column,
        "timestamp_column": timestamp_column,
    }
    if group_segments is not None:
        arguments["group_segments"] = group_segments
    run_async(_create(bootstrap, name, arguments))


async def _create(bootstrap: str, name: str, arguments: dict[str, Any]) -> None:
    async with connected(bootstrap) as client:
        stream = await client.admin.create_stream(name, **arguments)
    owners = sorted({assignment.broker_id for assignment in stream.assignments.values()})
    where = "broker " + str(owners[0]) if len(owners) == 1 else "brokers " + ", ".join(map(str, owners))
    count = plural(stream.config.streamlets, "streamlet")
    print(f"created {stream.name}: id {stream.stream_id}, {count} on {where}")


@app.command("list")
def list_(bootstrap: str = BOOTSTRAP_OPTION, as_json: bool = JSON_OPTION) -> None:
    """List all streams."""
    run_async(_list(bootstrap, as_json))


async def _list(bootstrap: str, as_json: bool) -> None:
    async with connected(bootstrap) as client:
        streams = await client.admin.list_streams()
    streams = sorted(streams, key=lambda stream: stream.name)
    if as_json:
        print(json.dumps([_to_json(stream) for stream in streams], indent=2))
        return
    if not streams:
        print("no streams", file=sys.stderr)
        return
    heading = ("NAME", "ID", "STREAMLETS", "ENTRIES", "DURABILITY", "CODEC", "RECORDS ARE", "CREATED")
    rows = [
        (
            stream.name,
            stream.stream_id,
            stream.config.streamlets,
            stream.config.entries,
            stream.config.durability,
            stream.config.codec,
            "typed" if stream.typed else "bytes",
            format_time(stream.created_us),
        )
        for stream in streams
    ]
    print(table(heading, rows))


@app.command()
def describe(name: str = NAME_ARGUMENT, bootstrap: str = BOOTSTRAP_OPTION, as_json: bool = JSON_OPTION) -> None:
    """Show a stream and what it holds.

    Its settings, its schema, and for each entry of its streamlets how many records are there now.
    """
    run_async(_describe(bootstrap, name, as_json))


async def _describe(bootstrap: str, name: str, as_json: bool) -> None:
    async with connected(bootstrap) as client:
        stream = await client.describe(name)
        bounds = await client.bounds(name)
    if as_json:
        print(json.dumps(_to_json(stream, bounds), indent=2))
        return
    config = stream.config
    pairs: list[tuple[str, object]] = [
        ("stream", f"{stream.name} (id {stream.stream_id})"),
        ("created", format_time(stream.created_us)),
        ("streamlets", config.streamlets),
        ("entries", f"{config.entries} per streamlet, groups of {plural(config.group_segments, 'segment')}"),
        ("durability", config.durability),
        ("codec", config.codec),
        ("schema", "\n".join(f"{field.name}: {field.type}" for field in stream.schema)),
    ]
    pairs += [("key column", stream.key_column)] if stream.key_column else []
    pairs += [("time column", stream.timestamp_column)] if stream.timestamp_column else []
    print(fields(pairs))
    print()
    heading = (
        "STREAMLET",
        "BROKER",
        "ENTRY",
        "RECORDS",
        "FIRST",
        "NEXT",
        "SIZE",
        "HEAD (GROUP/SEGMENT+OFFSET)",
    )
    print(table(heading, _entry_rows(stream, bounds)))


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
            f"{bound.end.group_id}/{bound.end.segment_id}+{bound.end.offset}",
        )
        for streamlet, entries in sorted(bounds.items())
        for entry, bound in enumerate(entries)
    ]


@app.command()
def delete(
    name: str = NAME_ARGUMENT,
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Delete a stream and all its records."""
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"deleting {name} needs --yes where nobody can be asked")
        typer.confirm(f"Delete {name} and all its records?", abort=True)
    run_async(_delete(bootstrap, name))
    print(f"deleted {name}")


async def _delete(bootstrap: str, name: str) -> None:
    async with connected(bootstrap) as client:
        await client.admin.delete_stream(name)


def _to_json(stream: StreamDescription, bounds: dict[int, list[EntryBounds]] | None = None) -> dict[str, Any]:
    """`stream` as JSON; with `bounds`, what each entry holds, too."""
    import dataclasses

    document: dict[str, Any] = {
        "name": stream.name,
        "stream_id": stream.stream_id,
        "created_us": stream.created_us,
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
                    "first_record": bound.first_record,
                    "next_record": bound.next_record,
                    "length_bytes": bound.length_bytes,
                    "start": bound.start._asdict(),
                    "end": bound.end._asdict(),
                }
                for bound in bounds.get(streamlet["streamlet"], [])
            ]
    return document
