"""``kera group import``: the committed offsets of a consumer group of Kafka become cursors of one of KerA."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kera.cli._client import connected
from kera.cli._confirming import check_can_ask, confirm
from kera.cli._durations import parse_duration_ms
from kera.cli._output import Output, show_document
from kera.cli._run import UsageError, command_line, extra
from kera.cli._table import table
from kera.connect.endpoints import TopicEnd, parse_end
from kera.connect.errors import NotCopied
from kera.core.base.spelling import plural
from kera.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kera.client import Client, ResetPlan, StreamDescription
    from kera.client.admin.reset_plan import CursorChange
    from kera.connect.importing import ImportedCursor
    from kera.connect.kafka.source import TopicSource

HEADING = (
    *("PARTITION", "KAFKA OFFSET", "STREAMLET", "ENTRY", "OLD OFFSET", "NEW OFFSET", "CURSOR"),
    "READ AGAIN (AT MOST)",
)
RETRY_S = 0.5
"""Between looks at how far the copy is."""
LISTED_MAX = 5
"""Streamlets that an error names."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The arguments of ``kera group import``."""

    group: str
    stream: str
    source: str
    kafka_group: str
    kafka_config: Path | None
    copy: str | None
    wait: str | None
    dry_run: bool
    force: bool
    yes: bool
    bootstrap: str
    output: Output


async def import_offsets(options: ImportOptions) -> None:
    """Translate, show, ask, and set the cursors."""
    with command_line():
        end = parse_end(options.source)
    if not isinstance(end, TopicEnd):
        raise UsageError(f"--from: {options.source} is not a topic of Kafka; write kafka://host:9092/topic")
    wait_ms = 0 if options.wait is None else parse_duration_ms(options.wait, name="--wait")
    doing = f"importing offsets into group {options.group}"
    if not options.dry_run:
        check_can_ask(doing, yes=options.yes)
    with extra("kafka"):
        import confluent_kafka  # noqa: F401 - see whether it is there
    async with connected(options.bootstrap, patient=False) as client:
        stream = await client.describe(options.stream)
        cursors, members = await _translated(client, stream, end, options, wait_ms)
        plan = await _plan(client, stream, options.group, cursors)
        _show(plan, cursors, options.output)
        if members and not options.output.is_document:
            active = plural(members, "active consumer")
            print(f"group {options.kafka_group} has {active} in Kafka: what they commit from now on is not imported")
        back = [change for change in plan.changes if _goes_back(change)]
        if options.dry_run:
            if back and not options.force and not options.output.is_document:
                print(f"{plural(len(back), 'cursor')} would go back: the import needs --force")
            return
        if back and not options.force:
            raise InvalidArgument(
                f"group {options.group} has read further in stream {options.stream} than these offsets, in"
                f" {_listed(back)}: --force sets its cursors back",
                consumer_group=options.group,
                stream=options.stream,
            )
        confirm(doing, f"Set the cursors of group {options.group} in stream {options.stream}?", yes=options.yes)
        await client.admin.reset_consumer_group(options.group, options.stream, plan, force=options.force)
    if not options.output.is_document:
        print(f"imported {plural(len(cursors), 'offset')} into group {options.group}, stream {options.stream}")


async def _translated(
    client: Client, stream: StreamDescription, end: TopicEnd, options: ImportOptions, wait_ms: int
) -> tuple[list[ImportedCursor], int]:
    """The cursors, and how many consumers the group has in Kafka."""
    from kera.connect.importing import find_copy
    from kera.connect.kafka.committed import committed_offsets
    from kera.connect.kafka.connection import read_settings
    from kera.connect.kafka.source import TopicSource

    with command_line():
        settings = read_settings(options.kafka_config)
    source = TopicSource(end.bootstrap, end.topic, f"import.{options.group}", settings, follow=False)
    try:
        await source.open()
        copy = await find_copy(client, stream, source.identity, options.copy)
        committed = await asyncio.to_thread(
            committed_offsets, end.bootstrap, end.topic, source.streamlets, options.kafka_group, settings
        )
        return await _when_copied(client, stream, copy, source, committed.offsets, wait_ms), committed.members
    finally:
        await source.close()


async def _when_copied(
    client: Client,
    stream: StreamDescription,
    copy: str,
    source: TopicSource,
    committed: Mapping[int, int | None],
    wait_ms: int,
) -> list[ImportedCursor]:
    from kera.connect.importing import imported_cursors

    deadline = time.monotonic() + wait_ms / 1000
    while True:
        try:
            return await imported_cursors(client, stream, copy, source, committed)
        except NotCopied:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(RETRY_S)


async def _plan(client: Client, stream: StreamDescription, group: str, cursors: Sequence[ImportedCursor]) -> ResetPlan:
    from kera.connect.importing import positions_of

    return await client.admin.plan_reset(group, stream.name, positions_of(stream, cursors))


def _goes_back(change: CursorChange) -> bool:
    """Whether KerA's group reads again what it has read already."""
    if change.records_again is None:  # the old place is lost, so only positions are known
        return change.old is not None and change.new < change.old
    return change.records_again > 0


def _listed(changes: Sequence[CursorChange]) -> str:
    """The first streamlets of `changes`, and how many there are besides."""
    streamlets = sorted({change.streamlet for change in changes})
    shown, more = streamlets[:LISTED_MAX], len(streamlets) - LISTED_MAX
    text = f"streamlet{'s' if len(streamlets) > 1 else ''} {', '.join(map(str, shown))}"
    return f"{text} and {more} more" if more > 0 else text


def _again_max(cursor: ImportedCursor, change: CursorChange) -> int:
    """At most so many records are read again, of those that the group has read in Kafka or in KerA."""
    return max(cursor.records_again_max, change.records_again or 0)


def _show(plan: ResetPlan, cursors: Sequence[ImportedCursor], output: Output) -> None:
    changes = {(change.streamlet, change.entry): change for change in plan.changes}
    both = [(each, changes.pop((each.partition, each.entry))) for each in cursors]
    if output.is_document:
        show_document([_document(*each) for each in both], output)
        return
    rows = [
        (
            cursor.partition,
            cursor.committed,
            cursor.partition,
            cursor.entry,
            change.old_offset,
            change.new_offset,
            "/".join(map(str, cursor.position)) if cursor.position.group_id else "start",
            _again_max(cursor, change),
        )
        for cursor, change in both
    ]
    print(table(HEADING, rows))
    print()
    for each in cursors:
        if each.note:
            print(f"partition {each.partition}: {each.note}")
    again = sum(_again_max(*each) for each in both) + sum(change.records_again or 0 for change in changes.values())
    print(f"at most {plural(again, 'record')} will be read again, none skipped")


def _document(cursor: ImportedCursor, change: CursorChange) -> dict[str, Any]:
    return {
        "partition": cursor.partition,
        "kafka_offset": cursor.committed,
        "streamlet": cursor.partition,
        "entry": cursor.entry,
        "old_offset": change.old_offset,
        "new_offset": change.new_offset,
        "old_cursor": None if change.old is None else list(change.old),
        "new_cursor": list(cursor.position),
        "records_again_max": _again_max(cursor, change),
        "note": cursor.note,
    }
