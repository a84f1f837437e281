"""Deserializes the values and keys of records for a consumer with deserializers.

Records of the default schema have a value and keys, made of bytes; a stream with columns has rows, from which models
are made. `Decoding.learn` looks up the schemas that values name when their chunk is opened, so that decoding a record
never waits. It asks for an unknown id again only after a while. If a chunk names very many schemas, it looks up only
some: values of the others cannot be read.

Deserializers do not affect batches.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from kera.client import arguments
from kera.client.consuming.plugins import DeliveryHooks
from kera.client.serializers.choosing import DeserializerLike, deserializer_of
from kera.client.serializers.protocols import Context, Deserializer, FramedDeserializer, Part, Registry, RowDeserializer
from kera.client.serializers.refusing import words
from kera.client.tasks import Turns
from kera.client.types import Record, StreamDescription
from kera.core.base.clock import Clock, SystemClock
from kera.core.base.telemetry import get_logger
from kera.core.errors import CannotDecode, InvalidArgument, KeraError, NotAllowed, NotFramed, UnknownSchema
from kera.core.schemas.framing import FRAME_BYTES, unframe

log = get_logger("kera.consumer")

_as_record: Callable[[Iterable[Any]], Record] = partial(tuple.__new__, Record)
"""Makes a record from all its fields, in a third of the time of `Record._replace`."""
LOOKED_UP_MAX = 64
"""Maximum number of schemas that are looked up for one chunk."""
READERS_MAX = 4_096
"""Maximum number of schemas whose readers are kept; the one that no chunk has named for longest is dropped first."""
UNKNOWN_MAX = 4_096
"""Maximum number of ids that are remembered as unknown."""
UNKNOWN_FOR_S = 10.0
WARN_EVERY_S = 1.0
POLL_RECORDS_LIMIT = 1_000_000_000
"""Maximum of `records_max` of `poll`."""


class _Reading:
    """One deserializer, with the readers of the schemas known so far."""

    def __init__(self, deserializer: Deserializer[Any], registry: Registry | None, clock: Clock) -> None:
        self.deserializer = deserializer
        self.framed = deserializer if isinstance(deserializer, FramedDeserializer) and deserializer.framed else None
        if self.framed is not None and registry is None:
            raise InvalidArgument("values that name their schemas need the registry of a client; see Client.consumer")
        self.read: Deserializer[Any] = deserializer if self.framed is None else self._read_framed
        self._registry = registry
        self._clock = clock
        self._readers: dict[int, Deserializer[Any]] = {}
        self._unknown: dict[int, tuple[str, float]] = {}
        """Schemas without a reader, by id: the reason, and the time of the next question to the registry."""

    def _read_framed(self, data: bytes, context: Context) -> Any:
        schema_id, payload = unframe(data)
        reader = self._readers.get(schema_id)
        if reader is None:
            why = self._unknown.get(schema_id, ("its chunk names too many schemas", 0))[0]
            raise CannotDecode(f"schema {schema_id}: {why}", schema_id=schema_id)
        return reader(payload, context)

    async def learn(self, column: pa.Array) -> None:
        """Look up the schemas that these bytes name. Raises the registry's errors, except for an unknown id."""
        if self.framed is None or self._registry is None:
            return
        asked = 0
        for begin in pc.unique(pc.binary_slice(column, 0, FRAME_BYTES)).to_pylist():
            try:
                schema_id, _ = unframe(begin or b"")
            except NotFramed:
                continue
            known = self._readers.pop(schema_id, None)
            if known is not None:
                self._readers[schema_id] = known  # as the last one
                continue
            if self._is_unknown(schema_id):
                continue
            if asked >= LOOKED_UP_MAX:
                return
            asked += 1
            try:
                self._readers[schema_id] = self.framed.reader_of(await self._registry.by_id(schema_id))
                if len(self._readers) > READERS_MAX:
                    del self._readers[next(iter(self._readers))]
            except (UnknownSchema, NotAllowed, CannotDecode, InvalidArgument) as error:
                if len(self._unknown) >= UNKNOWN_MAX:
                    self._unknown.clear()
                self._unknown[schema_id] = error.message, self._clock.monotonic_s() + UNKNOWN_FOR_S

    def _is_unknown(self, schema_id: int) -> bool:
        return self._unknown.get(schema_id, ("", 0.0))[1] > self._clock.monotonic_s()


class Decoding:
    """The deserializers of a consumer."""

    def __init__(
        self,
        deserializer: Any,
        key_deserializer: Any,
        registry: Registry | None,
        *,
        undecodable: Literal["fail", "skip"] = "fail",
        clock: Clock | None = None,
    ) -> None:
        """Without a deserializer, values or keys stay bytes. Raises `InvalidArgument` for an object that is not one."""
        self._clock = clock or SystemClock()
        self._value = self._key = None
        if deserializer is not None:
            self._value = _Reading(deserializer_of(deserializer), registry, self._clock)
        if key_deserializer is not None:
            self._key = _Reading(deserializer_of(key_deserializer, "key_deserializer"), registry, self._clock)
        self._skip = undecodable == "skip"
        self.skipped = 0
        """Number of records that could not be decoded, and were left out."""
        self._not_told = 0
        self._told_s = float("-inf")
        self._contexts: dict[str, tuple[Context, Context]] = {}
        self._rows: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
        """The function that makes values from rows, by stream with columns."""
        self._bad: CannotDecode | None = None
        self._behind: list[Record] = []
        """Records behind an undecodable one, for the next call; see `decoded_list`."""

    def reads(self, part: str) -> bool:
        """Return whether there is a deserializer for this part of a record, ``value`` or ``key``."""
        return (self._value if part == "value" else self._key) is not None

    def check(self, stream: StreamDescription) -> None:
        """Prepare for a stream. Raises `InvalidArgument` if the deserializers do not fit its records."""
        if not stream.typed or self._value is None:
            return
        given: Any = self._value.deserializer
        if not isinstance(given, RowDeserializer):
            raise InvalidArgument(
                f"stream {stream.name!r} has columns, and its records no value to be read: leave the deserializer out,"
                " or give a dataclass or a pydantic model of its columns",
                stream=stream.name,
            )
        self._rows[stream.name] = given.rows_of(stream.schema, stream.name)

    async def learn(self, batch: pa.RecordBatch, stream: StreamDescription) -> None:
        """Look up the schemas that values and keys of a chunk name."""
        if stream.typed:
            return
        if self._value is not None:
            await self._value.learn(batch.column("value"))
        if self._key is not None:
            await self._key.learn(batch.column("keys").flatten())

    def decoded(self, record: Record) -> Record | None:
        """Return `record` with its value and key deserialized. None: it cannot be decoded, and is left out.

        Raises `CannotDecode` if undecodable records are not left out.
        """
        part: Part = "value"
        try:
            stream, streamlet, entry, offset, timestamp_us, key, keys, value, headers, row = record
            if row is not None:
                return record if self._value is None else record._replace(value=self._rows[stream](row))
            contexts = self._contexts.get(stream)
            if contexts is None:
                contexts = self._contexts[stream] = Context(stream, "value"), Context(stream, "key")
            if self._value is not None and value is not None:
                value = self._value.read(value, contexts[0])
            part = "key"
            if self._key is not None and key is not None:
                key = self._key.read(key, contexts[1])
            return _as_record((stream, streamlet, entry, offset, timestamp_us, key, keys, value, headers, row))
        except Exception as error:  # noqa: BLE001 - a user's deserializer, on arbitrary bytes, may raise anything
            refusal = _located(record, part, error)
        if not self._skip:
            raise refusal
        self._skipped(refusal)
        return None

    def _skipped(self, refusal: CannotDecode) -> None:
        self.skipped += 1
        self._not_told += 1
        now_s = self._clock.monotonic_s()
        if now_s - self._told_s >= WARN_EVERY_S:
            log.warning("records cannot be decoded; skipped", records=self._not_told, error=refusal.message)
            self._not_told, self._told_s = 0, now_s

    def decoded_list(self, records: Iterable[Record]) -> list[Record]:
        """Decode records up to the first that cannot be decoded; `left_over` raises its error, and has the rest."""
        found: list[Record] = []
        coming = iter(records)
        for record in coming:
            try:
                decoded = self.decoded(record)
            except CannotDecode as error:
                self._bad, self._behind = error, list(coming)
                break
            if decoded is not None:
                found.append(decoded)
        return found

    def left_over(self) -> list[Record] | None:
        """Return the records that `decoded_list` left over; None: nothing. First raises the error that it met, once."""
        if self._bad is not None:
            error, self._bad = self._bad, None
            raise error
        if not self._behind:
            return None
        behind, self._behind = self._behind, []
        return self.decoded_list(behind)

    @property
    def has_left_over(self) -> bool:
        """Whether `left_over` gives or raises something."""
        return self._bad is not None or bool(self._behind)

    def raise_later(self, error: CannotDecode) -> None:
        """Have the next `left_over` raise this error again, which the caller has caught."""
        self._bad = error

    def forget(self) -> None:
        """Forget the left-over records, which the caller gets as batches."""
        self._bad, self._behind = None, []


MakeDecoding = Callable[[DeserializerLike, DeserializerLike], Decoding | None]
"""Makes a decoding from a deserializer for values and one for keys; returns None if both are None."""


class Decoded(AsyncIterator[Record]):
    """Iterates over decoded records. After a `CannotDecode`, it goes on with the following record."""

    def __init__(self, records: AsyncIterator[Record], decoding: Decoding) -> None:
        self._records = records
        self._decoding = decoding

    async def __anext__(self) -> Record:
        while True:
            decoded = self._decoding.decoded(await self._records.__anext__())
            if decoded is not None:
                return decoded

    async def aclose(self) -> None:
        """Close the iterator below."""
        close = getattr(self._records, "aclose", None)
        if close is not None:
            await close()


class DecodedRecords(ABC):
    """The record methods of consumers, with and without deserializers; subclasses fetch the records."""

    _decoding: Decoding | None
    _turns: Turns
    _delivery: DeliveryHooks | None = None
    """Hooks around all deliveries, if there are any."""

    @abstractmethod
    async def start(self) -> None:
        """Look up the streams, and begin to fetch."""

    @abstractmethod
    def _each_record(self) -> AsyncIterator[Record]:
        """Iterate over the stored records."""

    @abstractmethod
    async def _next_records(self, records_max: int | None) -> list[Record]:
        """Return the next stored records; an empty list at the end.

        Stops before a record that changes the delivered position.
        """

    @abstractmethod
    def _has_at_hand(self) -> bool:
        """Return whether a chunk was begun, so that `_next_records` need not wait."""

    def records(self) -> AsyncIterator[Record]:
        """Return an iterator over records as Python values; see `batches` for the errors.

        With a deserializer, it also raises `CannotDecode` for a record that cannot be decoded (the setting
        ``undecodable_records``); the iteration can go on with the record behind it.
        """
        records = self._each_record()
        if self._decoding is not None:
            records = Decoded(records, self._decoding)
        return records if self._delivery is None else self._delivery.records(records)

    def __aiter__(self) -> AsyncIterator[Record]:
        return self.records()

    async def poll(self, timeout_s: float | None = None, *, records_max: int | None = None) -> list[Record]:
        """Return the next records of one fetched batch, at most `records_max` if that is given.

        Waits for the first record for up to `timeout_s` seconds, with None for ever; the first call also looks up the
        streams, which does not count. Returns an empty list when the time is over, and at the end of a consumer with an
        end. All returned records count as delivered, so a following `commit` stores that they were processed. A
        consumer of a group also commits them automatically, after the next `poll`.

        Raises `InvalidArgument` for a negative `timeout_s` or a `records_max` below 1, and the errors of `records`.
        """
        timeout_s = arguments.seconds("timeout_s", timeout_s)
        if records_max is not None:
            arguments.whole("records_max", records_max, 1, POLL_RECORDS_LIMIT)
        await self.start()
        await self._turns.give()  # before the time starts: a `timeout_s` of 0 would leave none for it
        waiting = asyncio.timeout(timeout_s)
        try:
            async with waiting:
                found = await self.next_records(records_max)
        except TimeoutError:
            if not waiting.expired():
                raise
            return []
        rest_max = records_max
        while found and self._has_at_hand():
            if records_max is not None and not (rest_max := records_max - len(found)):
                break
            if self._decoding is not None and self._decoding.has_left_over:
                break
            try:
                async with asyncio.timeout(0):  # it returns at once, except for chunks without records
                    found += await self.next_records(rest_max)
            except TimeoutError:
                break
            except CannotDecode as error:
                if self._decoding is not None:
                    self._decoding.raise_later(error)
                break
        return found

    async def next_records(self, records_max: int | None = None) -> list[Record]:
        """Return the next records, up to one that changes the delivered position; see `records`.

        Returns an empty list at the end.
        """
        coming = self._next_decoded(records_max)
        return await (coming if self._delivery is None else self._delivery.next_records(coming))

    async def _next_decoded(self, records_max: int | None) -> list[Record]:
        if self._decoding is None:
            return await self._next_records(records_max)
        while True:
            found = self._decoding.left_over()
            if found is None:
                records = await self._next_records(records_max)
                if not records:
                    return []
                found = self._decoding.decoded_list(records)
            if found:
                return found

    @property
    def skipped_records(self) -> int:
        """Number of records that could not be decoded, and were left out (the setting ``undecodable_records``)."""
        return 0 if self._decoding is None else self._decoding.skipped


def _located(record: Record, part: Part, error: Exception) -> CannotDecode:
    attributes = {
        "stream": record.stream,
        "streamlet_id": record.streamlet,
        "entry": record.entry,
        "offset": record.offset,
        "part": "row" if record.row is not None else part,
        "reason": error.message if isinstance(error, KeraError) else words(error),
    }
    found = type(error) if isinstance(error, CannotDecode) else CannotDecode
    refusal = found(
        f"the {attributes['part']} of record {record.offset} of stream {record.stream!r}, streamlet {record.streamlet},"
        f" entry {record.entry} cannot be decoded: {attributes['reason']}",
        **attributes,
    )
    refusal.__cause__ = error
    return refusal
