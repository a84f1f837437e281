"""The start and the end of a consumer, as a range for each entry of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Wanted
from kera.client.consuming.committed import committed_cursors
from kera.client.positions import ChunkPlace, Places, Positions, check_streamlets
from kera.client.settings import ConsumerSettings
from kera.client.types import StreamDescription
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import InvalidArgument

Start = Literal["earliest", "latest", "committed"]
End = Literal["latest"]


async def ranges_to_read(
    cluster: Cluster,
    settings: ConsumerSettings,
    name: str,
    *,
    start: Start | Places,
    end: End | Positions | None,
    streamlets: Sequence[int] | None = None,
) -> tuple[StreamDescription, list[Wanted]]:
    """Return the range to read for each entry of a stream, including empty ranges. `streamlets`: None means all.

    Raises `UnknownStream`, `StreamletOutOfRange`, and `InvalidArgument` for positions that leave out an entry or name
    one that does not exist.
    """
    needs_bounds = start == "latest" or end == "latest"
    bounds = await cluster.bounds(name) if needs_bounds else {}
    stream = await cluster.stream(name)  # from the cache if `bounds` has looked it up
    committed: Mapping[EntryId, Position] = {}
    if start == "committed":
        committed = await committed_cursors(cluster, settings.consumer_group, stream)
    ranges = []
    if streamlets is None:
        chosen = list(stream.assignments)
    else:
        chosen = sorted({stream.entry_id(streamlet_id, 0).streamlet_id for streamlet_id in streamlets})
    for streamlet_id in chosen:
        for number in range(stream.config.entries):
            entry = EntryId(stream.stream_id, streamlet_id, number)
            first, behind = committed.get(entry, EARLIEST), None
            if start == "latest":
                first = bounds[streamlet_id][number].end
            elif not isinstance(start, str):
                first = _given(start, streamlet_id, number, stream)
            if end == "latest":
                behind = bounds[streamlet_id][number].end
            elif end is not None:
                behind = _given(end, streamlet_id, number, stream)
            ranges.append(Wanted(entry, first, behind))
    for given in (start, end):
        if isinstance(given, Mapping):
            check_streamlets(given, stream)
    return stream, ranges


def _given(positions: Places, streamlet_id: int, entry: int, stream: StreamDescription) -> Position:
    try:
        given = positions[streamlet_id][entry]
    except (KeyError, IndexError):
        raise InvalidArgument(
            f"no position is given for streamlet {streamlet_id}, entry {entry} of stream {stream.name!r}",
            stream=stream.name,
            streamlet_id=streamlet_id,
        ) from None
    return given.start if isinstance(given, ChunkPlace) else Position(*given)


def first_records(start: Start | Places, stream: StreamDescription) -> dict[EntryId, int]:
    """Return the ordinal of the first record to deliver, for entries whose `start` is within a chunk."""
    if isinstance(start, str):
        return {}
    return {
        EntryId(stream.stream_id, streamlet_id, number): place.record
        for streamlet_id, places in start.items()
        for number, place in enumerate(places)
        if isinstance(place, ChunkPlace) and place.skip_records
    }
