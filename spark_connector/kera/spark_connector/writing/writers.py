"""The writers: ``df.write.format("kera")`` and ``df.writeStream.format("kera")``.

Rows are stored while the tasks run, and readers see them at once: streams have no transactions. Writes are exact
because each task writes under a name that is the same whenever the same work is repeated, and finds the rows that were
stored under it (see ``streamlet_writer``, which has the proof):

* for a streaming query, its id, which the checkpoint keeps, and the partition's number make the producer id, and the
  micro-batch's number makes the epoch. A repeated micro-batch adds only the missing rows; if it is complete, it adds
  none. The epoch of a later micro-batch fences off tasks of an earlier one that are still alive;
* for a batch query, a random id, which is made once on the driver, so that tasks may run again; or ``txnAppId`` and
  ``txnVersion``, so that the whole write may run again.

So `commit` only reports the outcome, and `abort` does nothing: stored rows stay, and the repeated task finds them.

The query must give each partition the same rows when it runs again, in any order. Spark ensures that unless rows depend
on chance or time, or the partitions are cut in another way (see docs/spark.md). Then rows are written at least once,
and the driver logs a warning.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from kera.core.base.telemetry import get_logger
from kera.core.errors import UnknownStream, invariant
from kera.spark_connector.connection import Connection
from kera.spark_connector.delegation.asking import for_tasks
from kera.spark_connector.options.writing import WriteOptions, parse_write_options
from kera.spark_connector.portal import Portal, shared
from kera.spark_connector.spark_api import StreamArrowWriter, arrow_batches
from kera.spark_connector.writing.columns import check
from kera.spark_connector.writing.task import Name, TaskWriter, Written, no_such_stream

if TYPE_CHECKING:
    from kera.client import Client, StreamDescription

LOOK_UP_TIMEOUT_MS = 10_000
"""How long a query retries to reach the coordinator before it starts."""
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
"""Local properties that Spark gives to all tasks of a micro-batch."""

log = get_logger("kera.spark")


class KeraBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame once."""

    def __init__(self, options: Mapping[str, str], given: StructType, *, overwrite: bool) -> None:
        """Called on the driver. Raises the errors of options and columns."""
        self._options = parse_write_options(options)
        self._options.check_engine()
        self._options.check_batch(overwrite=overwrite)
        self._given = given
        self._name = self._options.app_id or uuid.uuid4().hex
        check_target(self._options, given)
        self._connection = connection_for_tasks(self._options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows of one partition; runs in an executor's Python worker."""
        context = _context()
        name = task_name("batch", self._name, context.partitionId(), self._options.version)
        sensitive = _case_sensitive(context)
        return write_rows(self._connection, self._options, self._given, name, iterator, case_sensitive=sensitive)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Report that all rows are stored."""
        report(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: stored rows stay."""


class KeraStreamWriter(StreamArrowWriter):
    """Writes micro-batches, each exactly once."""

    def __init__(self, options: Mapping[str, str], given: StructType, *, overwrite: bool) -> None:
        """Called on the driver, anew for each micro-batch. Raises the errors of options and columns."""
        self._options = parse_write_options(options)
        self._options.check_engine()
        self._options.check_streaming(overwrite=overwrite)
        self._given = given
        check_target(self._options, given)
        self._connection = connection_for_tasks(self._options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows of one partition; runs in an executor's Python worker."""
        context = _context()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        invariant(query and batch, "Spark tells tasks of a streaming query its id and the micro-batch")
        name = task_name("query", str(query), context.partitionId(), int(str(batch)))
        batches, sensitive = arrow_batches(iterator, self._given), _case_sensitive(context)
        return write_rows(self._connection, self._options, self._given, name, batches, case_sensitive=sensitive)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Report that all rows are stored."""
        report(messages, batch=batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: stored rows stay."""


def task_name(kind: str, name: str, partition: int, version: int) -> Name:
    """Return the name under which a partition is written, in any process. `version` counts the batches of `name`."""
    digest = blake2b("\0".join((kind, name, str(partition))).encode(), digest_size=8).digest()
    return Name(
        producer_id=1 << 63 | int.from_bytes(digest) >> 1, producer_epoch=version + 1, keyless=partition + version
    )


def _case_sensitive(context: TaskContext) -> bool:
    """Return ``spark.sql.caseSensitive``, which Spark gives to tasks, but not to the Python process that plans them."""
    return str(context.getLocalProperty("spark.sql.caseSensitive")).lower() == "true"


def check_target(options: WriteOptions, given: StructType) -> None:
    """Raise `SchemaMismatch` if the columns `given` do not fit, and `UnknownStream` if the stream does not exist."""
    with contextlib.closing(Portal(options.connection, retry_timeout_ms=LOOK_UP_TIMEOUT_MS)) as portal:
        target_of(options, given, portal)


def target_of(
    options: WriteOptions, given: StructType, portal: Portal, *, case_sensitive: bool = False
) -> StreamDescription | None:
    """Return the stream to write to; None: each row names one. Raises the errors of `check_target`."""
    if options.stream is None:
        check(given, None, case_sensitive=case_sensitive)
        return None
    name = options.stream
    try:
        description = portal.call(lambda client: client.admin.describe_stream(name))
    except UnknownStream as error:
        raise no_such_stream(name) from error
    check(given, description, case_sensitive=case_sensitive)
    return description


def connection_for_tasks(options: WriteOptions) -> Connection:
    """Return the connection for the tasks of a write; see ``delegation``."""
    streams = None if options.stream is None else [options.stream]
    return for_tasks(options.connection, streams) or options.connection


def write_rows(
    connection: Connection,
    options: WriteOptions,
    given: StructType,
    name: Name,
    iterator: Iterator[pa.RecordBatch],
    *,
    case_sensitive: bool,
) -> WriterCommitMessage:
    """Store all rows under `name`, and return the result for Spark."""

    async def begin(client: Client) -> TaskWriter:
        return TaskWriter(
            client,
            given,
            options.stream,
            name,
            latency_target_ms=options.latency_target_ms,
            case_sensitive=case_sensitive,
        )

    with shared(connection) as portal:
        task = portal.call(begin)
        try:
            for batch in iterator:
                portal.call(lambda _, batch=batch: task.write(batch))  # type: ignore[misc]
            return portal.call(lambda _: task.finish())
        finally:
            portal.call(lambda _: task.close())


def report(messages: Sequence[WriterCommitMessage | None], **about: object) -> None:
    """Log a warning on the driver if tasks have found surplus rows."""
    done = [message for message in messages if isinstance(message, Written)]
    surplus = sum(message.surplus for message in done)
    if surplus:
        log.warning(
            "earlier attempts have stored rows that the last one did not have: the query is not deterministic, or its"
            " partitions were cut in another way. No row is missing; some may be there more than once",
            rows=surplus,
            **about,
        )


def _context() -> TaskContext:
    context = TaskContext.get()
    invariant(context is not None, "rows are written in tasks")
    return context  # type: ignore[return-value]
