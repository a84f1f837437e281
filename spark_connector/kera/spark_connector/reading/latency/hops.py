"""Reports the times of a query's micro-batches to brokers of streams with a latency constraint, as hops of records.

On the path of a constraint, a query has the name of its cursor (``group:NAME``). The hop's processing time runs from
planning a micro-batch until Spark shows that it is done; the time before that is the hand-over of its records. For each
micro-batch the first chunk of a few entries is read, and nothing if there is no constraint. The query does not wait for
a report, and no failed report ends it.
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
    """The hops of one query. A pickled copy starts empty."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._reports: BatchReports | None = None
        self._streams: list[str] = []
        self._end: Any = None
        """The end of the micro-batch that is under way."""
        self._taken: list[TakenEntry] = []
        self._planned_s = 0.0

    def __reduce__(self) -> tuple[type[QueryHops], tuple[()]]:
        return QueryHops, ()

    async def planned(self, client: Client, pieces: Sequence[Piece], end: Any, group: str) -> None:
        """Note that a micro-batch up to `end` was planned, and when its records were made."""
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
        """Report the micro-batch up to `end`, which Spark has done."""
        if self._reports is None or self._end is None or end != self._end:
            return
        reports, taken, streams = self._reports, self._taken, self._streams
        planned_s, done_s = self._planned_s, self._now_s()
        self._end = None

        async def tell(_: Client) -> None:
            await reports.done(taken, planned_s, done_s)
            await reports.tell(streams)

        portal().begin(tell)  # its outcome is ignored
