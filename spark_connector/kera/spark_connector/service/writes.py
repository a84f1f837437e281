"""The methods for the columnar engine's writes: the targets, and the next steps after errors and duplicates.

The engine itself gathers rows into chunks and appends these, with the protocol of
`kera.spark_connector.writing.streamlet_writer`. It calls

* `open_write` once for a batch or a micro-batch, to check options and columns, and to find the streamlets' brokers;
* `route_write` when chunks were not acknowledged, to learn how long to wait and which brokers have the streamlets now,
  or that the task fails. The answers follow the Python client (`kera.client.producing.appender`);
* `stored_rows` when a chunk was already stored, to read its rows.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kera.core.base.ids import EntryId, Position
from kera.core.errors import (
    InvalidArgument,
    KeraError,
    OutOfSequence,
    ProducerFenced,
    Unavailable,
    Uncertain,
    error_from_wire,
)
from kera.spark_connector.options.names import ENGINE
from kera.spark_connector.options.writing import parse_write_options
from kera.spark_connector.portal import settings_of, shared
from kera.spark_connector.service.pieces import broker_as_json, connection_as_json, tls_as_json, token_as_json
from kera.spark_connector.service.routing import pause_about
from kera.spark_connector.writing.columns import check
from kera.spark_connector.writing.stored_chunks import StoredChunks
from kera.spark_connector.writing.task import CHUNK_BYTES, CHUNKS_PER_SEGMENT, out_of_date
from kera.spark_connector.writing.writers import connection_for_tasks, target_of, task_name

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from kera.client import Client, StreamDescription
    from kera.client.cluster.retry import RetryTime

STREAMLETS_MAX = 100_000
"""Maximum number of streamlets whose retry time is remembered. A forgotten one starts with its full retry time."""
DESCRIBE_TIMEOUT_S = 2.0
"""After this time the last known description is used."""
LOOK_TIMEOUT_S = 5.0
"""Maximum time for contacting brokers that do not answer."""


class Failed(NamedTuple):
    """A chunk that was not acknowledged."""

    streamlet: int
    progressed: bool
    """Whether a chunk of the streamlet was acknowledged since its last failure."""
    error: KeraError


def open_write(
    given: Mapping[str, str],
    columns: StructType,
    *,
    overwrite: bool,
    query: str | None,
    name: str,
    partitions: int,
    case_sensitive: bool,
) -> dict[str, Any]:
    """Return where the rows of a write go; raises the errors of options and columns.

    Raises `InvalidArgument` also for writes that only Python supports. `query`: the id of the streaming query; None:
    the write is a batch, called `name` unless the options name it.
    """
    from kera.client.producing.encoding.payloads import room_in_words

    options = parse_write_options(given)
    if query is None:
        options.check_batch(overwrite=overwrite)
    else:
        options.check_streaming(overwrite=overwrite)
    with shared(options.connection) as portal:
        stream = target_of(options, columns, portal, case_sensitive=case_sensitive)
    obstacle = _obstacle(stream)
    if stream is None or obstacle is not None:
        raise InvalidArgument(
            f"option {ENGINE}: the columnar engine does not write {obstacle}. Leave the option out, or set it to"
            " python, and Python workers write",
            option=ENGINE,
        )
    named = ("batch", options.app_id or name) if query is None else ("query", query)
    client, limit = settings_of(options.connection), stream.segment_bytes_min
    return {
        "connection": connection_as_json(options.connection),
        "token": token_as_json(connection_for_tasks(options)),
        "columns": check(columns, stream, case_sensitive=case_sensitive).names,
        "stream": stream.name,
        "stream_id": stream.stream_id,
        "schema_id": stream.schema_id,
        "codec": int(stream.codec),
        "streamlets": stream.config.streamlets,
        "chunk_bytes": min(CHUNK_BYTES, limit // CHUNKS_PER_SEGMENT) if limit else CHUNK_BYTES,
        "chunk_bytes_max": limit or 2 * CHUNK_BYTES,
        "epoch_us": stream.config.epoch_ms * 1000,
        "latency_target_ms": options.latency_target_ms or 0,
        "room": room_in_words(limit or 2 * CHUNK_BYTES, stream),
        "request_timeout_ms": client.request_timeout_ms,
        "connect_timeout_ms": client.connect_timeout_ms,
        "transport": client.transport,
        "tls": tls_as_json(client),
        "version": options.version,
        # Signed numbers of 64 bits, for Java.
        "producer_ids": [task_name(*named, number, 0).producer_id - (1 << 64) for number in range(partitions)],
    } | _owners(stream, range(stream.config.streamlets))


def can_write(given: Mapping[str, str], columns: StructType, *, case_sensitive: bool) -> bool:
    """Return whether the columnar engine supports a write. False also for errors, which Python then reports."""
    try:
        options = parse_write_options(given)
        with shared(options.connection) as portal:
            return _obstacle(target_of(options, columns, portal, case_sensitive=case_sensitive)) is None
    except KeraError:
        return False


def _obstacle(stream: StreamDescription | None) -> str | None:
    """Return why the engine does not support a write; None: it does."""
    from kera.client import ClientSettings

    if stream is None:
        return "rows that each name their stream in a column"
    if stream.typed:
        return f"streams with a schema of their own, as '{stream.name}' has"
    if ClientSettings.load().transport == "grpc" or not all(each.frames_address for each in stream.brokers.values()):
        return "over gRPC"
    return None


def _owners(stream: StreamDescription, streamlets: Sequence[int]) -> dict[str, Any]:
    """Return the brokers of these streamlets, and each streamlet's broker. Raises `Unavailable` if one is unknown."""
    brokers: dict[int, dict[str, Any]] = {}
    owners = []
    for streamlet in streamlets:
        broker = stream.broker_of(streamlet)
        if broker is None:
            raise Unavailable(f"the broker of stream {stream.name!r} is not known", stream=stream.name)
        brokers.setdefault(broker.broker_id, broker_as_json(broker))
        owners.append(broker.broker_id)
    return {"brokers": list(brokers.values()), "owners": owners}


class WriteRouter:
    """Decides where to send unacknowledged chunks again. Lives on the event loop of a portal."""

    def __init__(
        self, *, streamlets_max: int = STREAMLETS_MAX, pause: Callable[[float], Awaitable[None]] = pause_about
    ) -> None:
        self._streamlets_max = streamlets_max
        self._pause = pause
        self._patience: OrderedDict[tuple[str, int], RetryTime] = OrderedDict()
        """The retry time by writer and streamlet, the one that failed last at the end."""
        self._seen: dict[str, StreamDescription] = {}
        """The last known description of each stream."""
        self._looking: set[asyncio.Task[None]] = set()

    async def route(
        self, client: Client, writer: str, stream: str, stream_id: int, failed: Sequence[Failed]
    ) -> dict[str, Any]:
        """Wait for the pause that is due, and return the brokers to send to; raises the error that ends the task."""
        while True:
            pause_s = max(self._pause_s(writer, each) for each in failed)
            if any(isinstance(each.error, (Unavailable, Uncertain)) for each in failed):
                self._look_for(client, stream)
            await self._pause(pause_s)
            try:
                return _owners(await self._stream(client, stream, stream_id), [each.streamlet for each in failed])
            except Unavailable as error:
                failed = [each._replace(error=error, progressed=False) for each in failed]

    async def _stream(self, client: Client, name: str, stream_id: int) -> StreamDescription:
        """Return the coordinator's description, or else the last known one. Raises `UnknownStream`, `Unavailable`."""
        from kera.client.cluster.asking import same_stream

        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                found = same_stream(await client.admin.describe_stream(name), stream_id)
        except (TimeoutError, Unavailable, Uncertain):
            seen = self._seen.get(name)
            if seen is None or seen.stream_id != stream_id:
                raise Unavailable(f"the coordinator does not say where stream {name!r} is", stream=name) from None
            return seen
        self._seen[name] = found
        return found

    def _pause_s(self, writer: str, failed: Failed) -> float:
        from kera.client import ClientSettings
        from kera.client.cluster.asking import of_broker
        from kera.client.cluster.retry import RetryTime

        key = writer, failed.streamlet
        patience = self._patience.pop(key, None)
        if patience is None or failed.progressed:
            patience = RetryTime(ClientSettings.load())
        self._patience[key] = patience
        if len(self._patience) > self._streamlets_max:
            self._patience.popitem(last=False)
        error = of_broker(failed.error)
        # Waiting would not help: the chunks that are missing before this one can only come from the writer.
        final = isinstance(error, OutOfSequence)
        pause_s = None if final else patience.failed(error, asyncio.get_running_loop().time())
        if pause_s is None:
            raise out_of_date(error) if isinstance(error, ProducerFenced) else error
        return pause_s

    def _look_for(self, client: Client, stream: str) -> None:
        """Let the client contact the brokers in the background, so that it reports dead ones to the coordinator."""
        if self._looking:
            return

        async def look() -> None:
            with contextlib.suppress(KeraError, TimeoutError):
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    await client.bounds(stream)

        task = asyncio.get_running_loop().create_task(look())
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)


def failures_of(params: Mapping[str, Any]) -> list[Failed]:
    """Parse the failed chunks from their JSON."""
    return [
        Failed(
            int(each["streamlet"]),
            bool(each["progressed"]),
            error_from_wire(
                str(each["error"]["code"]), str(each["error"]["message"]), dict(each["error"].get("attributes") or {})
            ),
        )
        for each in params["failed"]
    ]


async def stored_rows(client: Client, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a stored chunk, and where it ends; without rows if it was removed since."""
    from kera.client import ClientSettings
    from kera.client.cluster.retry import retrying

    streamlet, sequence = int(params["streamlet"]), int(params["sequence"])
    chunks = StoredChunks(
        client,
        str(params["stream"]),
        streamlet,
        int(params["producer_id"]) % (1 << 64),
        int(params["producer_epoch"]),
    )
    entry = EntryId(int(params["stream_id"]), streamlet, int(params["entry"]))
    position, after = _position(params.get("position")), _position(params.get("after"))
    found = await retrying(lambda: chunks.find(entry, position, sequence, after), ClientSettings.load())
    if found is None:
        return {"rows": None}
    return {"rows": rows_as_json(found.batch, timed=bool(params["timed"])), "end": list(found.next)}


def _position(given: Sequence[int] | None) -> Position | None:
    return None if given is None else Position(*given)


def rows_as_json(batch: pa.RecordBatch, *, timed: bool) -> dict[str, Any]:
    """Return the columns of the default schema in the engine's form: lengths (-1 for null) and bytes, in base64."""
    keys, headers = batch.column("keys"), batch.column("headers")
    names, contents = _entries(headers)
    return {
        "count": batch.num_rows,
        "times": _encoded(pc.cast(batch.column("timestamp"), pa.int64())) if timed else None,
        "values": _blobs(batch.column("value")),
        "key_counts": _lengths(pc.list_value_length(keys)),
        "keys": _blobs(keys.flatten()),
        "header_counts": _lengths(pc.list_value_length(_as_lists(headers))),
        "header_names": _blobs(pc.cast(names, pa.binary())),
        "header_values": _blobs(contents),
    }


def _as_lists(headers: pa.MapArray) -> pa.Array:
    return headers.cast(pa.list_(headers.type.field(0)))


def _entries(headers: pa.MapArray) -> tuple[pa.Array, pa.Array]:
    names, contents = _as_lists(headers).flatten().flatten()
    return names, contents


def _blobs(column: pa.Array) -> dict[str, str]:
    return {
        "lengths": _lengths(pc.binary_length(column)),
        "bytes": base64.b64encode(b"".join(column.drop_null().to_pylist())).decode(),
    }


def _lengths(lengths: pa.Array) -> str:
    return _encoded(pc.cast(pc.fill_null(lengths, -1), pa.int32()))


def _encoded(numbers: pa.Array) -> str:
    return base64.b64encode(numbers.to_numpy(zero_copy_only=False).tobytes()).decode()
