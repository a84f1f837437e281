"""``kera group``: consumer groups: their members, cursors and lag, and resets."""

from __future__ import annotations

import dataclasses
import datetime
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION
from kera.cli._durations import format_ms, parse_duration_ms
from kera.cli._output import OUTPUT_OPTION, Output, show_document
from kera.cli._run import UsageError, run_async
from kera.cli._sizes import format_size
from kera.cli._table import plural, table
from kera.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kera.client import ConsumerGroupDescription, EntryProgress, MemberDescription

app = Commands(help="Inspect consumer groups and reset their offsets.", no_args_is_help=True)

NAME_ARGUMENT = typer.Argument(..., metavar="GROUP", help="Name of the consumer group.")


@app.command("list")
def list_(bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> None:
    """List all consumer groups."""
    run_async(_list(bootstrap, output))


async def _list(bootstrap: str, output: Output) -> None:
    async with connected(bootstrap) as client:
        found = await client.admin.consumer_groups()
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
    if output.is_document:
        show_document(_to_json(found), output)
        return
    count = len(found.members)
    print(f"{name}: {plural(count, 'consumer')}")
    if found.members:
        print()
        print(table(MEMBER_HEADING, map(_member_row, found.members)))
    if found.entries:
        print()
        print(table(ENTRY_HEADING + LAG_HEADING, [_entry_row(entry) for entry in found.entries]))
        print()
        print(_total(found))


MEMBER_HEADING = ("CONSUMER", "CLIENT", "GROUPS", "LAST HEARTBEAT", "PROCESSING FOR", "CONSUMED")
ENTRY_HEADING = ("STREAM", "STREAMLET", "ENTRY", "CURSOR", "GROUPS", "CONSUMER")
LAG_HEADING = ("LAG RECORDS", "LAG BYTES", "LAG TIME")


def _member_row(member: MemberDescription) -> tuple[object, ...]:
    return (
        member.member_id[:8],
        member.client,
        len(member.held),
        f"{format_ms(member.silent_ms)} ago",
        format_ms(member.busy_ms) if member.busy_ms else "",
        format_size(member.bytes_consumed),
    )


def _entry_row(entry: EntryProgress) -> tuple[object, ...]:
    cursor = "/".join(map(str, entry.cursor)) if entry.cursor.group_id else "start"
    lag: tuple[object, ...] = ("?", "?", "?")
    if entry.lag is not None:
        lag = (entry.lag.records, format_size(entry.lag.bytes), format_ms(_behind_ms(entry.lag.oldest_us)))
    return (entry.stream, entry.streamlet, entry.entry, cursor, entry.groups, entry.member_id[:8] or "-", *lag)


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


def _to_json(found: ConsumerGroupDescription) -> dict[str, Any]:
    described = dataclasses.asdict(found)
    for entry, row in zip(found.entries, described["entries"], strict=True):
        row["cursor"] = list(entry.cursor)
        if entry.lag is not None:
            row["lag"]["behind_ms"] = _behind_ms(entry.lag.oldest_us)
    return described


@app.command()
def reset(
    name: str = NAME_ARGUMENT,
    stream: str = typer.Argument(..., metavar="STREAM", help="Name of the stream."),
    to: str = typer.Option(
        ..., "--to", metavar="WHERE", help="earliest, latest, or a time: 2026-01-31T12:00 (local) or …Z."
    ),
    force: bool = typer.Option(False, "--force", help="Reset even while consumers are active; they lose their leases."),
    yes: bool = YES_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Reset a consumer group's offsets in a stream, back or forward. A new group is created at these offsets."""
    where: Any = to if to in {"earliest", "latest"} else _time(to)
    if not yes:
        typer.confirm(f"reset group {name} to {to} in stream {stream}?", abort=True)
    run_async(_reset(bootstrap, name, stream, where, force))
    print(f"reset group {name} to {to} in stream {stream}")


def _time(text: str) -> datetime.datetime:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--to: {text!r} is neither earliest nor latest nor a time like 2026-01-31T12:00") from None
    return moment if moment.tzinfo else moment.astimezone()


async def _reset(bootstrap: str, name: str, stream: str, to: Any, force: bool) -> None:
    async with connected(bootstrap, patient=False) as client:
        await client.admin.reset_consumer_group(name, stream, to, force=force)


@app.command()
def delete(
    name: str | None = typer.Argument(None, metavar="[GROUP]", help="Name of the consumer group; or give --idle."),
    idle: str | None = typer.Option(
        None, "--idle", metavar="TIME", help="Delete all groups that have been idle this long: 7d, 12h. Not with GROUP."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="With --idle: only list the groups."),
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
    if not yes:
        typer.confirm(f"delete group {name} and its cursors?", abort=True)
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
        if not yes:
            typer.confirm(f"delete {plural(len(found), 'group')} and their cursors?", abort=True)
        deleted = 0
        for each in found:
            try:
                await client.admin.delete_consumer_group(each.consumer_group, idle_ms=idle_ms)
                deleted += 1
            except InvalidArgument as error:  # used meanwhile, or retention waits for it
                print(f"kept {each.consumer_group}: {error.message}", file=sys.stderr)
    print(f"deleted {plural(deleted, 'group')}")
