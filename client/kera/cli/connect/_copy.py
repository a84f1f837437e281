"""Runs a copy as the command line says."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kera.cli._client import connected
from kera.cli._run import UsageError, extra
from kera.cli.connect._telling import teller
from kera.connect.copying import copy
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
    import pyarrow as pa

    from kera.cli.connect._options import CopyOptions
    from kera.client import Client
    from kera.connect.pieces import Progress, Sink, Source
    from kera.connect.planning.rates import Rates


async def run(options: CopyOptions) -> None:
    """Copy, and tell how it goes."""
    source_end, target_end = ends(options)
    name = check_copy_name(options.name) if options.name is not None else copy_name(source_end, target_end)
    last: Rates | None = None
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            bootstrap: await stack.enter_async_context(connected(bootstrap))
            for bootstrap in {_cluster(end, options) for end in (source_end, target_end) if isinstance(end, StreamEnd)}
        }
        source = await _source(source_end, target_end, name, options, clients)
        sink = await _sink(target_end, name, options, clients)
        telling = stack.enter_context(teller(as_json=options.as_json))

        def tell(rates: Rates) -> None:
            nonlocal last
            last = rates
            telling.going(rates)

        def began(progress: Progress) -> None:
            telling.began(name, progress, [*source.notes, *sink.notes])

        try:
            copied = await copy(source, sink, tell, began)
        except asyncio.CancelledError:
            telling.ended(last, "stopped")
            raise
        telling.ended(copied.rates, "done")


def ends(options: CopyOptions) -> tuple[End, End]:
    """Source and target. Raises `InvalidArgument`, `UsageError` for two that do not go together."""
    file_of = [None if _has_scheme(text) else options.file_format for text in (options.source, options.target)]
    if options.file_format is not None and not any(file_of):
        raise UsageError("--format is about files, and there are none")
    source, target = (
        parse_end(text, file_format=kind) for text, kind in zip((options.source, options.target), file_of, strict=True)
    )
    if not (isinstance(source, StreamEnd) or isinstance(target, StreamEnd)):
        raise UsageError("one of the two has to be a stream of KerA: kera:NAME")
    if source == target:
        raise UsageError(f"{options.source} is both source and target")
    if isinstance(target, FilesEnd) and "*" in target.path:
        raise UsageError(f"{target.path}: a target is one file, or a directory, with / behind its name")
    if options.follow and isinstance(source, FilesEnd):
        raise UsageError("--follow: files end; start the copy again when there are more")
    if (options.key or options.time) and not options.create:
        raise UsageError("--key and --time are about a stream that is made: with --create")
    return source, target


def _has_scheme(text: str) -> bool:
    return text.split(":", 1)[0] in ("kera", "kafka", "postgresql", "postgres")


def _cluster(end: StreamEnd, options: CopyOptions) -> str:
    return end.bootstrap or options.bootstrap


async def _source(end: End, target: End, name: str, options: CopyOptions, clients: dict[str, Client]) -> Source:
    match end:
        case StreamEnd():
            from kera.connect.streams.source import StreamSource

            client = clients[_cluster(end, options)]
            return StreamSource(client, end.stream, follow=options.follow, from_latest=options.from_latest)
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

            return FilesSource(end, await _columns(target, options, clients))
        case TableEnd():
            _need_postgres()
            from kera.connect.postgres.settling import SETTLE_S
            from kera.connect.postgres.source import TableSource

            wanted = await _columns(target, options, clients)
            settle_s = float(end.settle) if end.settle else SETTLE_S
            return TableSource(end, wanted, follow=options.follow, settle_s=settle_s)


def _need_postgres() -> None:
    with extra("postgres"):
        import adbc_driver_manager  # noqa: F401 - see whether it is there
        import adbc_driver_postgresql  # noqa: F401 - likewise


async def _columns(target: End, options: CopyOptions, clients: dict[str, Client]) -> pa.Schema | None:
    """Of the stream that is copied into; None: it is yet to be made."""
    from kera.core.errors import UnknownStream

    if not isinstance(target, StreamEnd):
        return None
    try:
        return (await clients[_cluster(target, options)].describe(target.stream)).schema
    except UnknownStream:
        return None  # the target has more to say about that


async def _sink(end: End, name: str, options: CopyOptions, clients: dict[str, Client]) -> Sink:
    match end:
        case StreamEnd():
            from kera.connect.streams.sink import Creation, StreamSink

            made = Creation(options.streamlets, options.key, options.time) if options.create else None
            return StreamSink(clients[_cluster(end, options)], end.stream, name, made)
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
