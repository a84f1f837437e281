"""``kera group``: shows members, cursors and lag of consumer groups, resets them, and imports offsets from Kafka."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION, confirm
from kera.cli._durations import parse_duration_ms
from kera.cli._output import INTERNAL_OPTION, OUTPUT_OPTION, Output, show_document, show_list
from kera.cli._run import UsageError
from kera.cli._table import table
from kera.cli.group import importing, resets
from kera.cli.group.resets import NAME_ARGUMENT
from kera.core.base.internal_names import is_internal
from kera.core.base.sizes import format_size
from kera.core.base.spans import format_ms
from kera.core.base.spelling import plural
from kera.core.errors import InvalidArgument, KeraError, UnknownStream

if TYPE_CHECKING:
    from kera.client import Client, ConsumerGroupDescription, EntryProgress, MemberDescription

app = Commands(help="Inspect consumer groups and reset their offsets.", no_args_is_help=True)


@app.command("list")
async def list_(
    internal: bool = INTERNAL_OPTION, bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION
) -> None:
    """List consumer groups."""
    async with connected(bootstrap) as client:
        groups = await client.admin.consumer_groups()
    found = [each for each in groups if internal or not is_internal(each.consumer_group)]
    heading = ("GROUP", "CONSUMERS", "IDLE", "EXPIRES", "STREAMS")
    rows = [
        (
            each.consumer_group,
            each.members,
            "" if each.members else format_ms(each.idle_ms),
            "" if each.expires_in_ms is None else f"in {format_ms(each.expires_in_ms)}",
            ", ".join(each.streams),
        )
        for each in found
    ]
    show_list(map(dataclasses.asdict, found), heading, rows, output, none="no groups")


@app.command()
async def describe(
    name: str = NAME_ARGUMENT, bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION
) -> None:
    """Show the consumers of a consumer group, its cursors, and its lag."""
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
    """The offsets of an entry."""

    next: int | None
    """Offset of the first record that was not read; None: unknown."""
    end: int


_Place = tuple[str, int, int]
"""Stream, streamlet and entry."""


async def _offsets(client: Client, found: ConsumerGroupDescription) -> dict[_Place, _Offsets]:
    """Return the group's offsets by entry; streams whose brokers do not answer are left out."""
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


app.command()(resets.reset)
app.command("import")(importing.import_)


@app.command()
async def delete(
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
        await _delete_idle(bootstrap, parse_duration_ms(idle, name="--idle"), dry_run=dry_run, yes=yes)
        return
    if dry_run:
        raise UsageError("--dry-run needs --idle")
    confirm(f"deleting group {name}", f"Delete group {name} and its cursors?", yes=yes)
    async with connected(bootstrap, patient=False) as client:
        await client.admin.delete_consumer_group(str(name))
    print(f"deleted {name}")


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
            except InvalidArgument as error:  # the group was used meanwhile, or retention waits for it
                print(f"kept {each.consumer_group}: {error.message}", file=sys.stderr)
    print(f"deleted {plural(deleted, 'group')}")
