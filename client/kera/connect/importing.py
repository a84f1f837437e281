"""Translates the committed offsets of a Kafka consumer group into cursors of a stream that a copy has filled.

The journal of the copy says which chunk has which offset (`kera.connect.planning.translating`). A cursor is the start
of the chunk with the first record that the group has not read. So the group skips no record, and reads at most one
chunk per streamlet again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kera.client import EARLIEST, Client, Position, StreamDescription
from kera.connect.errors import CopyMismatch, NotCopied, Untranslatable
from kera.connect.kafka.source import TopicSource
from kera.connect.planning.rounds import Round
from kera.connect.planning.translating import OffsetTable
from kera.connect.streams.chunk_search import CopyEntry, find_chunk
from kera.connect.streams.journal import all_rounds, journal_stream, journals_of, producer_id

ALL_REMOVED = "all that was copied has been removed from the stream"


@dataclass(frozen=True, slots=True)
class ImportedCursor:
    """The place of a partition's committed offset in the stream."""

    partition: int
    """The number of the partition, and of its streamlet."""
    committed: int | None
    """The group's offset; None: it has committed none."""
    entry: int
    """The entry of the streamlet that the copy writes to."""
    position: Position
    records_again_max: int
    """Maximum number of records before the committed offset that are read again."""
    note: str = ""


async def find_copy(client: Client, stream: StreamDescription, source: str, name: str | None) -> str:
    """Return the name of the copy that has filled `stream` from `source`.

    Raises `CopyMismatch` unless there is exactly one. `name`: the copy to choose if there are several.
    """
    copies = await journals_of(client, stream.stream_id)
    from_source = [each for each, last in copies.items() if last.source == source]
    if name is not None:
        if name in from_source:
            return name
        raise CopyMismatch(f"there is no copy {name!r} from {source} into stream {stream.name!r}: {_listed(copies)}")
    if len(from_source) == 1:
        return from_source[0]
    if from_source:
        raise CopyMismatch(
            f"several copies from {source} go into stream {stream.name!r}: say which one with --copy:"
            f" {', '.join(sorted(from_source))}"
        )
    raise CopyMismatch(
        f"no copy from {source} goes into stream {stream.name!r} as it is now; {_listed(copies)}. kera connect copy"
        " makes one"
    )


def _listed(copies: Mapping[str, Round]) -> str:
    if not copies:
        return "no copy does"
    return "there are " + ", ".join(f"{name} (from {last.source})" for name, last in sorted(copies.items()))


async def imported_cursors(
    client: Client, stream: StreamDescription, copy: str, source: TopicSource, committed: Mapping[int, int | None]
) -> list[ImportedCursor]:
    """Return the cursor for each partition, in order. `source` must be open.

    Raises `NotCopied` if the copy is behind the group, and `Untranslatable` if an offset has no known place.
    """
    streamlets = stream.config.streamlets
    if len(committed) != streamlets:
        raise Untranslatable(
            f"{source.shown} has {len(committed)} partitions and stream {stream.name!r} {streamlets} streamlets: keys"
            " decided where records went, so offsets have no place in the stream. Copy into a stream with as many"
            " streamlets, or set the cursors by time with kera group reset --to"
        )
    journal = await client.describe(journal_stream(copy))
    table = OffsetTable({partition: offset for partition, offset in committed.items() if offset is not None})
    async for each in all_rounds(client, journal.name):
        table.add(each)
    writer = producer_id(copy, journal.stream_id)
    return [
        await _imported(client, CopyEntry(stream, partition, writer), table, source, offset)
        for partition, offset in sorted(committed.items())
    ]


async def _imported(
    client: Client, where: CopyEntry, table: OffsetTable, source: TopicSource, offset: int | None
) -> ImportedCursor:
    partition = where.streamlet
    if offset is None:
        return ImportedCursor(partition, None, where.entry, EARLIEST, 0, "nothing committed: from the oldest record on")
    copied_to = table.copied_to(partition)
    if copied_to is None or offset >= copied_to:
        if await source.has_records(partition, copied_to or 0, offset):
            raise NotCopied(
                f"the consumer group has read partition {partition} up to offset {offset}, and the copy has come to"
                f" {copied_to or 0}: run the copy, or give --wait",
                partition=partition,
                offset=offset,
            )
        return await _behind_all(client, where, table, offset)
    wanted, again_max = table.find(partition)
    sought = await find_chunk(client, where, wanted)
    if sought.chunk is None:
        if await _all_removed(client, where):
            return ImportedCursor(partition, offset, where.entry, EARLIEST, 0, ALL_REMOVED)
        raise NotCopied(
            f"the copy is about to write offset {offset} of partition {partition}: run it, or give --wait",
            partition=partition,
            offset=offset,
        )
    if not sought.is_it:
        note = "records of the offset were removed from the stream: from the oldest one that is left on"
        return ImportedCursor(partition, offset, where.entry, sought.chunk.start, 0, note)
    return ImportedCursor(partition, offset, where.entry, sought.chunk.start, again_max)


async def _behind_all(client: Client, where: CopyEntry, table: OffsetTable, offset: int) -> ImportedCursor:
    """Return the cursor of a partition of which the group has read all copied records."""
    count = table.chunks_of(where.streamlet)
    if not count:
        return ImportedCursor(where.streamlet, offset, where.entry, EARLIEST, 0)
    last = (await find_chunk(client, where, count - 1)).chunk
    if last is None:
        if await _all_removed(client, where):
            return ImportedCursor(where.streamlet, offset, where.entry, EARLIEST, 0, ALL_REMOVED)
        raise NotCopied(
            f"streamlet {where.streamlet} does not have the last records of the copy: run the copy, or give --wait",
            partition=where.streamlet,
            offset=offset,
        )
    return ImportedCursor(where.streamlet, offset, where.entry, last.next, 0)


async def _all_removed(client: Client, where: CopyEntry) -> bool:
    """Return whether records were removed from the entry, and none of the copy is left."""
    bounds = (await client.bounds(where.stream.name))[where.streamlet][where.entry]
    return bounds.first_record > 0 and (await find_chunk(client, where, 0)).chunk is None


def positions_of(stream: StreamDescription, cursors: Sequence[ImportedCursor]) -> dict[int, list[Position]]:
    """Return the cursors as positions for a reset. Other entries, which other writers fill, start at the begin."""
    found: dict[int, list[Position]] = {}
    for each in cursors:
        positions = [EARLIEST] * stream.config.entries
        positions[each.entry] = each.position
        found[each.partition] = positions
    return found
