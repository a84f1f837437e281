"""``kera group reset``: shows what a reset would change, and resets a consumer group."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._confirming import YES_OPTION, check_can_ask, confirm
from kera.cli._output import OUTPUT_OPTION, Output, show_document
from kera.cli._run import UsageError
from kera.cli._table import table
from kera.cli._times import parse_time_us
from kera.core.base.spelling import closest, plural
from kera.core.errors import InvalidArgument, KeraError

if TYPE_CHECKING:
    from kera.client import Client, ResetPlan
    from kera.client.admin.reset_plan import ResetTo

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
HEADING = ("STREAM", "STREAMLET", "ENTRY", "OLD OFFSET", "NEW OFFSET", "READ AGAIN", "SKIPPED")
NAME_ARGUMENT = typer.Argument(..., metavar="GROUP", help="Name of the consumer group.")


async def reset(
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
    where, in_words = _place(to, to_offset, shift_by)
    streamlets = streamlet or None  # None: all
    if (stream is None) == (not all_streams):
        raise UsageError("give either a stream or --all-streams")
    if all_streams and streamlets:
        raise UsageError("--streamlet and --all-streams are mutually exclusive: streams have streamlets of their own")
    if all_streams and create:
        raise UsageError("--create and --all-streams are mutually exclusive: a new group has read no stream")
    doing = f"resetting group {name}"
    if not dry_run:
        check_can_ask(doing, yes=yes)
    async with connected(bootstrap, patient=False) as client:
        if not create:
            await _check_exists(client, name)
        streams = [stream] if stream is not None else await _streams(client, name)
        plans = [await client.admin.plan_reset(name, each, where, streamlets=streamlets) for each in streams]
        show_plans(plans, output)
        if dry_run:
            return
        in_streams = ", ".join(streams)
        confirm(doing, f"Reset group {name} {in_words} in {in_streams}?", yes=yes)
        for plan in plans:
            await client.admin.reset_consumer_group(name, plan.stream, plan, force=force, streamlets=streamlets)
    if not output.is_document:
        print(f"reset group {name} {in_words} in {in_streams}")


def _place(to: str | None, to_offset: int | None, shift_by: int | None) -> tuple[ResetTo, str]:
    """Return the target of the reset, and the target in words. Raises `UsageError`."""
    from kera.client import ShiftBy, ToOffset

    given = [each for each in (to, to_offset, shift_by) if each is not None]
    if len(given) != 1:
        raise UsageError("give one of --to, --to-offset and --shift-by")
    if to_offset is not None:
        return ToOffset(to_offset), f"to offset {to_offset}"
    if shift_by is not None:
        return ShiftBy(shift_by), f"by {plural(shift_by, 'record')}"
    where = f"to {to}"
    match to:
        case "earliest":
            return "earliest", where
        case "latest":
            return "latest", where
    return _time(str(to)), where


def _time(text: str) -> datetime.datetime:
    try:
        return EPOCH + datetime.timedelta(microseconds=parse_time_us(text, time.time_ns() // 1000, name="--to"))
    except (UsageError, OverflowError):
        raise UsageError(
            f"--to: {text!r} is neither earliest nor latest nor a time like 2026-01-31T12:00 or 2h"
        ) from None


async def _check_exists(client: Client, group: str) -> None:
    """Raise `InvalidArgument` for a group that does not exist, with the most similar name of a group."""
    try:
        await client.admin.describe_consumer_group(group)
    except InvalidArgument as error:
        if not error.message.startswith("there is no consumer group"):
            raise
        meant = None
        with contextlib.suppress(KeraError):  # a user without the right to list groups gets no suggestion
            meant = closest(group, [each.consumer_group for each in await client.admin.consumer_groups()])
        suggestion = "" if meant is None else f"; did you mean {meant!r}?"
        raise InvalidArgument(f"{error.message} (--create creates one){suggestion}", consumer_group=group) from error


async def _streams(client: Client, group: str) -> list[str]:
    """Return the streams that the group has begun to read. Raises `UsageError` if there are none."""
    described = await client.admin.describe_consumer_group(group)
    streams = sorted({entry.stream for entry in described.entries})
    if not streams:
        raise UsageError(f"group {group} has no cursor in any stream: name the stream")
    return streams


def show_plans(plans: Sequence[ResetPlan], output: Output) -> None:
    """Print the changes entry by entry, then notes and the sums."""
    if output.is_document:
        show_document([document for plan in plans for document in _documents(plan)], output)
        return
    rows = [
        (
            plan.stream,
            change.streamlet,
            change.entry,
            change.old_offset,
            change.new_offset,
            "?" if change.records_again is None else change.records_again,
            "?" if change.records_skipped is None else change.records_skipped,
        )
        for plan in plans
        for change in plan.changes
    ]
    print(table(HEADING, rows))
    print()
    for plan in plans:
        for change in plan.changes:
            if change.note:
                print(f"{plan.stream}, streamlet {change.streamlet}, entry {change.entry}: {change.note}")
    again, skipped = (
        sum(counts) for counts in zip(*((p.records_again, p.records_skipped) for p in plans), strict=True)
    )
    print(f"{plural(again, 'record')} will be read again, {plural(skipped, 'record')} skipped")


def _documents(plan: ResetPlan) -> list[dict[str, Any]]:
    return [
        {
            "stream": plan.stream,
            "streamlet": change.streamlet,
            "entry": change.entry,
            "old_offset": change.old_offset,
            "new_offset": change.new_offset,
            "old_cursor": None if change.old is None else list(change.old),
            "new_cursor": list(change.new),
            "records_again": change.records_again,
            "records_skipped": change.records_skipped,
            "note": change.note,
        }
        for change in plan.changes
    ]
