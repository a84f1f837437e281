"""The driver's questions to the cluster about streams: each question once per planning step, many in parallel.

Planning itself is pure (``planning``), and this module brings it the facts. It looks at all streams of a query in
parallel, up to a limit; a broker that has several of them gets a question for each.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.types import StructType

from kera.core.base.ids import Position
from kera.core.errors import DataLost, InvalidArgument, InvalidCursor, SchemaMismatch, UnknownStream
from kera.spark_connector.columns import check_columns, columns_of, with_epoch, without_epoch
from kera.spark_connector.options.names import ON_MISMATCH
from kera.spark_connector.options.reading import OnMismatch, ReadOptions
from kera.spark_connector.options.subscription import Subscription
from kera.spark_connector.planning import (
    Advance,
    Cutting,
    EntryRange,
    Now,
    Piece,
    Planned,
    Question,
    StreamNow,
    cut,
    find_bounds,
    questions,
    resolve,
    to_ask,
)
from kera.spark_connector.planning.admission import EntryShare
from kera.spark_connector.planning.epochs import Asking
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, Offsets
from kera.spark_connector.planning.places import Where

if TYPE_CHECKING:
    from kera.client import ChunkPlace, ChunkQuery, Client, SegmentBounds, StreamDescription

T = TypeVar("T")

SIDE_BY_SIDE_MAX = 32
"""Maximum number of questions under way at the same time."""

log = logging.getLogger(__name__)


async def survey(client: Client, subscription: Subscription, *, begins: bool = False, promise: bool = False) -> Now:
    """Return the subscribed streams as they are now: where they are, and how far they go.

    `promise`: ask brokers to promise that no older records follow, for epochs.

    `begins`: the query begins now. Then a missing stream raises `UnknownStream`; for a running query missing streams
    are left out, and planning decides.
    """
    names = await _subscribed(client, subscription)

    async def look(name: str) -> StreamNow | None:
        try:
            return await _stream_now(client, subscription, name, promise=promise)
        except UnknownStream:
            return None

    found = await _side_by_side(look, names)
    now = {stream.name: stream for stream in found if stream is not None}
    if begins and (not now or len(now) < len(names)):
        subscription.require({stream.name for stream in await client.admin.list_streams()})
        if subscription.missing(now):
            raise UnknownStream(f"streams were deleted just now: {', '.join(subscription.missing(now))}")
    return now


async def descriptions(
    client: Client, subscription: Subscription, *, may_be_gone: bool = False
) -> list[StreamDescription]:
    """Return the subscribed streams, without the facts that only brokers have.

    Raises `UnknownStream` if a subscribed stream does not exist; with `may_be_gone` only if none is left.
    """
    there = {stream.name: stream for stream in await client.admin.list_streams()}
    left = subscription.select(there) if may_be_gone else []
    return [there[name] for name in left or subscription.require(there)]


async def resolve_places(client: Client, where: Where, now: Now, *, now_us: int, fail_on_data_loss: bool) -> Offsets:
    """Return the offsets that `where`, an option's place, stands for now."""
    asked = questions(where, now, now_us=now_us)
    try:
        places = await _located(client, [(question.entry, _query_of(question)) for question in asked])
    except InvalidCursor as error:
        raise InvalidArgument(f"option {where.option}: {error.message}", option=where.option) from error
    answers = {question: _offset_of(place) for question, place in zip(asked, places, strict=True)}
    if where.is_start:
        for question, place in zip(asked, places, strict=True):
            _check_lost(where, question, place, fail_on_data_loss=fail_on_data_loss)
    return resolve(where, now, answers, now_us=now_us, fail_on_data_loss=fail_on_data_loss)


def _check_lost(where: Where, question: Question, place: ChunkPlace, *, fail_on_data_loss: bool) -> None:
    """Check that no records right before a place are lost. If some are, raise `DataLost` or log a warning."""
    if place.lost_from is None:
        return
    error = DataLost(
        f"option {where.option}: what {question.entry} had from {tuple(place.lost_from)} up to {tuple(place.position)}"
        " is lost, and may have been of that time. Set failOnDataLoss to false to begin with what is there",
        option=where.option,
        lost_from=tuple(place.lost_from),
        available_from=tuple(place.position),
        **question.entry._asdict(),
    )
    if fail_on_data_loss:
        raise error
    log.warning("%s", error.message)


async def answered(client: Client, asking: Asking[T]) -> T:
    """Answer the questions of `asking`, and return its decision."""
    try:
        asked = next(asking)
        while True:
            places = await _located(client, [(question.entry, _query_of(question)) for question in asked])
            asked = asking.send({question: _offset_of(place) for question, place in zip(asked, places, strict=True)})
    except StopIteration as decided:
        decision: T = decided.value
        return decision


async def boundaries(
    client: Client, advance: Advance, shares: Mapping[EntryName, EntryShare]
) -> dict[EntryName, EntryOffset]:
    """Return the furthest chunk boundary within each entry's share, but at least one chunk after its start."""
    starts, heads = advance.start.places(), advance.heads.places()
    asked = [
        (entry, query)
        for entry, share in shares.items()
        for query in _queries_of(entry, starts[entry], heads[entry], share)
    ]
    nearest: dict[EntryName, EntryOffset] = {}
    for (entry, _), place in zip(asked, await _located(client, asked), strict=True):
        offset = _offset_of(place)
        nearest[entry] = min(nearest.get(entry, offset), offset)
    return nearest


async def last_chunks(client: Client, planned: Planned, now: Now) -> dict[EntryName, tuple[EntryOffset, EntryOffset]]:
    """Return start and end of the chunk at the micro-batch's end, for each entry that has one and data to read."""
    from kera.client import ChunkQuery

    begins = planned.start.places()
    asked = []
    for entry, end in planned.end.entries():
        there = find_bounds(now, entry)
        if there is not None and begins.get(entry, end) < end and there.start <= end.position < there.end:
            here = ChunkQuery(entry.streamlet, entry.entry, end.position, end.position, records_max=1)
            asked += [(entry, here), (entry, here._replace(end=there.end))]
    try:
        places = [_offset_of(place) for place in await _located(client, asked)]
    except (DataLost, InvalidCursor):
        return {}  # the task that reads the range reports what is lost
    return {asked[number][0]: (places[number], places[number + 1]) for number in range(0, len(asked), 2)}


async def split(
    client: Client, ranges: Sequence[EntryRange], now: Now, options: ReadOptions, *, cutting: Cutting
) -> list[Piece]:
    """Cut `ranges` into the pieces of partitions."""
    loss = options.fail_on_data_loss
    segments = await _segments(client, ranges, now, cutting, fail_on_data_loss=loss)
    return cut(ranges, now, segments, cutting, fail_on_data_loss=loss)


def cutting_of_batch(options: ReadOptions, parallelism: int | None) -> Cutting:
    """Return how a batch is cut. `parallelism`: Spark's default; None: not known."""
    # A Python source cannot know Spark's default parallelism. For a local session it is the number of cores; otherwise
    # users have ``minPartitions``.
    parallelism = parallelism or len(os.sched_getaffinity(0))
    return Cutting(options.partitions_min, options.records_per_partition_max, parallelism)


def cutting_of_micro_batch(options: ReadOptions) -> Cutting:
    """Return how a micro-batch is cut."""
    return Cutting(options.partitions_min, options.records_per_partition_max, stable=True)


def with_columns(
    wanted: StructType, now: Now, on_mismatch: OnMismatch, *, epoch: bool = False
) -> tuple[Now, dict[str, str]]:
    """Return the streams of `now` that have the columns `wanted`, and why each of the others is skipped.

    `epoch`: `wanted` has the epoch column besides the columns of the streams.

    Raises `SchemaMismatch` for a stream with other columns, unless `on_mismatch` is ``skip``.
    """
    own = without_epoch(wanted) if epoch else wanted
    found, skipped = {}, {}
    for name, stream in now.items():
        try:
            if epoch and stream.typed:
                with_epoch(columns_of(stream.schema, typed=True))
            # A query that names the headers column gets it; ``includeHeaders`` is for queries that name no columns.
            there = columns_of(stream.schema, typed=stream.typed and on_mismatch != "bytes", headers=True)
            check_columns(own, there, f"stream '{name}'")
        except SchemaMismatch as error:
            if on_mismatch != "skip":
                hint = "" if len(now) < 2 else f". Option {ON_MISMATCH} can have such streams skipped"
                raise SchemaMismatch(error.message + hint, **error.attributes) from error
            skipped[name] = error.message
        else:
            found[name] = stream
    return found, skipped


def tell_skipped(skipped: Mapping[str, str], told: set[str]) -> None:
    """Log each skipped stream once. `told`: the names that were logged already; grows."""
    for name, reason in skipped.items():
        if name not in told:
            told.add(name)
            log.warning("%s=skip: stream '%s' is not read: %s", ON_MISMATCH, name, reason)


async def _segments(
    client: Client, ranges: Sequence[EntryRange], now: Now, cutting: Cutting, *, fail_on_data_loss: bool
) -> dict[EntryName, Sequence[SegmentBounds]]:
    """Return the segments of the `ranges` that may be cut, for `planning.cut`."""

    async def look(item: EntryRange) -> Sequence[SegmentBounds]:
        stream, streamlet, entry = item.entry
        try:
            return await client.segments(stream, streamlet, entry, item.start.position, item.end.position)
        except (DataLost, InvalidCursor, UnknownStream):
            if fail_on_data_loss:
                raise
            return ()  # the range stays in one piece, and the task that reads it reports what is lost

    asked = to_ask(ranges, now, cutting)
    answers = await _side_by_side(look, asked)
    return {item.entry: answer for item, answer in zip(asked, answers, strict=True)}


async def _subscribed(client: Client, subscription: Subscription) -> list[str]:
    if subscription.pattern is None:
        return subscription.select(subscription.names or tuple(subscription.assign or ()))
    return subscription.select([stream.name for stream in await client.admin.list_streams()])


async def _stream_now(client: Client, subscription: Subscription, name: str, *, promise: bool) -> StreamNow:
    bounds = await client.bounds(name, promise=promise)
    description = await client.describe(name)  # which `bounds` has just asked the coordinator for
    return StreamNow(
        name=name,
        stream_id=description.stream_id,
        typed=description.typed,
        schema=description.schema,
        bounds={streamlet: bounds[streamlet] for streamlet in subscription.streamlets(name, bounds)},
        assignments=description.assignments,
        nodes={broker.broker_id: broker.node_id for broker in description.brokers.values()},
        epoch_ms=description.config.epoch_ms,
        is_by_clock=description.config.punctuation == "clock",
    )


def _query_of(question: Question) -> ChunkQuery:
    from kera.client import ChunkQuery

    _, streamlet, entry = question.entry
    if question.timestamp_us is None:  # the ordinal at the place itself
        return ChunkQuery(streamlet, entry, question.start, question.end, records_max=1)
    return ChunkQuery(streamlet, entry, question.start, question.end, timestamp_us=question.timestamp_us)


def _queries_of(entry: EntryName, start: EntryOffset, head: EntryOffset, share: EntryShare) -> list[ChunkQuery]:
    from kera.client import ChunkQuery

    of_range = ChunkQuery(entry.streamlet, entry.entry, start.position, head.position)
    queries = []
    if share.records_max is not None:
        queries.append(of_range._replace(records_max=share.records_max))
    if share.bytes_max is not None:
        queries.append(of_range._replace(bytes_max=share.bytes_max))
    return queries


def _offset_of(place: ChunkPlace) -> EntryOffset:
    return EntryOffset(Position(*place.position), place.record)


async def _located(client: Client, asked: Sequence[tuple[EntryName, ChunkQuery]]) -> list[ChunkPlace]:
    """Return one place per query, in the same order, with one call per stream."""
    by_stream: dict[str, list[int]] = {}
    for number, (entry, _) in enumerate(asked):
        by_stream.setdefault(entry.stream, []).append(number)

    async def locate(stream: str) -> list[ChunkPlace]:
        return await client.locate(stream, [asked[number][1] for number in by_stream[stream]])

    places: dict[int, ChunkPlace] = {}
    for stream, found in zip(by_stream, await _side_by_side(locate, by_stream), strict=True):
        places.update(zip(by_stream[stream], found, strict=True))
    return [places[number] for number in range(len(asked))]


async def _side_by_side(ask: Callable[[Any], Coroutine[Any, Any, T]], about: Iterable[Any]) -> list[T]:
    """Return the answers of `ask` for each item of `about`. All calls have ended before the first error is raised."""
    room = asyncio.Semaphore(SIDE_BY_SIDE_MAX)

    async def within(item: Any) -> T:
        async with room:
            return await ask(item)

    answers = await asyncio.gather(*map(within, about), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[return-value]  # no answer is an exception
