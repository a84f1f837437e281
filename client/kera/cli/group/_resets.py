"""``kera group reset``: what a reset changes, shown before it is done."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kera.cli._client import connected
from kera.cli._confirming import check_can_ask, confirm
from kera.cli._output import Output, show_document
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


@dataclass(frozen=True, slots=True)
class ResetOptions:
    """The arguments of ``kera group reset``."""

    group: str
    stream: str | None
    to: str | None
    to_offset: int | None
    shift_by: int | None
    streamlets: Sequence[int] | None
    """None: all."""
    all_streams: bool
    create: bool
    """Whether the group may be a new one."""
    dry_run: bool
    force: bool
    yes: bool
    bootstrap: str
    output: Output


async def reset(options: ResetOptions) -> None:
    """Show what changes, ask, and reset. Raises `UsageError` before anything is done."""
    to, where = _place(options)
    if (options.stream is None) == (not options.all_streams):
        raise UsageError("give either a stream or --all-streams")
    if options.all_streams and options.streamlets:
        raise UsageError("--streamlet and --all-streams are mutually exclusive: streams have streamlets of their own")
    if options.all_streams and options.create:
        raise UsageError("--create and --all-streams are mutually exclusive: a new group has read no stream")
    doing = f"resetting group {options.group}"
    if not options.dry_run:
        check_can_ask(doing, yes=options.yes)
    async with connected(options.bootstrap, patient=False) as client:
        if not options.create:
            await _check_exists(client, options.group)
        streams = [options.stream] if options.stream is not None else await _streams(client, options.group)
        plans = [
            await client.admin.plan_reset(options.group, stream, to, streamlets=options.streamlets)
            for stream in streams
        ]
        show_plans(plans, options.output)
        if options.dry_run:
            return
        in_streams = ", ".join(streams)
        confirm(doing, f"Reset group {options.group} {where} in {in_streams}?", yes=options.yes)
        for plan in plans:
            await client.admin.reset_consumer_group(
                options.group, plan.stream, plan, force=options.force, streamlets=options.streamlets
            )
    if not options.output.is_document:
        print(f"reset group {options.group} {where} in {in_streams}")


def _place(options: ResetOptions) -> tuple[ResetTo, str]:
    """Where to, and that in words."""
    from kera.client import ShiftBy, ToOffset

    given = [each for each in (options.to, options.to_offset, options.shift_by) if each is not None]
    if len(given) != 1:
        raise UsageError("give one of --to, --to-offset and --shift-by")
    if options.to_offset is not None:
        return ToOffset(options.to_offset), f"to offset {options.to_offset}"
    if options.shift_by is not None:
        return ShiftBy(options.shift_by), f"by {plural(options.shift_by, 'record')}"
    where = f"to {options.to}"
    match options.to:
        case "earliest":
            return "earliest", where
        case "latest":
            return "latest", where
    return _time(str(options.to)), where


def _time(text: str) -> datetime.datetime:
    try:
        return EPOCH + datetime.timedelta(microseconds=parse_time_us(text, time.time_ns() // 1000, name="--to"))
    except (UsageError, OverflowError):
        raise UsageError(
            f"--to: {text!r} is neither earliest nor latest nor a time like 2026-01-31T12:00 or 2h"
        ) from None


async def _check_exists(client: Client, group: str) -> None:
    """Raises `InvalidArgument` for a group that does not exist, with the one that was most likely meant."""
    try:
        await client.admin.describe_consumer_group(group)
    except InvalidArgument as error:
        if not error.message.startswith("there is no consumer group"):
            raise
        meant = None
        with contextlib.suppress(KeraError):  # users who may not list groups get no suggestion
            meant = closest(group, [each.consumer_group for each in await client.admin.consumer_groups()])
        suggestion = "" if meant is None else f"; did you mean {meant!r}?"
        raise InvalidArgument(f"{error.message} (--create creates one){suggestion}", consumer_group=group) from error


async def _streams(client: Client, group: str) -> list[str]:
    """The streams that the group has begun to read."""
    described = await client.admin.describe_consumer_group(group)
    streams = sorted({entry.stream for entry in described.entries})
    if not streams:
        raise UsageError(f"group {group} has no cursor in any stream: name the stream")
    return streams


def show_plans(plans: Sequence[ResetPlan], output: Output) -> None:
    """Print what changes, entry by entry; notes and the sum below."""
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
