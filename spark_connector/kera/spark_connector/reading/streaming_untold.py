"""The streaming reader for Spark 4.0 and 4.1, which say neither where a micro-batch starts nor how much it may take.

So this reader remembers where the last one has ended. That is not known after a restart whose micro-batches were all
done: then the next one ends where the streams end, and what is between is looked at when Spark asks for its partitions,
which says the start. What follows from it:

* limits have no meaning, and are refused; with ``Trigger.AvailableNow`` Spark makes one micro-batch of all there is;
* after a restart there may be one micro-batch without records, as Spark compares ends as text;
* the cursor's name is known again when the first micro-batch after a restart is planned.
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
    """The streaming reader for Spark 4.0 and 4.1; it remembers the end of the last micro-batch by itself."""

    _place: dict[str, Any] | None = None
    """Where the last micro-batch has ended, or the query begins; None: that is not known."""
    _unseen: dict[str, Any] | None = None
    """An end that was said without knowing where the micro-batch starts: what is between has to be looked at."""
    _seen_group = ""
    """The cursor's name in the checkpoint, as far as it was seen."""

    def initialOffset(self) -> dict[str, Any]:
        """Where the query begins when there is no checkpoint."""
        self._place = super().initialOffset()
        return self._place

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """The end of the next micro-batch: all there is."""
        require_no_limits(self._options)
        if self._place is None:
            self._place = self._unseen = self.portal.call(self._all).to_json()
        else:
            self._place = super().latestOffset(self._place, ReadAllAvailable())
        return self._place

    async def _all(self, client: Client) -> Offsets:
        return heads(await self._survey(client))

    def pieces(self, start: dict[str, Any], end: dict[str, Any]) -> list[Piece]:
        """The pieces of the partitions; reports removed records, and streams that have gone back, if the start was
        unknown.
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
