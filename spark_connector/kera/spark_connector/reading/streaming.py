"""The streaming reader: ``spark.readStream.format("kera")``.

Spark makes one reader per query in a separate process beside the driver, calls all methods but `read` there, and kills
that process when the query stops. Another copy, made in the planning process, goes to the tasks for `read`: so the
constructor opens no connection, and its fields can be pickled.

Spark behaves in ways that are easy to get wrong. The consequences here:

* Spark never stores where a query begins. It calls `initialOffset` whenever it needs the place, also after a restart
  whose first micro-batch was planned but not finished. So the answer is kept, and is part of the first end (``since``);
* Spark compares offsets as text to see whether anything is new. So if nothing is, `start` is returned unchanged;
* Spark may call `partitions` for an empty range, and for a range that an earlier launch has planned;
* Spark calls `commit` for a micro-batch when it plans the next one, so never for the last one of a query with
  ``availableNow``. But asking for the end after a place means that this place is done: if nothing is new, the cursor is
  stored then;
* the cursor is stored while the next micro-batch is being read; only the next attempt to store it waits for that;
* Spark has no read limit with several bounds. So `getDefaultReadLimit` returns one of those in the options, and
  `latestOffset` adds the others; ``ReadAllAvailable`` means no limit at all (as with ``Trigger.Once``);
* Spark does not report how long a micro-batch took. See ``latency.pace``, also for how an answer is delayed.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from kera.core.errors import DataLost, InvalidArgument
from kera.spark_connector.connection import Connection
from kera.spark_connector.delegation.asking import Lease
from kera.spark_connector.options.reading import ReadOptions, parse_read_options
from kera.spark_connector.planning import (
    Advance,
    Now,
    Piece,
    Tail,
    behind_latest,
    cap,
    conclude,
    heads,
    limited,
    moved,
    next_ends,
    ranges,
    revise,
    rounded,
    stopped,
    tails,
    waiting,
)
from kera.spark_connector.planning.admission import BatchLimits, Wait, decide
from kera.spark_connector.planning.epochs import check_kept
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, Offsets
from kera.spark_connector.portal import Portal
from kera.spark_connector.reading.cursor import QueryCursor
from kera.spark_connector.reading.epochs import EpochPlanner
from kera.spark_connector.reading.latency.hops import QueryHops
from kera.spark_connector.reading.latency.pace import QueryPace
from kera.spark_connector.reading.partition import KeraPartition
from kera.spark_connector.reading.survey import (
    boundaries,
    cutting_of_micro_batch,
    last_chunks,
    resolve_places,
    split,
    survey,
    tell_skipped,
    with_columns,
)
from kera.spark_connector.reading.traced import MicroBatchTraces
from kera.spark_connector.reading.worker import read_partition
from kera.spark_connector.spark_api import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    from kera.client import Client

T = TypeVar("T")

BYTES_ANY = 1 << 62
"""A limit without effect, which differs from ``ReadAllAvailable``."""
PLAN_ATTEMPTS = 3
"""Attempts with ``failOnDataLoss=false``: retention may remove records while they are being planned."""

log = logging.getLogger(__name__)


class KeraStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads streams as they grow, in micro-batches."""

    def __init__(
        self,
        options: Mapping[str, str],
        wanted: StructType,
        *,
        initial: dict[str, Any] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        pace: QueryPace | None = None,
    ) -> None:
        """`initial`: the answer of `initialOffset` in this launch, if Spark has asked another reader before."""
        self._given = dict(options)
        self._wanted = wanted
        self._now_s = now_s
        self._cursor = QueryCursor(now_s)
        self._traces = MicroBatchTraces()
        self._pace = pace or QueryPace(now_s)
        self._hops = QueryHops()
        self._portal: Portal | None = None
        self._lease: Lease | None = None
        """The lease of the credentials that tasks use; it ends with this process, or `stop`."""
        self._read: set[str] = set()
        """All streams that were read so far. The set only grows, so that tasks seldom need another token."""
        self._initial = initial
        """Where the query begins; determined once."""
        self._target: Offsets | None = None
        """With ``availableNow``: where the query ends."""
        self._heads: Offsets | None = None
        """The heads of the streams at the last look."""
        self._end: dict[str, Any] | None = None
        """The end of the last micro-batch that this reader planned; it is at ends of chunks."""
        self._taken_s: float | None = None
        """When the last micro-batch was planned; the first one of a launch counts even if it is empty."""
        self._token = ""
        """The random part of the name of this query's cursor, unless the name is given; 8 hex digits."""
        self._real_time: tuple[dict[str, Any], Advance] | None = None
        """The start of the micro-batch in real-time mode: as Spark gave it, and brought up to now."""
        self._skipped: set[str] = set()
        """Streams that are skipped because of their columns, as the log already says."""
        self._warned: tuple[str, ...] = ()
        """The warnings that were logged last: planning repeats the same ones."""

    @functools.cached_property
    def _options(self) -> ReadOptions:
        # Not in the constructor: Spark hides an error of the constructor behind one of its own.
        options = parse_read_options(self._given)
        options.check_streaming()
        options.check_engine()
        return options

    @functools.cached_property
    def _epochs(self) -> EpochPlanner | None:
        cadence = self._options.cadence
        return None if cadence is None else EpochPlanner(self._options, cadence)

    # -- where it begins and ends ------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return where the query begins without a checkpoint."""
        if self._initial is None:
            options = self._options

            async def begin(client: Client) -> Offsets:
                now = await self._survey(client, begins=True)
                now_us = time.time_ns() // 1000
                if self._epochs is not None:
                    return await self._epochs.begin(client, now, now_us=now_us)
                return await resolve_places(
                    client,
                    options.stream_starting,
                    now,
                    now_us=now_us,
                    fail_on_data_loss=options.fail_on_data_loss,
                )

            offsets = self.portal.call(begin)
            self._initial = replace(offsets, group=self._group("")).to_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return one of the bounds that the options set."""
        limits = self._options.limits
        if limits.records_max is not None:
            return ReadMaxRows(limits.records_max)
        if limits.bytes_max is not None:
            return ReadMaxBytes(limits.bytes_max)
        if limits.records_min is not None:
            return ReadMinRows(limits.records_min)
        return ReadAllAvailable() if limits.latency_target_ms is None else ReadMaxBytes(BYTES_ANY)

    def prepareForTriggerAvailableNow(self) -> None:
        """Let the query end where the streams end now."""
        now = self.portal.call(self._survey)
        if self._epochs is not None:
            self._epochs.end_here(now)
        else:
            self._target = heads(now)
            self._pace.has_an_end = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch: the heads, or as many whole chunks as the limits allow."""
        given = Offsets.from_json(start)
        if self._epochs is None:
            check_kept(given)
        limits = self._pace.limits(_limits(limit, self._options.limits), self._options.limits)

        def plan() -> dict[str, Any]:
            return self._repeated(lambda: self.portal.call(lambda client: self._plan(client, start, given, limits)))

        self._pace.asked(start)
        while (end := plan()) == start:
            self._store(given)
            self._cursor.finish()  # Spark may stop the query now, and there is nothing else to do
            self._traces.flush()
            if not self._pace.again():
                return start
        return end

    async def _plan(self, client: Client, start: dict[str, Any], given: Offsets, limits: BatchLimits) -> dict[str, Any]:
        now = await self._survey(client)
        advance = next_ends(given, now, fail_on_data_loss=self._options.fail_on_data_loss)
        self._heads = advance.heads
        group, first, taken_bytes = self._group(given.group), start == self._initial, 0
        if self._epochs is not None:
            concluded = await self._epochs.plan(client, given, now, advance, group=group, first=first)
        else:
            if self._target is not None:
                advance = cap(advance, self._target)
            waited_ms = None if self._taken_s is None else int((self._now_s() - self._taken_s) * 1000)
            waits = waiting(advance, now)
            admitted = await self._pace.admit(client, advance, waits, limits, waited_ms)
            if admitted is None:
                return start
            decision = decide(waits, admitted, waited_ms=waited_ms, available_now=self._target is not None)
            if isinstance(decision, Wait):
                return start
            end = limited(advance, await boundaries(client, advance, decision.shares))
            taken_bytes = sum(taken.length_bytes for taken in ranges(advance.start, end, now))
            concluded = conclude(given, advance, end, group=group, first=first)
        if concluded is not given or self._taken_s is None:
            self._taken_s = self._now_s()
        if concluded is given:
            return start
        self._warn(advance.warnings)
        self._end = concluded.to_json()
        self._pace.planned(self._end, taken_bytes)
        return self._end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the heads of the streams, whatever a micro-batch takes: Spark shows them as ``latestOffset``."""
        if self._heads is None:
            return None
        return (self._heads if self._epochs is None else self._epochs.marked(self._heads)).to_json()

    # -- what is read ------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return at least one partition per entry with records between `start` and `end`."""
        pieces = self.pieces(start, end)
        connection = self.connection_for_tasks(pieces)
        return [KeraPartition(piece, connection) for piece in pieces]

    def connection_for_tasks(self, pieces: Sequence[Piece | Tail]) -> Connection | None:
        """Return the connection for the tasks that read `pieces`; None: that of the options. See ``delegation``."""
        self._read.update(piece.stream for piece in pieces)
        if self._lease is None:
            self._lease = Lease()
        return self._lease.for_tasks(self._options.connection, self._read)

    def pieces(self, start: dict[str, Any], end: dict[str, Any]) -> list[Piece]:
        """Return the pieces to read between `start` and `end`, one per partition."""
        if self._epochs is not None:
            self._epochs.begun = True
        if start == end:
            return []
        begin, finish = Offsets.from_json(start), Offsets.from_json(end)
        options = self._options

        async def plan(client: Client) -> list[Piece]:
            now = await self._survey(client)
            planned = revise(begin, finish, now, fail_on_data_loss=options.fail_on_data_loss)
            self._warn(planned.warnings)
            # An earlier launch may have planned this micro-batch in real-time mode.
            last = {} if end == self._end else await last_chunks(client, planned, now)
            planned, stops = rounded(planned, last)
            if self._epochs is not None:
                pieces = await self._epochs.split(client, planned, finish, now)
            else:
                found = ranges(planned.start, planned.end, now)
                cutting = cutting_of_micro_batch(options)
                pieces = stopped(await split(client, found, now, options, cutting=cutting), stops)
            await self._traces.planned(client, pieces, finish, self._group(finish.group))
            await self._hops.planned(client, pieces, finish, self._group(finish.group))
            return pieces

        return self._repeated(lambda: self.portal.call(plan))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one partition; runs in an executor's Python worker."""
        return read_partition(self._options, partition, self._wanted)

    # -- real-time mode, which Spark does not offer to Python sources ------------------------------------------

    def real_time_pieces(self, start: dict[str, Any]) -> list[Tail]:
        """Return the tails that the tasks of a micro-batch from `start` read: all entries, without an end.

        Raises `InvalidArgument` for options, or a checkpoint, that make no sense in real-time mode.
        """
        if self._epochs is not None:
            raise InvalidArgument(
                "option epoch: in real-time mode records are given out as they come, before their epoch is closed:"
                " leave the option out, or use another trigger",
                option="epoch",
            )
        self._options.check_real_time()
        check_kept(Offsets.from_json(start))
        now, advance = self.portal.call(lambda client: self._advance(client, start))
        return tails(advance.start, now, fail_on_data_loss=self._options.fail_on_data_loss)

    def merged(self, start: dict[str, Any], places: list[tuple[EntryName, EntryOffset]]) -> dict[str, Any]:
        """Return the end of the micro-batch that began at `start`, and whose tasks have come to `places`."""
        given = Offsets.from_json(start)
        if self._real_time is not None and self._real_time[0] == start:
            _, advance = self._real_time
        else:  # another reader has planned it
            _, advance = self.portal.call(lambda client: self._advance(client, start))
        end = moved(advance, places)
        concluded = conclude(given, advance, end, group=self._group(given.group), first=start == self._initial)
        return start if concluded is given else concluded.to_json()

    async def _advance(self, client: Client, start: dict[str, Any]) -> tuple[Now, Advance]:
        now = await self._survey(client)
        advance = next_ends(Offsets.from_json(start), now, fail_on_data_loss=self._options.fail_on_data_loss)
        self._warn(advance.warnings)
        self._heads = advance.heads
        self._real_time = start, advance
        return now, advance

    def lag(self, consumed: dict[str, Any] | None) -> dict[str, str]:
        """Return the lag at `consumed`, which is done, if the heads are known, and the metrics of epochs and pace."""
        self._pace.done(consumed)
        done = None if consumed is None else Offsets.from_json(consumed)
        self._hops.done(done, lambda: self.portal)
        of_epochs = {} if self._epochs is None else self._epochs.metrics(done)
        return behind_latest(done, self._heads) | of_epochs | self._pace.figures()

    # -- the end of a micro-batch ------------------------------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        """Store in the cluster that everything up to `end` is done."""
        self._pace.done(end)
        self._store(Offsets.from_json(end))

    def stop(self) -> None:
        """Finish what is under way, and close the connections."""
        self._cursor.finish()
        self._traces.finish()
        self._traces.flush()
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        if self._portal is not None:
            self._portal.close()
            self._portal = None

    # -- helpers -----------------------------------------------------------------------------------------------

    def _group(self, stored: str) -> str:
        self._token = self._token or secrets.token_hex(4)
        return self._options.group(stored, self._token)

    def _store(self, done: Offsets) -> None:
        self._traces.done(done)
        self._hops.done(done, lambda: self.portal)
        unnamed = self._options.group_id is None
        self._cursor.store(self.portal, self._group(done.group), done, unnamed=unnamed)

    @property
    def portal(self) -> Portal:
        """The reader's connection to its cluster."""
        if self._portal is None:
            self._portal = Portal(self._options.connection)
        return self._portal

    async def _survey(self, client: Client, *, begins: bool = False) -> Now:
        with_epochs, epoch = self._options.cadence is not None, self._options.include_epoch
        now = await survey(client, self._options.subscription, begins=begins, promise=with_epochs)
        found, skipped = with_columns(self._wanted, now, self._options.on_mismatch, epoch=epoch)
        tell_skipped(skipped, self._skipped)
        return found

    def _repeated(self, plan: Callable[[], T]) -> T:
        """Return the result of `plan`, which is repeated if records vanish meanwhile and losses are allowed."""
        for _ in range(PLAN_ATTEMPTS - 1):
            try:
                return plan()
            except DataLost:
                if self._options.fail_on_data_loss:
                    raise
        return plan()

    def _warn(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            if warning not in self._warned:
                log.warning("failOnDataLoss=false: %s", warning)
        self._warned = warnings or self._warned


def _limits(limit: ReadLimit, limits: BatchLimits) -> BatchLimits:
    """Return Spark's limit, with the limits of the options that Spark cannot express."""
    if isinstance(limit, ReadMaxRows):
        return replace(limits, records_max=limit.max_rows)
    if isinstance(limit, ReadMaxBytes):
        return replace(limits, bytes_max=limit.max_bytes)
    if isinstance(limit, ReadMinRows):
        return replace(limits, records_min=limit.min_rows)
    return BatchLimits()
