"""What the driver asks the cluster about a stream, each question once per planning step.

Planning itself is pure (``planning``): this module brings it the facts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kera.core.ids import EntryId, Position
from kera.spark_connector.chunks import chunks
from kera.spark_connector.offsets import EntryOffset, Lane, Places, StreamOffsets
from kera.spark_connector.planning import StreamBounds, by_lane, resolve

if TYPE_CHECKING:
    from kera.client import Client, StreamDescription


@dataclass(frozen=True)
class Survey:
    """A stream as it is now."""

    description: StreamDescription
    bounds: StreamBounds

    def offsets(self, streamlets: Mapping[int, tuple[EntryOffset, ...]]) -> StreamOffsets:
        """`streamlets` as places in this incarnation of the stream."""
        return StreamOffsets(self.description.name, self.description.stream_id, streamlets)


async def survey(client: Client, stream: str) -> Survey:
    """Ask the coordinator what the stream is now (not what is remembered of it), and the brokers how far it goes."""
    description = await client.admin.describe_stream(stream)
    return Survey(description, await client.bounds(stream))


async def settle(client: Client, now: Survey, option: str, places: Places) -> StreamOffsets:
    """What `places` means now; `option` is where the user said it."""
    records: dict[tuple[Lane, Position], int] = {}
    for streamlet, row in by_lane(option, places, now.bounds).items():
        for entry, place in enumerate(row):
            if isinstance(place, Position):
                records[(streamlet, entry), place] = await _record_at(client, now, (streamlet, entry), place)
    return now.offsets(resolve(option, places, now.bounds, records))


async def limited(client: Client, start: StreamOffsets, end: StreamOffsets, share: Mapping[Lane, int]) -> StreamOffsets:
    """The furthest chunk boundaries before `end` within each entry's `share` of records, but at least one chunk."""
    before = dict(start.lanes())
    streamlets: dict[int, list[EntryOffset]] = {}
    for lane, offset in end.lanes():
        begin = before.get(lane)
        if begin is not None and share[lane] < offset.record - begin.record:
            entry = EntryId(end.stream_id, *lane)
            offset = await _boundary(client, end.stream, entry, begin, offset, share[lane])  # noqa: PLW2901
        streamlets.setdefault(lane[0], []).append(offset)
    return StreamOffsets(end.stream, end.stream_id, {key: tuple(row) for key, row in streamlets.items()})


async def _boundary(
    client: Client, stream: str, entry: EntryId, begin: EntryOffset, end: EntryOffset, records_max: int
) -> EntryOffset:
    # The chunks themselves are read to find where they end: the brokers have no question for the headers alone yet.
    reached = begin
    async with contextlib.aclosing(chunks(client, stream, entry, begin.position, end.position)) as source:
        async for chunk in source:
            after = chunk.header.first_record + chunk.header.record_count
            if after - begin.record > records_max and reached is not begin:
                break
            reached = EntryOffset(chunk.next, after)
    return reached


async def _record_at(client: Client, now: Survey, lane: Lane, position: Position) -> int:
    there = now.bounds[lane[0]][lane[1]]
    if position >= there.end:
        return there.next_record
    entry = EntryId(now.description.stream_id, *lane)
    async with contextlib.aclosing(chunks(client, now.description.name, entry, position, there.end)) as source:
        async for chunk in source:
            return int(chunk.header.first_record)
    return there.next_record
