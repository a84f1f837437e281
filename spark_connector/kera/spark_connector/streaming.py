"""The streaming reader: ``spark.readStream.format("kera")``.

Spark makes one reader per query in a process of its own beside the driver, calls all methods but `read` there, and
kills that process when the query stops. Another copy, made in the planning process, goes to the tasks for `read`: so
the constructor connects to nothing and what it keeps can be pickled.

What Spark does that is easy to get wrong, and what follows from it here:

* it never stores where a query begins. It asks `initialOffset` again for each use of it, also after a restart whose
  first micro-batch was planned but not finished. So the answer is kept, and travels in the first end (``since``);
* it decides by comparing text whether there is anything new. So when nothing is, `start` is given back as it came;
* it may ask `partitions` for an empty range, and for one that an earlier launch has planned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from kera.spark_connector.columns import check_columns, columns_of
from kera.spark_connector.offsets import StreamOffsets
from kera.spark_connector.options import STARTING, KeraOptions, parse_options
from kera.spark_connector.planning import advance, cap, ends, forwarded, partitions, shares
from kera.spark_connector.portal import Portal
from kera.spark_connector.survey import Survey, limited, settle, survey
from kera.spark_connector.worker import read_partition

if TYPE_CHECKING:
    from kera.client import Client


class KeraStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream as it grows, in micro-batches."""

    def __init__(self, options: Mapping[str, str], wanted: StructType) -> None:
        self._given = dict(options)
        self._wanted = wanted
        self._portal: Portal | None = None
        self._initial: dict[str, Any] | None = None
        """Where the query begins; asked for once."""
        self._target: StreamOffsets | None = None
        """With ``availableNow``: where the query ends."""
        self._heads: StreamOffsets | None = None
        """How far the stream went when it was last asked."""

    @functools.cached_property
    def _options(self) -> KeraOptions:
        # Not in the constructor: Spark hides the error of a reader that could not be made behind one of its own.
        options = parse_options(self._given)
        options.check_streaming()
        return options

    def initialOffset(self) -> dict[str, Any]:
        """Where the query begins when there is no checkpoint."""
        if self._initial is None:

            async def begin(client: Client) -> StreamOffsets:
                now = await self._survey(client)
                return await settle(client, now, STARTING, self._options.stream_starting)

            self._initial = self._open().call(begin).to_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """What ``maxOffsetsPerTrigger`` says."""
        records_max = self._options.records_per_trigger_max
        return ReadAllAvailable() if records_max is None else ReadMaxRows(records_max)

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on the stream ends where it ends now."""
        now = self._open().call(self._survey)
        self._target = now.offsets(ends(now.bounds))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next micro-batch: all there is, or as many whole chunks as `limit` allows."""
        begin = StreamOffsets.from_json(start)

        async def plan(client: Client) -> StreamOffsets:
            now = await self._survey(client)
            begin.require(now.description.stream_id)
            heads = ends(now.bounds)
            self._heads = now.offsets(heads)
            if self._target is not None:
                heads = cap(heads, self._target.streamlets)
            end = now.offsets(advance(begin.streamlets, heads))
            if isinstance(limit, ReadMaxRows):
                end = await limited(client, forwarded(begin, now.bounds), end, shares(begin, end, limit.max_rows))
            return end

        end = self._open().call(plan)
        if start == self._initial:
            return replace(end, since=begin.streamlets).to_json()
        return start if end.streamlets == begin.streamlets else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """How far the stream goes, whatever a micro-batch takes of it: what Spark shows as ``latestOffset``."""
        return None if self._heads is None else self._heads.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One per entry with records between the two."""
        if start == end:
            return []
        begin, finish = StreamOffsets.from_json(start), StreamOffsets.from_json(end)
        if finish.since is not None:
            begin = replace(finish, streamlets=finish.since)
        now = self._open().call(self._survey)
        begin.require(now.description.stream_id)
        finish.require(now.description.stream_id)
        return list(partitions(forwarded(begin, now.bounds), finish, typed=now.description.typed))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one partition; runs in an executor's Python worker."""
        return read_partition(self._options.bootstrap, partition, self._wanted)

    def stop(self) -> None:
        """Close the connections."""
        if self._portal is not None:
            self._portal.close()
            self._portal = None

    def _open(self) -> Portal:
        if self._portal is None:
            self._portal = Portal(self._options.bootstrap)
        return self._portal

    async def _survey(self, client: Client) -> Survey:
        now = await survey(client, self._options.stream)
        there = columns_of(now.description.schema, typed=now.description.typed)
        check_columns(self._wanted, there, self._options.stream)
        return now
