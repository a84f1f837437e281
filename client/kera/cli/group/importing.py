"""``kera group import``: sets the cursors of a consumer group to the committed offsets of a group of Kafka."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._confirming import YES_OPTION, check_can_ask, confirm
from kera.cli._durations import parse_duration_ms
from kera.cli._output import OUTPUT_OPTION, Output, show_document
from kera.cli._run import UsageError, command_line, extra
from kera.cli._table import table
from kera.cli.group.resets import NAME_ARGUMENT
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
"""Time between two looks at the progress of the copy."""
LISTED_MAX = 5
"""Maximum of streamlets that an error names."""


async def import_(
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
    if kafka_group == "":
        raise UsageError("--kafka-group is empty: leave it out if the group has the same name")
    kafka_group = kafka_group or name
    with command_line():
        end = parse_end(source)
    if not isinstance(end, TopicEnd):
        raise UsageError(f"--from: {source} is not a topic of Kafka; write kafka://host:9092/topic")
    wait_ms = 0 if wait is None else parse_duration_ms(wait, name="--wait")
    doing = f"importing offsets into group {name}"
    if not dry_run:
        check_can_ask(doing, yes=yes)
    with extra("kafka"):
        import confluent_kafka  # noqa: F401 - see whether it is there
    async with connected(bootstrap, patient=False) as client:
        target = await client.describe(stream)
        cursors, members = await _translated(client, target, name, end, kafka_group, kafka_config, copy, wait_ms)
        plan = await _plan(client, target, name, cursors)
        _show(plan, cursors, output)
        if members and not output.is_document:
            active = plural(members, "active consumer")
            print(f"group {kafka_group} has {active} in Kafka: what they commit from now on is not imported")
        back = [change for change in plan.changes if _goes_back(change)]
        if dry_run:
            if back and not force and not output.is_document:
                print(f"{plural(len(back), 'cursor')} would go back: the import needs --force")
            return
        if back and not force:
            raise InvalidArgument(
                f"group {name} has read further in stream {stream} than these offsets, in"
                f" {_listed(back)}: --force sets its cursors back",
                consumer_group=name,
                stream=stream,
            )
        confirm(doing, f"Set the cursors of group {name} in stream {stream}?", yes=yes)
        await client.admin.reset_consumer_group(name, stream, plan, force=force)
    if not output.is_document:
        print(f"imported {plural(len(cursors), 'offset')} into group {name}, stream {stream}")


async def _translated(
    client: Client,
    stream: StreamDescription,
    group: str,
    end: TopicEnd,
    kafka_group: str,
    kafka_config: Path | None,
    copy: str | None,
    wait_ms: int,
) -> tuple[list[ImportedCursor], int]:
    """Return the cursors, and the number of active consumers that the group has in Kafka."""
    import asyncio

    from kera.connect.importing import find_copy
    from kera.connect.kafka.committed import committed_offsets
    from kera.connect.kafka.connection import read_settings
    from kera.connect.kafka.source import TopicSource

    with command_line():
        settings = read_settings(kafka_config)
    source = TopicSource(end.bootstrap, end.topic, f"import.{group}", settings, follow=False)
    try:
        await source.open()
        chosen = await find_copy(client, stream, source.identity, copy)
        committed = await asyncio.to_thread(
            committed_offsets, end.bootstrap, end.topic, source.streamlets, kafka_group, settings
        )
        return await _when_copied(client, stream, chosen, source, committed.offsets, wait_ms), committed.members
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
    import asyncio

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
    """Return whether the change makes KerA's group read records again."""
    if change.records_again is None:  # the records at the old cursor are lost, so only positions are known
        return change.old is not None and change.new < change.old
    return change.records_again > 0


def _listed(changes: Sequence[CursorChange]) -> str:
    """Name the first streamlets of `changes`, and the number of the others."""
    streamlets = sorted({change.streamlet for change in changes})
    shown, more = streamlets[:LISTED_MAX], len(streamlets) - LISTED_MAX
    text = f"streamlet{'s' if len(streamlets) > 1 else ''} {', '.join(map(str, shown))}"
    return f"{text} and {more} more" if more > 0 else text


def _again_max(cursor: ImportedCursor, change: CursorChange) -> int:
    """Return the maximum of records that are read again after the group has read them in Kafka or in KerA."""
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
