"""Decodes a column's values in a Python worker: each with the schema that it names, all into one array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from kera.client.serializers import AvroDeserializer, Context, ProtobufDeserializer
from kera.client.serializers.refusing import words
from kera.core.errors import CannotDecode, KeraError
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import unframe
from kera.spark_connector.decoding import avro_types, protobuf_types
from kera.spark_connector.decoding.subject import Subject
from kera.spark_connector.decoding.types import plain_of

Undecodable = Literal["fail", "null"]


@dataclass
class Decoder:
    """Decodes values of one subject into columns. Spark pickles it, and the worker makes the readers that it needs."""

    subject: Subject
    undecodable: Undecodable
    _value_of: Callable[[bytes], Any] | None = field(default=None, repr=False)

    def __getstate__(self) -> tuple[Subject, Undecodable]:
        return self.subject, self.undecodable

    def __setstate__(self, state: tuple[Subject, Undecodable]) -> None:
        self.subject, self.undecodable = state
        self._value_of = None

    @functools.cached_property
    def arrow_type(self) -> pa.DataType:
        """The type of the decoded column. Raises `InvalidArgument`."""
        latest = self.subject.latest
        if latest.schema_type is SchemaType.AVRO:
            return avro_types.arrow_type_of(latest.definition)
        return protobuf_types.arrow_type_of(protobuf_types.message_class(latest.definition, latest.message))

    def array(self, values: pa.Array) -> pa.Array:
        """Decode a column of values. Raises `CannotDecode` for a value that cannot be read, if that is to "fail"."""
        found = [self.value(each) for each in values.to_pylist()]
        kind = self.arrow_type
        try:
            return pa.array(found, kind)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            if self.undecodable == "fail":
                raise CannotDecode(f"subject {self.subject.name!r} cannot be a column: {words(error)}") from error
            return pa.concat_arrays([_array_or_null(each, kind) for each in found])

    def row(self, data: bytes | None) -> Any:
        """Decode one value into the form that Spark expects of Python functions: a map is a mapping."""
        return self.array(pa.array([data], pa.binary())).to_pylist(maps_as_pydicts="strict")[0]

    def value(self, data: bytes | None) -> Any:
        """Decode one value into Python types, with mappings for structs; None for a missing value.

        A value that cannot be decoded raises `CannotDecode`, or is None if `undecodable` is "null".
        """
        if data is None:
            return None
        if self._value_of is None:
            self._value_of = self._reader()
        try:
            return self._value_of(bytes(data))
        except Exception as error:
            if self.undecodable == "null":
                return None
            why = error.message if isinstance(error, KeraError) else words(error)
            raise CannotDecode(f"a value of subject {self.subject.name!r} cannot be decoded: {why}") from error

    def _reader(self) -> Callable[[bytes], Any]:
        latest, readers, why = self.subject.latest, {}, {}
        context = Context(self.subject.name.removesuffix("-value").removesuffix("-key"))
        deserializer: Any
        if latest.schema_type is SchemaType.AVRO:
            plain = plain_of(self.arrow_type, times=avro_types.may_have_times(latest.definition))
            deserializer = AvroDeserializer(latest.definition)
        else:
            message = protobuf_types.message_class(latest.definition, latest.message)
            deserializer, plain = ProtobufDeserializer(message), protobuf_types.value_of
        for version in self.subject.versions:
            try:
                readers[version.schema_id] = deserializer.reader_of(version)
            except KeraError as error:
                why[version.schema_id] = error.message

        def value_of(data: bytes) -> Any:
            schema_id, payload = unframe(data)
            reader = readers.get(schema_id)
            if reader is None:
                reason = "it does not belong to the subject, or was registered after the query began: restart the query"
                raise CannotDecode(f"schema {schema_id}: {why.get(schema_id, reason)}")
            found = reader(payload, context)
            return found if plain is None or found is None else plain(found)

        return value_of


def _array_or_null(value: Any, kind: pa.DataType) -> pa.Array:
    try:
        return pa.array([value], kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return pa.nulls(1, kind)
