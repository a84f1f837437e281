"""Runs a copy with the options of the command line."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kera.cli._client import connected
from kera.cli._run import UsageError, command_line, extra
from kera.cli.connect._effects import refusal
from kera.cli.connect._telling import teller
from kera.connect.copying import copy, outliving
from kera.connect.endpoints import (
    End,
    FilesEnd,
    StreamEnd,
    TableEnd,
    TopicEnd,
    check_copy_name,
    copy_name,
    parse_end,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from kera.cli.connect._options import CopyOptions
    from kera.cli.connect._telling import Teller
    from kera.client import Client
    from kera.connect.pieces import Progress, Sink, Source
    from kera.connect.planning.rates import Rates


async def run(options: CopyOptions) -> None:
    """Copy, and print the progress. A copy that follows outlives restarts of its source and its target."""
    with command_line():
        source_end, target_end = ends(options)
        name = check_copy_name(options.name) if options.name is not None else copy_name(source_end, target_end)
    with teller(as_json=options.as_json) as telling:
        attempts = _Attempts(source_end, target_end, name, options, telling)
        try:
            if options.follow:
                await outliving(attempts.copy, telling.failing, telling.resumed)
            else:
                await attempts.copy(_nothing, _nothing)
        except asyncio.CancelledError:
            telling.ended(attempts.rates, "stopped")
            raise
        if attempts.rates is not None:
            attempts.rates.expect(0)  # the number of records left was an estimate
        telling.ended(attempts.rates, "done")


def _nothing() -> None:
    """Ignore an event of a copy that does not follow."""


class _Attempts:
    """One copy, with all its attempts; each attempt opens and closes its own connections."""

    def __init__(self, source: End, target: End, name: str, options: CopyOptions, telling: Teller) -> None:
        self.rates: Rates | None = None
        """Rates over all attempts; None: no attempt has written anything yet."""
        self._source, self._target = source, target
        self._name = name
        self._options = options
        self._telling = telling
        self._begun = False
        self._told: set[str] = set()
        """Notes that were shown already."""

    async def copy(self, began: Callable[[], None], wrote: Callable[[], None]) -> None:
        """Make one attempt; see `kera.connect.copying.outliving`."""
        options = self._options
        async with contextlib.AsyncExitStack() as stack:
            streams = {_cluster(end, options) for end in (self._source, self._target) if isinstance(end, StreamEnd)}
            clients = {each: await stack.enter_async_context(connected(each)) for each in streams}
            with command_line():
                source = await make_source(self._source, self._target, self._name, options, clients)
                sink = make_sink(self._target, self._name, options, clients)

            def going(rates: Rates) -> None:
                self.rates = rates
                wrote()
                self._telling.going(rates)
                self._show(source, sink)

            def beginning(progress: Progress) -> None:
                began()
                if not self._begun:
                    self._begun = True
                    self._telling.began(self._name, progress, self._new_notes(source, sink))
                self._show(source, sink)

            self.rates = (await copy(source, sink, going, beginning, self.rates)).rates

    def _new_notes(self, source: Source, sink: Sink) -> list[str]:
        found = [note for note in dict.fromkeys([*source.notes, *sink.notes]) if note not in self._told]
        self._told.update(found)
        return found

    def _show(self, source: Source, sink: Sink) -> None:
        for note in self._new_notes(source, sink):
            self._telling.noted(note)


def ends(options: CopyOptions) -> tuple[End, End]:
    """Return source and target. Raises `InvalidArgument`, and `UsageError` for two that do not go together."""
    file_of = [None if _has_scheme(text) else options.file_format for text in (options.source, options.target)]
    source, target = (
        parse_end(text, file_format=kind) for text, kind in zip((options.source, options.target), file_of, strict=True)
    )
    if not (isinstance(source, StreamEnd) or isinstance(target, StreamEnd)):
        raise UsageError("one of the two has to be a stream of KerA: kera:NAME")
    if source == target:
        raise UsageError(f"{options.source} is both source and target")
    if isinstance(target, FilesEnd) and "*" in target.path:
        raise UsageError(f"{target.path}: a target is one file, or a directory, with / behind its name")
    reason = refusal(options, source, target)
    if reason is not None:
        raise UsageError(reason)
    return source, target


def _has_scheme(text: str) -> bool:
    return text.split(":", 1)[0] in ("kera", "kafka", "postgresql", "postgres")


def _cluster(end: StreamEnd, options: CopyOptions) -> str:
    return end.bootstrap or options.bootstrap


async def make_source(end: End, target: End, name: str, options: CopyOptions, clients: dict[str, Client]) -> Source:
    """Make the source of a copy; only the cluster is connected yet."""
    source = await _plain_source(end, target, name, options, clients)
    if options.value is None or not isinstance(target, StreamEnd):
        return source
    from kera.connect.values.encoding import Encoding
    from kera.connect.values.source import EncodedSource
    from kera.core.schemas import SchemaType

    subject = options.subject or f"{target.stream}-value"
    encoding = Encoding(SchemaType(options.value.value), subject, options.key, options.time)
    return EncodedSource(source, encoding, clients[_cluster(target, options)].schemas, target.stream)


async def _plain_source(end: End, target: End, name: str, options: CopyOptions, clients: dict[str, Client]) -> Source:
    match end:
        case StreamEnd():
            from kera.connect.streams.source import StreamSource

            client = clients[_cluster(end, options)]
            return StreamSource(
                client,
                end.stream,
                follow=options.follow,
                from_latest=options.from_latest,
                skip_lost=options.skip_lost,
            )
        case TopicEnd():
            with extra("kafka"):
                import confluent_kafka  # noqa: F401 - see whether it is there
            from kera.connect.kafka.connection import read_settings
            from kera.connect.kafka.source import TopicSource

            return TopicSource(
                end.bootstrap,
                end.topic,
                name,
                read_settings(options.kafka_config),
                follow=options.follow,
                from_latest=options.from_latest,
                skip_lost=options.skip_lost,
            )
        case FilesEnd():
            from kera.connect.files.source import FilesSource

            wanted = await _columns(target, options, clients)
            return FilesSource(end, wanted, follow=options.follow, inferred=options.create)
        case TableEnd(changes=True):
            _need_postgres()
            from kera.connect.postgres.changes import ChangesSource
            from kera.connect.postgres.settling import SETTLE_S
            from kera.connect.postgres.slot import slot_name

            (cluster,) = [await client.admin.describe_cluster() for client in clients.values()]
            return ChangesSource(
                end,
                await _columns(target, options, clients),
                slot_name(name, cluster.cluster_id),
                follow=options.follow,
                from_latest=options.from_latest,
                refills=await _has_records(target, options, clients),
                settle_s=float(end.settle) if end.settle else SETTLE_S,
            )
        case TableEnd():
            _need_postgres()
            from kera.connect.postgres.settling import SETTLE_S
            from kera.connect.postgres.source import TableSource

            wanted = await _columns(target, options, clients)
            settle_s = float(end.settle) if end.settle else SETTLE_S
            return TableSource(end, wanted, follow=options.follow, settle_s=settle_s, from_latest=options.from_latest)


def _need_postgres() -> None:
    with extra("postgres"):
        import adbc_driver_manager  # noqa: F401 - see whether it is there
        import adbc_driver_postgresql  # noqa: F401 - likewise


async def _columns(target: End, options: CopyOptions, clients: dict[str, Client]) -> pa.Schema | None:
    """Return the columns of the target stream; None: it does not exist yet, or its values are encoded rows."""
    from kera.core.errors import UnknownStream

    if not isinstance(target, StreamEnd) or options.value is not None:
        return None
    try:
        return (await clients[_cluster(target, options)].describe(target.stream)).schema
    except UnknownStream:
        return None  # the target creates the stream, or reports that it is missing


async def _has_records(target: End, options: CopyOptions, clients: dict[str, Client]) -> bool:
    """Return whether anything has ever been written to the target stream."""
    from kera.core.errors import UnknownStream

    if not isinstance(target, StreamEnd):
        return False
    try:
        bounds = await clients[_cluster(target, options)].bounds(target.stream)
    except UnknownStream:
        return False
    return any(entry.next_record > 0 for entries in bounds.values() for entry in entries)


def make_sink(end: End, name: str, options: CopyOptions, clients: dict[str, Client]) -> Sink:
    """Make the target of a copy; only the cluster is connected yet."""
    match end:
        case StreamEnd():
            from kera.client import ProducerSettings
            from kera.connect.streams.sink import Creation, StreamSink

            # With encoded values, key and time are those of records, and no columns of the stream.
            columns = (None, None) if options.value is not None else (options.key, options.time)
            created = Creation(options.streamlets, *columns) if options.create else None
            partitioner = ProducerSettings.load(partitioner=options.partitioner).partitioner
            return StreamSink(clients[_cluster(end, options)], end.stream, name, created, partitioner=partitioner)
        case TopicEnd():
            with extra("kafka"):
                import confluent_kafka  # noqa: F401 - see whether it is there
            from kera.connect.kafka.connection import read_settings
            from kera.connect.kafka.sink import TopicSink

            settings = read_settings(options.kafka_config)
            partitions = options.streamlets
            return TopicSink(end.bootstrap, end.topic, name, settings, create=options.create, partitions=partitions)
        case FilesEnd():
            from kera.connect.files.sink import FilesSink

            return FilesSink(end, **({} if options.file_bytes is None else {"file_bytes": options.file_bytes}))
        case TableEnd():
            _need_postgres()
            from kera.connect.postgres.sink import TableSink

            return TableSink(end, name, create=options.create)
