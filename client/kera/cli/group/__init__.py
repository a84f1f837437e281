"""``kera group``: consumer groups: their members, cursors and lag; resets, and offsets from Kafka."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION, confirm
from kera.cli._durations import parse_duration_ms
from kera.cli._output import INTERNAL_OPTION, OUTPUT_OPTION, Output, show_document
from kera.cli._run import UsageError, run_async
from kera.cli._table import table
from kera.core.base.internal_names import is_internal
from kera.core.base.sizes import format_size
from kera.core.base.spans import format_ms
from kera.core.base.spelling import plural
from kera.core.errors import InvalidArgument, KeraError, UnknownStream

if TYPE_CHECKING:
    from kera.client import Client, ConsumerGroupDescription, EntryProgress, MemberDescription

app = Commands(help="Inspect consumer groups and reset their offsets.", no_args_is_help=True)

NAME_ARGUMENT = typer.Argument(..., metavar="GROUP", help="Name of the consumer group.")


@app.command("list")
def list_(internal: bool = INTERNAL_OPTION, bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> None:
    """List consumer groups."""
    run_async(_list(bootstrap, output, internal=internal))


async def _list(bootstrap: str, output: Output, *, internal: bool) -> None:
    async with connected(bootstrap) as client:
        groups = await client.admin.consumer_groups()
    found = [each for each in groups if internal or not is_internal(each.consumer_group)]
    if output.is_document:
        show_document([dataclasses.asdict(each) for each in found], output)
        return
    if not found:
        print("no groups", file=sys.stderr)
        return
    print(
        table(
            ("GROUP", "CONSUMERS", "IDLE", "EXPIRES", "STREAMS"),
            [
                (
                    each.consumer_group,
                    each.members,
                    "" if each.members else format_ms(each.idle_ms),
                    "" if each.expires_in_ms is None else f"in {format_ms(each.expires_in_ms)}",
                    ", ".join(each.streams),
                )
                for each in found
            ],
        )
    )


@app.command()
def describe(name: str = NAME_ARGUMENT, bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> None:
    """Show the consumers of a consumer group, its cursors, and its lag."""
    run_async(_describe(bootstrap, name, output))


async def _describe(bootstrap: str, name: str, output: Output) -> None:
    async with connected(bootstrap) as client:
        found = await client.admin.describe_consumer_group(name)
        offsets = await _offsets(client, found)
    if output.is_document:
        show_document(_to_json(found, offsets), output)
        return
    count = len(found.members)
    print(f"{name}: {plural(count, 'consumer')}")
    if found.members:
        print()
        print(table(MEMBER_HEADING, map(_member_row, found.members)))
    if found.entries:
        print()
        print(table(ENTRY_HEADING + LAG_HEADING, [_entry_row(entry, offsets) for entry in found.entries]))
        print()
        print(_total(found))


MEMBER_HEADING = ("CONSUMER", "CLIENT", "GROUPS", "LAST HEARTBEAT", "PROCESSING FOR", "CONSUMED")
ENTRY_HEADING = ("STREAM", "STREAMLET", "ENTRY", "OFFSET", "END OFFSET", "CURSOR", "GROUPS", "CONSUMER")
LAG_HEADING = ("LAG RECORDS", "LAG BYTES", "LAG TIME")


class _Offsets(NamedTuple):
    """The offsets of an entry; None: unknown."""

    next: int | None
    """Offset of the first record that was not read."""
    end: int


_Place = tuple[str, int, int]
"""Stream, streamlet and entry."""


async def _offsets(client: Client, found: ConsumerGroupDescription) -> dict[_Place, _Offsets]:
    """Where the group is, by entry; streams whose brokers do not answer are left out."""
    offsets: dict[_Place, _Offsets] = {}
    for stream in sorted({entry.stream for entry in found.entries}):
        try:
            plan = await client.admin.plan_reset(found.consumer_group, stream, "latest", streamlets=None)
        except KeraError as error:
            if not error.retriable and not isinstance(error, UnknownStream):
                raise
            continue
        for change in plan.changes:
            offsets[stream, change.streamlet, change.entry] = _Offsets(change.old_offset, change.new_offset)
    return offsets


def _member_row(member: MemberDescription) -> tuple[object, ...]:
    return (
        member.member_id[:8],
        member.client,
        len(member.held),
        f"{format_ms(member.silent_ms)} ago",
        format_ms(member.busy_ms) if member.busy_ms else "",
        format_size(member.bytes_consumed),
    )


def _entry_row(entry: EntryProgress, offsets: Mapping[_Place, _Offsets]) -> tuple[object, ...]:
    cursor = "/".join(map(str, entry.cursor)) if entry.cursor.group_id else "start"
    offset = offsets.get((entry.stream, entry.streamlet, entry.entry))
    shown = ("?", "?") if offset is None else ("?" if offset.next is None else offset.next, offset.end)
    lag: tuple[object, ...] = ("?", "?", "?")
    if entry.lag is not None:
        lag = (entry.lag.records, format_size(entry.lag.bytes), format_ms(_behind_ms(entry.lag.oldest_us)))
    place = (entry.stream, entry.streamlet, entry.entry)
    return (*place, *shown, cursor, entry.groups, entry.member_id[:8] or "-", *lag)


def _total(found: ConsumerGroupDescription) -> str:
    lags = [entry.lag for entry in found.entries if entry.lag is not None]
    missing = len(found.entries) - len(lags)
    oldest_us = min((lag.oldest_us for lag in lags if lag.oldest_us), default=0)
    text = (
        f"lag: {plural(sum(lag.records for lag in lags), 'record')}, {format_size(sum(lag.bytes for lag in lags))},"
        f" {format_ms(_behind_ms(oldest_us))}"
    )
    return text + (f"; unknown for {missing} more entries: their brokers did not answer" if missing else "")


def _behind_ms(oldest_us: int) -> int:
    return max(0, round(time.time() * 1000 - oldest_us / 1000)) if oldest_us else 0


def _to_json(found: ConsumerGroupDescription, offsets: Mapping[_Place, _Offsets]) -> dict[str, Any]:
    described = dataclasses.asdict(found)
    for entry, row in zip(found.entries, described["entries"], strict=True):
        row["cursor"] = list(entry.cursor)
        offset = offsets.get((entry.stream, entry.streamlet, entry.entry))
        row["offset"], row["end_offset"] = offset or (None, None)
        if entry.lag is not None:
            row["lag"]["behind_ms"] = _behind_ms(entry.lag.oldest_us)
    return described


@app.command()
def reset(
    name: str = NAME_ARGUMENT,
    stream: str | None = typer.Argument(None, metavar="[STREAM]", help="Name of the stream; or give --all-streams."),
    to: str | None = typer.Option(
        None, "--to", metavar="WHERE", help="earliest, latest, or a time: 2h (ago), 2026-01-31T12:00 (local) or …Z."
    ),
    to_offset: int | None = typer.Option(
        None, "--to-offset", min=0, metavar="N", help="To the record with this offset, in each entry of each streamlet."
    ),
    shift_by: int | None = typer.Option(
        None, "--shift-by", metavar="N", help="On by N records in each entry, or back by -N."
    ),
    streamlet: list[int] | None = typer.Option(
        None, "--streamlet", min=0, metavar="K", help="Only this streamlet; may be repeated. Default: all."
    ),
    all_streams: bool = typer.Option(False, "--all-streams", help="In all streams that the group has read."),
    create: bool = typer.Option(False, "--create", help="Create the group at these offsets if it does not exist."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only show the changes; --yes has no effect."),
    force: bool = typer.Option(False, "--force", help="Reset even while consumers are active; they lose their leases."),
    yes: bool = YES_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Reset a consumer group's offsets in a stream, back or forward.

    Shows old and new offsets first, and how many records will be read again or skipped. Cursors are starts of chunks:
    the new offset is that of the chunk that has the record. Offsets beyond either end become that end.
    """
    from kera.cli.group._resets import ResetOptions
    from kera.cli.group._resets import reset as carry_out

    options = ResetOptions(
        group=name,
        stream=stream,
        to=to,
        to_offset=to_offset,
        shift_by=shift_by,
        streamlets=streamlet or None,
        all_streams=all_streams,
        create=create,
        dry_run=dry_run,
        force=force,
        yes=yes,
        bootstrap=bootstrap,
        output=output,
    )
    run_async(carry_out(options))


@app.command("import")
def import_(
    name: str = NAME_ARGUMENT,
    stream: str = typer.Argument(
        ..., metavar="STREAM", help="Stream that kera connect copy has filled from the topic."
    ),
    source: str = typer.Option(..., "--from", metavar="kafka://HOST:PORT/TOPIC", help="The topic, as it was copied."),
    kafka_group: str | None = typer.Option(
        None, "--kafka-group", metavar="NAME", help="Consumer group of Kafka. Default: the same name as GROUP."
    ),
    kafka_config: Path | None = typer.Option(
        None, "--kafka-config", metavar="FILE", help="Settings of librdkafka, name=value: how to log in, TLS."
    ),
    copy: str | None = typer.Option(
        None, "--copy", metavar="NAME", help="Which copy, if several have copied the topic into the stream."
    ),
    wait: str | None = typer.Option(
        None, "--wait", metavar="TIME", help="Wait this long for the copy to come as far as the group: 30s, 10min."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only show the cursors; --yes has no effect."),
    force: bool = typer.Option(
        False, "--force", help="Also set cursors back, and while consumers are active; they lose their leases."
    ),
    yes: bool = YES_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Take over the committed offsets of a consumer group of Kafka.

    The stream is a copy of the topic, with as many streamlets as the topic has partitions. Each streamlet's cursor
    becomes the start of the chunk that has the first record that the group has not read: no record is skipped, and at
    most one chunk per streamlet is read again. Stop the group's consumers in Kafka first. An import that would set a
    cursor of the group back, as the group has already read further in KerA, needs --force.
    """
    from kera.cli.group._importing import ImportOptions, import_offsets

    options = ImportOptions(
        group=name,
        stream=stream,
        source=source,
        kafka_group=kafka_group or name,
        kafka_config=kafka_config,
        copy=copy,
        wait=wait,
        dry_run=dry_run,
        force=force,
        yes=yes,
        bootstrap=bootstrap,
        output=output,
    )
    run_async(import_offsets(options))


@app.command()
def delete(
    name: str | None = typer.Argument(None, metavar="[GROUP]", help="Name of the consumer group; or give --idle."),
    idle: str | None = typer.Option(
        None, "--idle", metavar="TIME", help="Delete all groups that have been idle this long: 7d, 12h. Not with GROUP."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="With --idle: only list the groups; --yes has no effect."),
    yes: bool = YES_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Delete a consumer group and its cursors, or all idle groups; their consumers must have stopped."""
    if (name is None) == (idle is None):
        raise UsageError("give either a group or --idle with a time")
    if idle is not None:
        run_async(_delete_idle(bootstrap, parse_duration_ms(idle, name="--idle"), dry_run=dry_run, yes=yes))
        return
    if dry_run:
        raise UsageError("--dry-run needs --idle")
    confirm(f"deleting group {name}", f"Delete group {name} and its cursors?", yes=yes)
    run_async(_delete(bootstrap, str(name)))
    print(f"deleted {name}")


async def _delete(bootstrap: str, name: str) -> None:
    async with connected(bootstrap, patient=False) as client:
        await client.admin.delete_consumer_group(name)


async def _delete_idle(bootstrap: str, idle_ms: int, *, dry_run: bool, yes: bool) -> None:
    if not idle_ms:
        raise UsageError("--idle: the time must be above 0, as groups in use are idle for 0 s")
    async with connected(bootstrap, patient=False) as client:
        found = [each for each in await client.admin.consumer_groups() if not each.members and each.idle_ms >= idle_ms]
        if not found:
            print(f"no group has been idle for {format_ms(idle_ms)}", file=sys.stderr)
            return
        rows = [(each.consumer_group, format_ms(each.idle_ms), ", ".join(each.streams)) for each in found]
        print(table(("GROUP", "IDLE", "STREAMS"), rows))
        if dry_run:
            return
        confirm("deleting groups", f"Delete {plural(len(found), 'group')} and their cursors?", yes=yes)
        deleted = 0
        for each in found:
            try:
                await client.admin.delete_consumer_group(each.consumer_group, idle_ms=idle_ms)
                deleted += 1
            except InvalidArgument as error:  # used meanwhile, or retention waits for it
                print(f"kept {each.consumer_group}: {error.message}", file=sys.stderr)
    print(f"deleted {plural(deleted, 'group')}")
