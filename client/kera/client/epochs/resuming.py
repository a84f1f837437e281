"""Checks that a consumer group resumes at a whole epoch: none of its records lies before the committed position.

A group commits at the beginning of an epoch, of the length that it read with. With longer epochs, also after the stream
was altered, this position may be within an epoch, and the reader would deliver the rest as that epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from kera.client.admin.locating import ChunkQuery, locate
from kera.client.cluster.cluster import Cluster
from kera.client.types import StreamDescription
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import EpochPassed


class Resumed:
    """Checks a reader that starts at the cursors of a consumer group in some streams."""

    def __init__(
        self,
        cluster: Cluster,
        streams: Sequence[StreamDescription],
        starts: Mapping[int, Mapping[tuple[int, int], Position]],
        epoch_us: int,
    ) -> None:
        """`starts`: the committed positions, by stream, and by streamlet and entry."""
        self._cluster = cluster
        self._epoch_us = epoch_us
        self._starts = {
            stream.stream_id: {entry: place for entry, place in starts[stream.stream_id].items() if place != EARLIEST}
            for stream in streams
        }
        self._left = {stream.stream_id: stream for stream in streams}
        """Streams without any delivered epoch yet."""

    async def check(self, epoch: int, stream_ids: AbstractSet[int]) -> None:
        """Raise `EpochPassed` if records of an epoch lie before the committed positions of one of these streams.

        Asks brokers about the first epoch of each stream; later epochs are behind it. Does not notice records that were
        removed.
        """
        for stream_id in stream_ids & self._left.keys():
            await self._check(epoch, self._left[stream_id])
            del self._left[stream_id]

    async def _check(self, epoch: int, stream: StreamDescription) -> None:
        starts = self._starts[stream.stream_id]
        begin_us = max(epoch * self._epoch_us, -1 << 63)
        first = await locate(
            self._cluster,
            stream.name,
            [
                ChunkQuery(streamlet_id, entry, EARLIEST, place, timestamp_us=begin_us)
                for (streamlet_id, entry), place in starts.items()
            ],
        )
        before = {
            entry: found.record
            for (entry, place), found in zip(starts.items(), first, strict=True)
            if found.position < place
        }
        # Between both there may be only a punctuation, or nothing: the end of one segment and the start of the next.
        queries = [ChunkQuery(*entry, starts[entry], starts[entry], bytes_max=0) for entry in before]
        committed = await locate(self._cluster, stream.name, queries)
        for ((streamlet_id, number), record), here in zip(before.items(), committed, strict=True):
            if here.record != record:
                raise self._is_part(epoch, stream, streamlet_id, number)

    def _is_part(self, epoch: int, stream: StreamDescription, streamlet_id: int, entry: int) -> EpochPassed:
        length_ms = self._epoch_us // 1000
        same = "" if length_ms == stream.config.epoch_ms else "; epoch_ms as it was goes on where it was committed"
        return EpochPassed(
            f"entry {entry} of streamlet {streamlet_id} of stream {stream.name!r} has records of epoch {epoch} (of"
            f" {length_ms} ms) before what the consumer group has committed, which would get only the rest of it:"
            f" start={epoch} reads all of it again, start={epoch + 1} continues after it{same}",
            stream=stream.name,
            streamlet_id=streamlet_id,
            entry=entry,
            epoch=epoch,
        )
