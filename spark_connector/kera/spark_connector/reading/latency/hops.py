"""The times of a query's micro-batches, as a part of the records' way: for brokers of streams with a latency
constraint.

On the path of a constraint a query is known by the name of its cursor (``group:NAME``). From when a micro-batch is
planned until Spark shows that it is done is its work; what comes before is the hand-over of its records. Of each
micro-batch the first chunk of a few entries is looked at, and nothing where there is no constraint. Nobody waits for
what is told, and nothing of it ends a query.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kera.spark_connector.planning import Piece
from kera.spark_connector.reading.latency.created import ENTRIES_MAX, Range, created_us

if TYPE_CHECKING:
    from kera.client import Client
    from kera.client.consuming.latency.batch_reports import BatchReports, TakenEntry
    from kera.spark_connector.portal import Portal


class QueryHops:
    """The hops of one query. A copy that goes elsewhere begins anew."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._reports: BatchReports | None = None
        self._streams: list[str] = []
        self._end: Any = None
        """Where the micro-batch ends that is under way."""
        self._taken: list[TakenEntry] = []
        self._planned_s = 0.0

    def __reduce__(self) -> tuple[type[QueryHops], tuple[()]]:
        return QueryHops, ()

    async def planned(self, client: Client, pieces: Sequence[Piece], end: Any, group: str) -> None:
        """A micro-batch was planned that ends at `end`."""
        if self._reports is None:
            self._reports = client.latency.batch_reports(group)
        self._streams = sorted({piece.stream for piece in pieces})
        first = {piece.entry: piece for piece in reversed(pieces) if self._reports.watches(piece.entry.stream_id)}
        asked = {
            Range(piece.stream, piece.entry.streamlet_id, piece.entry.entry, piece.start, piece.end): piece
            for piece in sorted(first.values(), key=lambda piece: piece.entry)[:ENTRIES_MAX]
        }
        self._end, self._planned_s = end, self._now_s()
        self._taken = []
        if asked:
            from kera.client.consuming.latency.batch_reports import TakenEntry

            found = await created_us(client, list(asked))
            self._taken = [TakenEntry(at.stream, asked[at].entry, created) for at, created in found.items()]

    def done(self, end: Any, portal: Callable[[], Portal]) -> None:
        """Spark has all up to `end`."""
        if self._reports is None or self._end is None or end != self._end:
            return
        reports, taken, streams = self._reports, self._taken, self._streams
        planned_s, done_s = self._planned_s, self._now_s()
        self._end = None

        async def tell(_: Client) -> None:
            await reports.done(taken, planned_s, done_s)
            await reports.tell(streams)

        portal().begin(tell)  # whatever becomes of it
