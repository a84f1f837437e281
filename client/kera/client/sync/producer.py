"""A producer for those who write no asyncio: it takes records and batches, and a thread sends them.

    send, send_batch ──► waiting (bounded) ──► the client's thread: `kera.client.Producer` ──► brokers

`send` costs an object and a place in a list. Who sends faster than brokers take waits in `send`, when so much waits
already. Order is that of the calls. What is wrong with a record is told where its delivery is: by `Sent.result`,
`on_delivery`, or the next `flush`.
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
"""As what a batch counts that does not say how large it is."""

OnDelivery = Callable[[Delivery | None, Exception | None], object]
"""Is told what became of a record: its delivery, or why there is none. Called on the client's thread, so it must not
wait for anything."""
OnDeliveries = Callable[[Sequence[Delivery] | None, Exception | None], object]
"""The same of a batch: the deliveries of the chunks that it became."""


class Producer:
    """Writes records and batches to streams. Made by `Client.producer`; use it as a context manager.

    May be used by several threads. `flush`, and leaving the context, raise the first error since the last `flush`.
    """

    def __init__(self, thread: LoopThread, handover: Handover) -> None:
        self._thread = thread
        self._handover = handover
        self._producer = handover.producer
        self._serialization = handover.producer.serialization
        self._known: set[str] = set()
        """Streams that were prepared."""
        self._deleted = handover.producer.routes.deleted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=ends_in_order(kind))

    def prepare(self, stream: str) -> StreamDescription:
        """Look up a stream. Raises `UnknownStream`.

        `send` does it for the first record, and after records have failed because the stream was deleted: if there is
        one of that name again, records go to that.
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
        """Have a record sent; see `kera.client.Producer.send` for what it is made of.

        Waits while too much waits to be sent. Raises `UnknownStream` the first time that something is sent to a stream
        that is not there, `ClosedError`, `InvalidArgument` for headers that are none, and `CannotEncode` for what a
        serializer does not take. All other errors are reported by what it returns, by `on_delivery`, and by `flush`.
        """
        if stream not in self._known or stream in self._deleted:
            self.prepare(stream)
        if self._serialization is not None:
            value, keys = self._serialization.encoded(stream, value, keys)
        arguments: dict[str, Any] | None = None
        if keys != () or timestamp_us is not None or headers is not None or streamlet is not None:
            # Copies: the client's thread looks at them later, and the caller may have changed them by then.
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
        """Have all rows of `batch` sent; see `kera.client.Producer.send_batch`, and `send`."""
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
        """Have instances of a model sent as rows; see `kera.client.Producer.send_rows`, and `send`.

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
        """Have a data frame sent; see `kera.client.Producer.send_frame`, and `send`.

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
        """Wait until everything sent so far is delivered or has failed. Raises the first error since the last one."""
        self._thread.run(self._handover.flush())

    def punctuate(self, stream: str, timestamp_us: int) -> Punctuated:
        """Say that nothing older comes behind what is in a stream; see `kera.client.Producer.punctuate`."""
        return self._thread.run(self._handover.punctuate(stream, timestamp_us))

    def close(self, *, flush: bool = True) -> None:
        """Deliver what was sent, and take no more; without `flush`, what was not sent fails with `ClosedError`."""
        self._thread.end(self._handover.close(flush=flush))

    @property
    def throttled_ms(self) -> int:
        """See `kera.client.Producer.throttled_ms`."""
        return self._producer.throttled_ms

    @property
    def late_ms(self) -> float:
        """See `kera.client.Producer.late_ms`."""
        return self._producer.late_ms
