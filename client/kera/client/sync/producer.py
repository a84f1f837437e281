"""A producer without asyncio: it accepts records and batches, and a thread sends them.

    send, send_batch ──► waiting (bounded) ──► the client's thread: `kera.client.Producer` ──► brokers

`send` costs an object and a place in a list. If the program sends faster than brokers accept, `send` waits once the
queue is full. Records keep the order of the calls. Errors of a record are reported where its delivery is: by
`Sent.result`, `on_delivery`, or the next `flush`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import pyarrow as pa

from kera.client.arrow_input import Columns
from kera.client.headers import Headers, HeadersLike
from kera.client.producing.punctuating import Punctuated
from kera.client.producing.rows import batch_of_rows, columns_of_frame
from kera.client.sync.handover import Handover, Sent
from kera.client.sync.loop_thread import LoopThread
from kera.client.types import Delivery, StreamDescription
from kera.client.unclosed import ends_in_order

_UNKNOWN_BYTES = 1 << 20
"""The assumed size of a batch of unknown size."""

OnDelivery = Callable[[Delivery | None, Exception | None], object]
"""A callback for the outcome of a record: its delivery, or the error. It runs on the client's thread, so it must not
wait for anything."""
OnDeliveries = Callable[[Sequence[Delivery] | None, Exception | None], object]
"""A callback for the outcome of a batch: the deliveries of its chunks, or the error."""


class Producer:
    """Writes records and batches to streams. Made by `Client.producer`; use it as a context manager.

    Several threads may use it. `flush` and the end of the context raise the first error since the last `flush`.
    """

    def __init__(self, thread: LoopThread, handover: Handover) -> None:
        self._thread = thread
        self._handover = handover
        self._producer = handover.producer
        self._serialization = handover.producer.serialization
        self._known: set[str] = set()
        """The prepared streams."""
        self._deleted = handover.producer.routes.deleted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=ends_in_order(kind))

    def prepare(self, stream: str) -> StreamDescription:
        """Look up a stream. Raises `UnknownStream`.

        `send` calls it for the first record, and after records have failed because the stream was deleted. If there is
        a new stream of that name, records go to the new one.
        """
        found = self._thread.run(self._producer.prepare(stream))
        self._known.add(stream)
        return found

    def send(
        self,
        stream: str,
        value: Any,
        *,
        keys: Any = (),
        timestamp_us: int | None = None,
        headers: HeadersLike | None = None,
        streamlet: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Sent[Delivery]:
        """Send a record; see `kera.client.Producer.send` for the parameters.

        Waits while too much waits to be sent. Raises `UnknownStream` at the first record for a missing stream,
        `ClosedError`, `InvalidArgument` for invalid headers, and `CannotEncode` for a value or key that a serializer
        refuses. The returned `Sent`, `on_delivery` and `flush` report all other errors.
        """
        if stream not in self._known or stream in self._deleted:
            self.prepare(stream)
        if self._serialization is not None:
            value, keys = self._serialization.encoded(stream, value, keys)
        arguments: dict[str, Any] | None = None
        if keys != () or timestamp_us is not None or headers is not None or streamlet is not None:
            # Copies, because the client's thread reads them later, when the caller may have changed them.
            arguments = {
                "keys": tuple(keys) if isinstance(keys, list) else keys,
                "timestamp_us": timestamp_us,
                "headers": None if headers is None else Headers(headers),
                "streamlet": streamlet,
            }
        size = len(value) if isinstance(value, bytes) else 0
        sent: Sent[Delivery] = Sent(self._handover, stream, value, arguments, size, on_delivery)
        self._handover.put(sent)
        return sent

    def send_batch(
        self, stream: str, batch: Columns, *, streamlet: int | None = None, on_delivery: OnDeliveries | None = None
    ) -> Sent[Sequence[Delivery]]:
        """Send all rows of `batch`; see `kera.client.Producer.send_batch`, and `send`."""
        size = getattr(batch, "nbytes", None)
        size = size if isinstance(size, int) else _UNKNOWN_BYTES
        sent: Sent[Sequence[Delivery]] = Sent(
            self._handover, stream, batch, {"streamlet": streamlet}, size, on_delivery, is_batch=True
        )
        self._handover.put(sent)
        return sent

    def send_rows(
        self,
        stream: str,
        rows: Iterable[Any],
        *,
        streamlet: int | None = None,
        on_delivery: OnDeliveries | None = None,
    ) -> Sent[Sequence[Delivery]]:
        """Send instances of a model as rows; see `kera.client.Producer.send_rows`, and `send`.

        Raises `CannotEncode` and `SchemaMismatch`.
        """
        batch = batch_of_rows(rows, self.prepare(stream))
        return self.send_batch(stream, batch, streamlet=streamlet, on_delivery=on_delivery)

    def send_frame(
        self,
        stream: str,
        frame: Columns,
        *,
        value_column: str | None = None,
        key_column: str | None = None,
        timestamp_column: str | None = None,
        streamlet: int | None = None,
        on_delivery: OnDeliveries | None = None,
    ) -> Sent[Sequence[Delivery]]:
        """Send a data frame; see `kera.client.Producer.send_frame`, and `send`.

        Raises `InvalidArgument` and `CannotEncode`.
        """
        batches = columns_of_frame(
            frame,
            self.prepare(stream),
            value_column=value_column,
            key_column=key_column,
            timestamp_column=timestamp_column,
        )
        table = pa.Table.from_batches(batches)
        return self.send_batch(stream, table, streamlet=streamlet, on_delivery=on_delivery)

    def flush(self) -> None:
        """Wait until all records so far are delivered or have failed. Raises the first error since the last `flush`."""
        self._thread.run(self._handover.flush())

    def punctuate(self, stream: str, timestamp_us: int) -> Punctuated:
        """Promise that no older records will follow in a stream; see `kera.client.Producer.punctuate`."""
        return self._thread.run(self._handover.punctuate(stream, timestamp_us))

    def close(self, *, flush: bool = True) -> None:
        """Deliver all records, and accept no more; without `flush`, unsent records fail with `ClosedError`."""
        self._thread.end(self._handover.close(flush=flush))

    @property
    def throttled_ms(self) -> int:
        """See `kera.client.Producer.throttled_ms`."""
        return self._producer.throttled_ms

    @property
    def late_ms(self) -> float:
        """See `kera.client.Producer.late_ms`."""
        return self._producer.late_ms
