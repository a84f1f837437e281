"""Writes the rows of one task: splits them by stream and streamlet, gathers them into chunks, and passes these on.

    Spark ─► batch ─► parts by stream, streamlet ─► gathered until a chunk is full ─► writer ─► broker
                                                    └────── bounded together ──────────┘

When a chunk is full depends only on the rows before. So an attempt that gets the same rows in the same order makes the
same chunks, and finds them stored without comparing single rows. With a latency target it also depends on the clock
(`Filling`), so that a repeated attempt has to compare rows. The writers of a task send concurrently, each of them one
chunk at a time (``streamlet_writer`` says why).

Lives on the event loop of a portal. Memory, for any number of streamlets: at most `GATHERED_BYTES_MAX` and one batch of
Spark's are gathered, and at most twice `QUEUED_BYTES_MAX` are queued.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from kera.core.errors import KeraError, ProducerFenced, SchemaMismatch, UnknownStream
from kera.spark_connector.writing.columns import Columns
from kera.spark_connector.writing.streamlet_writer import StreamletWriter

if TYPE_CHECKING:
    from kera.client import Appender, AppendResult, Client, StreamDescription
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kera.core.base.ids import Position
from kera.core.errors import InternalError
from kera.spark_connector.writing.stored_chunks import StoredChunks

CHUNK_BYTES = 1 << 20
"""Number of bytes of rows that are gathered into a chunk; a chunk is at most twice as large."""
CHUNKS_PER_SEGMENT = 8
"""Minimum number of chunks per segment: a chunk fits into one segment, so small segments need smaller chunks."""
GATHERED_BYTES_MAX = 32 << 20
QUEUED_BYTES_MAX = 32 << 20
TIMER_S = 0.001
"""Minimum interval of the checks which chunks are due."""


MARGIN = 0.1
LEFT = 0.5
"""Minimum share of the target for which a chunk fills."""
LATEST = 32
"""Number of chunks whose storing time counts."""
SLACK = 1 / 8
"""Share of its filling time by which a chunk may be sent early along with others: separate requests cost more."""


class StreamletLog:
    """A `kera.spark_connector.writing.streamlet_writer.Log` in a cluster."""

    def __init__(
        self, client: Client, appender: Appender, streamlet_id: int, *, took: Callable[[float], None] | None = None
    ) -> None:
        """`took` is called with the seconds that each append takes."""
        self._chunks = StoredChunks(
            client, appender.stream.name, streamlet_id, appender.producer_id, appender.producer_epoch
        )
        self._appender = appender
        self._took = took
        self._last: AppendResult | None = None
        """The result of the last append."""
        self._found: Position | None = None
        """The end of the last chunk that was read back."""

    async def append(self, rows: pa.RecordBatch, sequence: int) -> tuple[int, bool]:
        """See `kera.spark_connector.writing.streamlet_writer.Log.append`."""
        begun_s = time.monotonic()
        self._last = appended = await self._appender.append(self._chunks.streamlet_id, rows, sequence)
        if self._took is not None:
            self._took(time.monotonic() - begun_s)
        return appended.record_count, appended.duplicate

    async def stored(self, sequence: int) -> pa.RecordBatch | None:
        """See `kera.spark_connector.writing.streamlet_writer.Log.stored`. Call it right after `append`."""
        if self._last is None:
            raise InternalError("stored chunks are read after an append has found them")
        chunk = await self._chunks.find(self._last.entry, self._last.position, sequence, self._found)
        if chunk is None:
            return None
        self._found = chunk.next
        return chunk.batch


class Filling:
    """How long a chunk may fill in a task that writes with ``latencyTarget``. Times in seconds, on any clock.

    The target is the maximum time from receiving a row until it is stored. So a chunk is sent, full or not, when its
    first row has waited for

        the target - the time that storing takes - a tenth of the target

    The time that storing takes is the worst of the latest chunks. If less than half of the target is left, a chunk
    fills for half of the target, because more chunks would not be stored faster. Java has the same in
    ``kera.spark.write.Filling``.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._took_s: deque[float] = deque(maxlen=LATEST)

    def stored(self, took_s: float) -> None:
        """Note that a chunk was acknowledged `took_s` after its append began."""
        self._took_s.append(took_s)

    @property
    def fills_s(self) -> float:
        """The time for which a chunk may fill."""
        left_s = self._target_s * (1 - MARGIN) - max(self._took_s, default=0.0)
        return max(left_s, self._target_s * LEFT)

    def is_due(self, since_s: float, now_s: float) -> bool:
        """Return whether to send a chunk now, at `now_s`, whose first row arrived at `since_s`."""
        return now_s - since_s >= self.fills_s * (1 - SLACK)


@dataclass(frozen=True)
class Name:
    """The name under which a task writes: the same for all of its attempts, and different from all others."""

    producer_id: int
    producer_epoch: int
    keyless: int
    """The streamlet for rows without a key, modulo the number of streamlets."""


@dataclass
class Written(WriterCommitMessage):
    """The result of a task."""

    appended: int
    """Rows that this attempt has stored."""
    found: int
    """Rows that earlier attempts had stored."""
    surplus: int
    """Rows that earlier attempts had stored and this one did not have, because the query is not deterministic."""


class _Outlet:
    """The rows for one streamlet."""

    def __init__(self, writer: StreamletWriter) -> None:
        self.writer = writer
        self.gathered: list[pa.RecordBatch] = []
        self.gathered_bytes = 0
        self.since_s = 0.0
        """When the first gathered row arrived."""
        self.sending: asyncio.Task[None] | None = None


class _Target:
    """A stream that rows go to."""

    def __init__(self, appender: Appender, columns: Columns) -> None:
        self.appender = appender
        self.columns = columns
        self.outlets: dict[int, _Outlet] = {}
        segment_bytes = appender.stream.segment_bytes_min
        self.chunk_bytes = min(CHUNK_BYTES, segment_bytes // CHUNKS_PER_SEGMENT) if segment_bytes else CHUNK_BYTES


class TaskWriter:
    """Writes the rows of one task in chunks that repeat exactly for the same rows, within bounded memory."""

    def __init__(
        self,
        client: Client,
        given: StructType,
        stream: str | None,
        name: Name,
        *,
        latency_target_ms: int | None = None,
        case_sensitive: bool = False,
        gathered_bytes_max: int = GATHERED_BYTES_MAX,
        queued_bytes_max: int = QUEUED_BYTES_MAX,
    ) -> None:
        """`stream` None: each row names its stream.

        `latency_target_ms` None: rows wait until a chunk is full, or the task ends.
        """
        self._filling = None if latency_target_ms is None else Filling(latency_target_ms / 1000)
        self._timer: asyncio.TimerHandle | None = None
        self._gathered_bytes_max = gathered_bytes_max
        self._queued_bytes_max = queued_bytes_max
        self._client = client
        self._given = given
        self._case_sensitive = case_sensitive
        self._stream = stream
        self._name = name
        self._targets: dict[str, _Target] = {}
        self._columns: Columns | None = None
        self._gathered_bytes = 0
        self._progressed = asyncio.Event()

    async def write(self, batch: pa.RecordBatch) -> None:
        """Take the rows of a batch, and wait while too many are queued. Raises the errors of sending."""
        for part in (await self._shaper()).by_destination(batch):
            target = await self._target(part.stream or self._stream or "")
            appender = target.appender
            rows = appender.conform(part.rows)
            streamlets = appender.stream.config.streamlets
            placed = (
                appender.split(rows, self._name.keyless % streamlets)
                if part.streamlet is None
                else [(part.streamlet, rows)]
            )
            for streamlet, some in placed:
                outlet = self._outlet(target, streamlet)
                self._gather(outlet, some)
                if outlet.gathered_bytes >= target.chunk_bytes:
                    self._send(outlet)
        if self._gathered_bytes > self._gathered_bytes_max:
            self._send_all()
        while self._queued_bytes() > self._queued_bytes_max:
            self._progressed.clear()
            await self._progressed.wait()
            self._raise()
        self._raise()

    async def finish(self) -> Written:
        """Wait until all rows are stored. Raises the errors of sending."""
        self._send_all()
        outlets = self._outlets()
        sending = [outlet.sending for outlet in outlets if outlet.sending is not None]
        if sending:
            await asyncio.wait(sending, return_when=asyncio.FIRST_EXCEPTION)
        self._raise()
        writers = [outlet.writer for outlet in outlets]
        return Written(
            sum(writer.appended for writer in writers),
            sum(writer.found for writer in writers),
            sum(writer.surplus for writer in writers),
        )

    async def close(self) -> None:
        """Stop sending."""
        if self._timer is not None:
            self._timer.cancel()
        sending = [outlet.sending for outlet in self._outlets() if outlet.sending is not None]
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)

    # -- where rows go ---------------------------------------------------------------------------------------------

    async def _shaper(self) -> Columns:
        if self._columns is None:
            self._columns = (await self._target(self._stream)).columns if self._stream else self._columns_for(None)
        return self._columns

    def _columns_for(self, stream: StreamDescription | None) -> Columns:
        return Columns(self._given, stream, case_sensitive=self._case_sensitive)

    async def _target(self, stream: str) -> _Target:
        target = self._targets.get(stream)
        if target is None:
            try:
                appender = await self._client.appender(
                    stream,
                    producer_id=self._name.producer_id,
                    producer_epoch=self._name.producer_epoch,
                    chunk_bytes_max=2 * CHUNK_BYTES,
                    compares=True,
                )
            except UnknownStream as error:
                raise no_such_stream(stream) from error
            described = appender.stream
            if self._stream is None and described.typed:
                raise SchemaMismatch(
                    f"stream '{stream}' has a schema of its own: write to it by naming it in the query,"
                    " not in a column",
                    stream=stream,
                )
            columns = self._columns or self._columns_for(described if self._stream else None)
            target = self._targets[stream] = _Target(appender, columns)
        return target

    def _outlet(self, target: _Target, streamlet: int) -> _Outlet:
        outlet = target.outlets.get(streamlet)
        if outlet is None:
            writer = StreamletWriter(
                StreamletLog(
                    self._client, target.appender, streamlet, took=self._filling.stored if self._filling else None
                ),
                ignored=target.columns.ignored,
                progressed=self._progressed.set,
            )
            outlet = target.outlets[streamlet] = _Outlet(writer)
        return outlet

    def _outlets(self) -> list[_Outlet]:
        return [outlet for target in self._targets.values() for outlet in target.outlets.values()]

    # -- gathering and sending -------------------------------------------------------------------------------------

    def _gather(self, outlet: _Outlet, rows: pa.RecordBatch) -> None:
        if self._filling is not None and not outlet.gathered:
            outlet.since_s = asyncio.get_running_loop().time()
            if self._timer is None:
                self._wait(self._filling.fills_s)
        outlet.gathered.append(rows)
        outlet.gathered_bytes += rows.nbytes
        self._gathered_bytes += rows.nbytes

    def _send(self, outlet: _Outlet) -> None:
        if not outlet.gathered:
            return
        gathered = outlet.gathered
        outlet.writer.add(gathered[0] if len(gathered) == 1 else pa.concat_batches(gathered))
        self._gathered_bytes -= outlet.gathered_bytes
        outlet.gathered, outlet.gathered_bytes = [], 0
        if outlet.writer.waits and (outlet.sending is None or outlet.sending.done()):
            self._raise()  # after a failure nothing more is sent
            outlet.sending = asyncio.get_running_loop().create_task(outlet.writer.drain())
            outlet.sending.add_done_callback(lambda _: self._progressed.set())

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._send_due)

    def _send_due(self) -> None:
        self._timer = None
        if self._filling is None:
            return
        now_s = asyncio.get_running_loop().time()
        with contextlib.suppress(KeraError):  # `write` or `finish` raises it
            for outlet in self._outlets():
                if outlet.gathered and self._filling.is_due(outlet.since_s, now_s):
                    self._send(outlet)
        since_s = min((outlet.since_s for outlet in self._outlets() if outlet.gathered), default=None)
        if since_s is not None:
            self._wait(max(since_s + self._filling.fills_s - now_s, TIMER_S))

    def _send_all(self) -> None:
        for outlet in self._outlets():
            self._send(outlet)

    def _queued_bytes(self) -> int:
        return sum(outlet.writer.queued_bytes for outlet in self._outlets())

    def _raise(self) -> None:
        """Raise the error that has ended the sending, if any."""
        for outlet in self._outlets():
            if outlet.sending is None or not outlet.sending.done():
                continue
            error = outlet.sending.exception()
            if isinstance(error, ProducerFenced):
                raise out_of_date(error) from error
            if error is not None:
                raise error


def out_of_date(error: ProducerFenced) -> ProducerFenced:
    """Return the error of a task that the broker has fenced off, in words for users of Spark."""
    return ProducerFenced(
        "a later batch of this query, or a higher txnVersion of this txnAppId, has been written already: this one is"
        f" out of date ({error.message})",
        **error.attributes,
    )


def no_such_stream(name: str) -> UnknownStream:
    """Return the error for writing to a stream that does not exist."""
    return UnknownStream(f"there is no stream '{name}'; create it first: kera stream create {name}", stream=name)
