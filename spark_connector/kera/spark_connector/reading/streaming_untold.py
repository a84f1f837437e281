"""The streaming reader for Spark 4.0 and 4.1, which give neither the start of a micro-batch nor its limits.

So this reader remembers where the last micro-batch ended. It does not know that after a restart if all micro-batches
were done. The next micro-batch then ends at the heads of the streams, and the reader checks its range when Spark asks
for the partitions, because that call has the start. Consequences:

* limits have no meaning, and are refused; with ``Trigger.AvailableNow`` Spark makes one micro-batch of all records;
* after a restart there may be one micro-batch without records, because Spark compares ends as text;
* the reader learns the cursor's name when the first micro-batch after a restart is planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kera.core.errors import InvalidArgument, Unavailable
from kera.spark_connector.planning import Piece, heads, next_ends
from kera.spark_connector.planning.offsets import Offsets
from kera.spark_connector.reading.streaming import KeraStreamReader
from kera.spark_connector.spark_api import VERSION, ReadAllAvailable, ReadLimit

if TYPE_CHECKING:
    from kera.client import Client
    from kera.spark_connector.options.reading import ReadOptions


class UntoldStreamReader(KeraStreamReader):
    """The streaming reader for Spark 4.0 and 4.1, which remembers the end of the last micro-batch."""

    _place: dict[str, Any] | None = None
    """The end of the last micro-batch, or the begin of the query; None: unknown."""
    _unseen: dict[str, Any] | None = None
    """An end that was given without knowing the micro-batch's start, so that its range is still to be checked."""
    _seen_group = ""
    """The cursor's name in the checkpoint; empty until it was seen."""

    def initialOffset(self) -> dict[str, Any]:
        """Return where the query begins without a checkpoint."""
        self._place = super().initialOffset()
        return self._place

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Return the end of the next micro-batch: the heads of the streams."""
        require_no_limits(self._options)
        if self._place is None:
            self._place = self._unseen = self.portal.call(self._all).to_json()
        else:
            self._place = super().latestOffset(self._place, ReadAllAvailable())
        return self._place

    async def _all(self, client: Client) -> Offsets:
        return heads(await self._survey(client))

    def pieces(self, start: dict[str, Any], end: dict[str, Any]) -> list[Piece]:
        """Return the pieces of the partitions.

        If the start was unknown before, it also reports removed records, and raises `Unavailable` for an entry that now
        ends before the start.
        """
        given, finish = Offsets.from_json(start), Offsets.from_json(end)
        self._seen_group = given.group or self._seen_group
        if end == self._unseen and start != end:
            self._check(given, finish)
        self._place = end
        return super().pieces(start, end)

    def _check(self, given: Offsets, finish: Offsets) -> None:
        async def look(client: Client) -> None:
            now = await self._survey(client)
            next_ends(given, now, fail_on_data_loss=self._options.fail_on_data_loss)

        self.portal.call(look)
        begins = given.places()
        for entry, end in finish.entries():
            same = given.stream_ids().get(entry.stream) == finish.stream_ids()[entry.stream]
            if same and entry in begins and end.position < begins[entry].position:
                raise Unavailable(
                    f"{entry} ends at {tuple(end.position)}, and the query has read up to"
                    f" {tuple(begins[entry].position)}: its broker does not have all of it again. When it has, remove"
                    " the last file in the folder offsets of the checkpoint, and start the query again",
                    **entry._asdict(),
                )

    def _group(self, stored: str) -> str:
        return super()._group(stored or self._seen_group)


def require_no_limits(options: ReadOptions) -> None:
    """Raise `InvalidArgument` for options that bound micro-batches."""
    if options.cadence is not None:
        raise InvalidArgument(
            f"option epoch: this is Spark {VERSION}, which does not say where a micro-batch of a Python data source"
            " starts: leave it out, or use Spark 4.2 or newer",
            option="epoch",
            version=VERSION,
        )
    limits = options.limits
    if limits.records_max or limits.bytes_max or limits.records_min or limits.latency_target_ms:
        raise InvalidArgument(
            f"this is Spark {VERSION}, which cannot bound the micro-batches of a Python data source: leave out"
            " maxOffsetsPerTrigger, maxBytesPerTrigger, minOffsetsPerTrigger and latencyTarget, or use Spark 4.2 or"
            " newer",
            version=VERSION,
        )
