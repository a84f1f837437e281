"""Avro: values are mappings, lists and so on of a schema; written without it, and behind its id.

A consumer gets values as they were written, or resolved to a schema of its own: fields that were added have their
defaults, those that it does not know are left out.

fastavro is compiled, and believes the bytes: deep nesting ends the process, and a few bytes can ask for years of work.
So whatever a schema makes possible of that, `kera.client.serializers.avro_limits` looks for first.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kera.client.serializers.avro_limits import Limits
from kera.client.serializers.framed import WithFrame
from kera.client.serializers.protocols import Context, Deserializer, Schema, Schemas, Serializer
from kera.client.serializers.refusing import cannot_encode, library, undecodable, words
from kera.core.errors import InvalidArgument, KeraError
from kera.core.schemas import SchemaType
from kera.core.schemas.json_text import check_depth

AvroSchema: TypeAlias = "str | Mapping[str, Any] | Sequence[Any]"
"""Its JSON text, or what that says."""


class AvroSerializer:
    """Values of a schema of Avro."""

    def __init__(self, schema: AvroSchema, *, framed: bool = True) -> None:
        """`framed`: the schema is registered, and values begin with its id.

        Raises `InvalidArgument` when it is no schema, or fastavro is not installed.
        """
        self._text, self._schema = _parsed(schema, "AvroSerializer")
        self._limits = _limits_of(self._schema)
        self._write = library("fastavro", "AvroSerializer").schemaless_writer
        self._validate = library("fastavro.validation", "AvroSerializer").validate
        self.framed = framed

    async def ready(self, context: Context, schemas: Schemas) -> Serializer[Any]:
        """See `NeedsSchema`."""
        if not self.framed:
            return self.payload
        return WithFrame(self.payload, await schemas.id_of(context, SchemaType.AVRO, self._text))

    def payload(self, value: Any, context: Context, /) -> bytes:
        """`value` without a frame. Raises `CannotEncode`."""
        written = io.BytesIO()
        try:
            self._limits.check_value(value)
            # The writer takes what it can make bytes of, such as numbers that are too large for their type.
            # Errors only when there is one: they are made of each branch of a union that does not fit, in 8 us.
            if not self._validate(value, self._schema, raise_errors=False, **_VALIDATION):
                self._validate(value, self._schema, **_VALIDATION)
            self._write(written, self._schema, value, strict_allow_default=True, disable_tuple_notation=True)
        except Exception as error:  # it raises whatever Python does with a value of another type
            field, reason = _blamed(error)
            raise cannot_encode(context, reason, field) from error
        return written.getvalue()

    def __call__(self, value: Any, context: Context, /) -> bytes:
        """Raises `CannotEncode`."""
        if self.framed:
            raise cannot_encode(context, f"the serializer is not ready: await producer.prepare({context.stream!r})")
        return self.payload(value, context)


class AvroDeserializer:
    """What `AvroSerializer` writes; what others have written with Avro and a registry, too."""

    def __init__(self, schema: AvroSchema | None = None, *, framed: bool = True) -> None:
        """Values are resolved to `schema`, if it is given. Those that are not `framed` were written with just that one.

        Raises `InvalidArgument`.
        """
        self._read = library("fastavro", "AvroDeserializer").schemaless_reader
        self._wanted = None if schema is None else _parsed(schema, "AvroDeserializer")[1]
        self.framed = framed
        if not framed and self._wanted is None:
            raise InvalidArgument("Avro that does not name its schema cannot be read without: AvroDeserializer(schema)")
        self._unframed = None if framed else self._reader(self._wanted, None)

    def reader_of(self, schema: Schema) -> Deserializer[Any]:
        """See `FramedDeserializer`."""
        if schema.schema_type is not SchemaType.AVRO:
            raise undecodable(f"schema {schema.schema_id} is of type {schema.schema_type}, not avro")
        try:
            _, written_with = _parsed(schema.definition, "AvroDeserializer")
            return self._reader(written_with, self._wanted)
        except InvalidArgument as error:
            raise undecodable(f"schema {schema.schema_id}: {error.message}") from error

    def _reader(self, written_with: Any, wanted: Any) -> Deserializer[Any]:
        limits, read = _limits_of(written_with), self._read
        within = _is_parsed_again(written_with) or _is_parsed_again(wanted)
        if within:
            written_with, wanted = _as_field(written_with), None if wanted is None else _as_field(wanted)

        def value_of(data: bytes, _context: Context, /) -> Any:
            try:
                limits.check_bytes(data)
                source = io.BytesIO(data)
                value = read(source, written_with, wanted)
                if within:
                    value = value[_FIELD_OF_VALUE]
                behind = len(data) - source.tell()
            except Exception as error:  # it raises whatever Python does with what is not there
                raise undecodable(error) from error
            if behind:
                raise undecodable(f"{behind} bytes are behind the value")
            return value

        return value_of

    def __call__(self, data: bytes, context: Context, /) -> Any:
        """Raises `CannotDecode`."""
        if self._unframed is None:
            raise undecodable("the schema is not known; give the deserializer to a consumer")
        return self._unframed(data, context)


_PRIMITIVES = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
"""A schema in their own right, which need not be written as JSON texts."""


def _parsed(schema: AvroSchema, needed_by: str) -> tuple[str, Any]:
    """The text of a schema, and what fastavro makes of it."""
    fastavro = library("fastavro", needed_by)
    try:
        named = isinstance(schema, str) and schema in _PRIMITIVES
        known = json.loads(schema) if isinstance(schema, str) and not named else schema
        if isinstance(known, Mapping):  # what fastavro has parsed says so, and would not be looked at again
            known = {name: each for name, each in known.items() if not name.startswith("__")}
        text = schema if isinstance(schema, str) and not named else json.dumps(known, ensure_ascii=False)
        check_depth(text, "a schema of Avro")
        return text, fastavro.parse_schema(known, named_schemas={})
    except KeraError:
        raise
    except fastavro.schema.UnknownType as error:
        raise InvalidArgument(f"this is no schema of Avro: no type is called {error.name!r}") from error
    except Exception as error:  # it raises whatever Python does with what is not as it expects
        raise InvalidArgument(f"this is no schema of Avro: {words(error)}") from error


_VALIDATION = {"strict": False, "disable_tuple_notation": True}
_FIELD_OF_VALUE = "value"
_PARSED = "__fastavro_parsed"


def _is_parsed_again(schema: Any) -> bool:
    """Whether fastavro would parse it for each value: all but records, in which it notes that it has."""
    return isinstance(schema, list) or (isinstance(schema, Mapping) and _PARSED not in schema)


def _as_field(schema: Any) -> Any:
    """A record of nothing but a value of `schema`: its bytes are those of the value."""
    record = {
        "type": "record",
        "name": "kera_value_of_a_schema",
        "fields": [{"name": _FIELD_OF_VALUE, "type": _without_notes(schema)}],
    }
    try:
        return library("fastavro", "AvroDeserializer").parse_schema(record, named_schemas={})
    except Exception as error:  # it has a type that is called as ours
        raise InvalidArgument(f"this is no schema of Avro: {words(error)}") from error


def _without_notes(schema: Any) -> Any:
    """As fastavro is to parse it once more: what it has noted in types is left out."""
    if isinstance(schema, list):
        return [_without_notes(each) for each in schema]
    if isinstance(schema, Mapping):
        return {name: each for name, each in schema.items() if not name.startswith("__")}
    return schema


def _limits_of(schema: Any) -> Limits:
    try:
        return Limits(schema)
    except ValueError as error:
        raise InvalidArgument(f"this schema of Avro is not taken: {error}") from error


def _blamed(error: Exception) -> tuple[str, object]:
    """The field and what is wrong with it, as far as fastavro says: ``O.lines.L.p is <x> of type …``."""
    for found in getattr(error, "errors", ())[:1]:
        text = str(found)
        said = _FIELD.match(text)
        reason = f"it {text[text.find('is ') :]}" if "is " in text else text
        return (said[1] if said is not None else ""), _INSIDE.sub("}", reason)
    return "", error


_FIELD = re.compile(r"(?:Field\()?[^\s.()]+\.([^\s()]+)\)? (?=is )")
"""Behind the name of the record, which is no field."""
_INSIDE = re.compile(r", '__fastavro_parsed.*\}", re.DOTALL)
"""What fastavro notes in a schema."""
