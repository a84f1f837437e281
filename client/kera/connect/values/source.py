"""A source of a copy whose rows become records with an encoded value, according to a schema of the registry.

Each row with columns becomes a value of all columns. Records with values of JSON keep their keys, times and headers; a
record without a value stays without one. ``key`` and ``time`` of the `Encoding` name the column, or the field of the
value, that becomes the record's key or time instead.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kera.client.json_form.texts import members_of
from kera.client.serializers import Context
from kera.client.serializers.json import parsed
from kera.connect.pieces import Piece, Place, Source, Span
from kera.connect.records import is_default, key_lists
from kera.connect.values.avro import AvroEncoder
from kera.connect.values.columns import plain_values
from kera.connect.values.encoding import Encoder, Encoding, UnknownField
from kera.connect.values.json_values import JsonEncoder, json_value
from kera.connect.values.subject import Registry, Version, choose
from kera.connect.worker import Worker
from kera.core.errors import CannotDecode, CannotEncode, InternalError, InvalidArgument, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import frame_of

_TIME, _KEYS = DEFAULT_SCHEMA.field("timestamp"), DEFAULT_SCHEMA.field("keys")


class EncodedSource:
    """See `kera.connect.pieces.Source`. It owns the wrapped source, and opens and closes it."""

    def __init__(self, source: Source, encoding: Encoding, registry: Registry, stream: str) -> None:
        """`registry`: that of the target's cluster. `stream`: the name of the target."""
        self.shown = self.identity = source.shown
        self.notes = source.notes
        self.may_shrink = source.may_shrink
        self.streamlets = 0
        self.schema = DEFAULT_SCHEMA
        self._source = source
        self._encoding = encoding
        self._registry = registry
        self._context = Context(stream)
        self._columns: pa.Schema | None = None
        """Columns of the source; None: the source has records with values of JSON."""
        self._version: Version | None = None
        self._encode: Encoder | None = None
        self._worker = Worker("encoding")

    async def open(self) -> None:
        """See `Source`. Raises the errors of `choose`, and `InvalidArgument` if the key or the time is not a column."""
        await self._source.open()
        encoding, source = self._encoding, self._source
        self.identity = f"{source.identity} {encoding.shown}"
        # With another key, a record may belong to another streamlet than in the source.
        self.streamlets = source.streamlets if encoding.key is None else 0
        if not is_default(source.schema):
            self._columns = source.schema
            for option, column in (("--key", encoding.key), ("--time", encoding.time)):
                if column is not None and column not in source.schema.names:
                    has = ", ".join(source.schema.names)
                    raise InvalidArgument(f"{option}: {self.shown} has no column {column!r}; it has {has}")
            fields = [_TIME] * (encoding.time is not None) + [_KEYS] * (encoding.key is not None)
            self.schema = pa.schema([*fields, DEFAULT_SCHEMA.field("value")])
        else:
            self.schema = source.schema
        await self._choose()

    async def _choose(self) -> bool:
        """Look up the present schema, and return whether it differs from the one before."""
        kind, subject = self._encoding.schema_type, self._encoding.subject
        version, exact = await choose(self._registry, subject, kind, self._columns, self.shown)
        if self._version is not None and version.schema_id == self._version.schema_id:
            return False
        encoder = AvroEncoder if kind is SchemaType.AVRO else JsonEncoder
        self._version, self._encode = version, encoder(version.definition, self._context, exact=exact)
        self.notes.append(f"values are written as {kind}, version {version.version} of subject {subject}")
        return True

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """See `Source`."""
        return await self._source.left(places)

    async def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """See `Source`. Raises `CannotEncode` for a value that does not fit the schema."""
        async with contextlib.aclosing(self._source.read(places, piece_bytes)) as pieces:
            async for piece in pieces:
                rows = await self._encoded(piece.rows, piece.part, piece.start)
                yield piece._replace(rows=rows, streamlet=piece.streamlet if self._encoding.key is None else None)

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """See `Source`. The number and the keys of records are as before, even if the schema has changed."""
        found = await self._source.again(spans)
        return [
            None if rows is None else await self._encoded(rows, span.part, span.start)
            for rows, span in zip(found, spans, strict=True)
        ]

    async def kept(self, places: Mapping[str, Place]) -> None:
        """See `Source`."""
        await self._source.kept(places)

    async def close(self) -> None:
        """See `Source`."""
        self._worker.close()
        await self._source.close()

    async def _encoded(self, rows: pa.RecordBatch, part: str, start: Place) -> pa.RecordBatch:
        try:
            return await self._worker.call(self._records, rows, part, start)
        except CannotEncode:
            # A schema that fits the value may have been registered meanwhile, as the error suggests.
            if not await self._choose():
                raise
            return await self._worker.call(self._records, rows, part, start)

    def _records(self, rows: pa.RecordBatch, part: str, start: Place) -> pa.RecordBatch:
        texts: list[bytes | None] = [] if self._columns is not None else rows.column("value").to_pylist()
        if self._columns is None:
            values = [self._decoded(value, part, start, at) for at, value in enumerate(texts)]
        else:
            values = self._values(rows)
        columns: dict[str, pa.Array] = {name: rows.column(name) for name in rows.schema.names if self._columns is None}
        # Values that are JSON already are only checked, so that numbers keep all their digits.
        as_given = texts if self._encoding.schema_type is SchemaType.JSON else []
        columns["value"] = self._payloads(values, as_given, part, start)
        if self._encoding.key is not None:
            columns["keys"] = key_lists(self._keys(rows, values, texts))
        if self._encoding.time is not None:
            columns["timestamp"] = self._times(rows, values)
        return pa.RecordBatch.from_arrays([columns[name] for name in self.schema.names], schema=self.schema)

    def _decoded(self, value: bytes | None, part: str, start: Place, at: int) -> Any:
        try:
            if value is not None and value[:1] == b"\0":
                raise CannotDecode("it begins with the id of a schema already: copy it without --value")
            return None if value is None else parsed(value)
        except CannotDecode as error:
            raise SchemaMismatch(f"{self._where(part, start, at)}: the value is not JSON: {error.message}") from error

    def _values(self, rows: pa.RecordBatch) -> list[Any]:
        columns = []
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            try:
                if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
                    column = column.cast(pa.timestamp("us", column.type.tz))  # noqa: PLW2901 - without loss
                columns.append(plain_values(column))
            except (pa.ArrowInvalid, OverflowError, ValueError, SystemError) as error:  # a time before the year 1
                raise SchemaMismatch(
                    f"{self.shown}: column {name!r} has a value that cannot be encoded: {error}", column=name
                ) from error
        if self._encoding.schema_type is SchemaType.JSON:
            columns = [[json_value(value) for value in column] for column in columns]
        names = rows.schema.names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _payloads(self, values: Sequence[Any], as_given: Sequence[bytes | None], part: str, start: Place) -> pa.Array:
        """Encode `values`, and frame them. `as_given`: the payloads to use, if values are only checked."""
        encode, version = self._encode, self._version
        if encode is None or version is None:
            raise InternalError("the source was not opened")
        frame = frame_of(version.schema_id)
        payloads: list[bytes | None] = []
        for at, value in enumerate(values):
            try:
                given = as_given[at] if as_given else None
                there = given is not None if as_given else value is not None
                encoded = encode(value) if there else b""
                payloads.append(frame + (encoded if given is None else given) if there else None)
            except UnknownField as error:
                subject = self._encoding.subject
                raise CannotEncode(
                    f"{self._where(part, start, at)}: version {version.version} of subject {subject!r} has no field"
                    f" {error.path!r}; register a version that has it, and start the copy again: kera schema register"
                    f" {subject} FILE --type {self._encoding.schema_type}",
                    field=error.path,
                ) from error
            except CannotEncode as error:
                raise CannotEncode(f"{self._where(part, start, at)}: {error.message}", **error.attributes) from error
        return pa.array(payloads, pa.binary())

    def _where(self, part: str, start: Place, at: int) -> str:
        return f"{self.shown}, record {at + 1} after {start!r}" + (f" of part {part}" if part else "")

    def _keys(self, rows: pa.RecordBatch, values: Sequence[Any], texts: Sequence[bytes | None]) -> pa.Array:
        """Return the keys as bytes: binary values unchanged, others as text."""
        name = str(self._encoding.key)
        if self._columns is None:
            keys = [_key(name, _field(value, name), text) for value, text in zip(values, texts, strict=True)]
            return pa.array(keys, pa.binary())
        column = rows.column(name)
        try:
            return column if pa.types.is_binary(column.type) else column.cast(pa.string()).cast(pa.binary())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaMismatch(f"--key: column {name!r} is {column.type}, which cannot be a key: {error}") from error

    def _times(self, rows: pa.RecordBatch, values: Sequence[Any]) -> pa.Array:
        name = str(self._encoding.time)
        try:
            if self._columns is None:
                found = pa.array([_moment(_field(value, name)) for value in values], _TIME.type)
            else:
                found = rows.column(name)
                if not pa.types.is_timestamp(found.type):
                    raise ValueError(f"it is {found.type}, not a timestamp")
                found = found.cast(_TIME.type)
            if found.null_count:
                raise ValueError("a record has no value")
        except (pa.ArrowInvalid, ValueError, TypeError) as error:
            raise SchemaMismatch(f"--time: {name!r} of {self.shown} cannot be the time of a record: {error}") from error
        return found


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _key(name: str, value: Any, text: bytes | None) -> bytes | None:
    """Return a key as bytes. `text`: the JSON object whose member `name` is `value`."""
    if isinstance(value, dict | list):
        raise SchemaMismatch(f"--key: field {name!r} of a record is {json.dumps(value)[:80]}, which cannot be a key")
    if value is None or isinstance(value, str):
        return None if value is None else value.encode()
    if isinstance(value, float) and text is not None:
        return next(own for each, own, _ in members_of(text.decode()) if each == name).encode()
    return json.dumps(value).encode()


def _moment(value: Any) -> datetime.datetime:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not an ISO 8601 time")
    found = datetime.datetime.fromisoformat(value)
    if found.tzinfo is None:
        raise ValueError(f"{value} has no time zone")
    return found
