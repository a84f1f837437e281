"""Avro: values are mappings, lists and so on of a schema; they are written behind the id of the schema.

A consumer gets values as they were written, or resolved to its own schema: added fields get their defaults, and unknown
fields are left out. A default becomes the same Python value as a written one.

fastavro is compiled, and trusts the bytes: deep nesting crashes the process, and a few bytes can cause years of work.
So `kera.client.serializers.avro_limits` first checks whatever of that a schema makes possible.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from kera.client.serializers.avro_defaults import Defaults, a_copy, set_aside
from kera.client.serializers.avro_exact import ValueChanged, check_reads_same, may_change_values
from kera.client.serializers.avro_limits import Limits
from kera.client.serializers.avro_logical import Adoption
from kera.client.serializers.framed import WithFrame
from kera.client.serializers.protocols import Context, Deserializer, Schema, Schemas, Serializer
from kera.client.serializers.refusing import cannot_encode, library, undecodable, words
from kera.core.errors import InvalidArgument, KeraError
from kera.core.schemas import SchemaType
from kera.core.schemas.json_text import check_depth

AvroSchema: TypeAlias = "str | Mapping[str, Any] | Sequence[Any]"
"""The JSON text of a schema, or the parsed JSON."""


class AvroSerializer:
    """Writes values of an Avro schema."""

    def __init__(self, schema: AvroSchema, *, framed: bool = True) -> None:
        """`framed`: register the schema, and begin values with its id.

        Raises `InvalidArgument` when it is not a schema, or fastavro is not installed.
        """
        self._text, document = _document_of(schema)
        self._schema, named = _parsed(document, "AvroSerializer")
        _defaults_of(self._schema, named).for_writing()
        self._limits = _limits_of(self._schema)
        fastavro = library("fastavro", "AvroSerializer")
        self._write = fastavro.schemaless_writer
        self._read_again: Callable[[io.BytesIO], Any] | None = None
        if may_change_values(self._schema):
            self._read_again = lambda data: fastavro.schemaless_reader(data, self._schema, None)
        self._validate = library("fastavro.validation", "AvroSerializer").validate
        self.framed = framed

    async def ready(self, context: Context, schemas: Schemas) -> Serializer[Any]:
        """See `NeedsSchema`."""
        if not self.framed:
            return self.payload
        return WithFrame(self.payload, await schemas.id_of(context, SchemaType.AVRO, self._text))

    def payload(self, value: Any, context: Context, /) -> bytes:
        """Write `value` without a frame. Raises `CannotEncode`, also when it would be read as another value."""
        written = io.BytesIO()
        try:
            self._limits.check_value(value)
            # The writer also takes some invalid values, such as numbers that are too large for their type.
            # With `raise_errors`, an error is made for each branch of a union that does not fit, which takes 8 us.
            if not self._validate(value, self._schema, raise_errors=False, **_VALIDATION):
                self._validate(value, self._schema, **_VALIDATION)
            self._write(written, self._schema, value, strict_allow_default=True, disable_tuple_notation=True)
            if self._read_again is not None:
                check_reads_same(value, written, self._read_again)
        except ValueChanged as error:
            raise cannot_encode(context, error, error.field) from error
        except Exception as error:  # fastavro raises any error of Python for a value of another type
            field, reason = _blamed(error)
            raise cannot_encode(context, reason, field) from error
        return written.getvalue()

    def __call__(self, value: Any, context: Context, /) -> bytes:
        """Serialize a value without a frame. Raises `CannotEncode`."""
        if self.framed:
            raise cannot_encode(context, f"the serializer is not ready: await producer.prepare({context.stream!r})")
        return self.payload(value, context)


class AvroDeserializer:
    """Reads the output of `AvroSerializer`, and of other programs with Avro and a registry."""

    def __init__(self, schema: AvroSchema | None = None, *, framed: bool = True) -> None:
        """`schema`: resolve values to it, if it is given. Values without frames must have been written with `schema`.

        Raises `InvalidArgument`.
        """
        self._read = library("fastavro", "AvroDeserializer").schemaless_reader
        self._wanted = None if schema is None else _document_of(schema)[1]
        if self._wanted is not None:
            _defaults_of(*_parsed(self._wanted, "AvroDeserializer"))  # raises here if it is not a schema
        self.framed = framed
        if not framed and self._wanted is None:
            raise InvalidArgument("Avro that does not name its schema cannot be read without: AvroDeserializer(schema)")
        self._unframed = None if framed else self._reader(self._wanted, None)

    def reader_of(self, schema: Schema) -> Deserializer[Any]:
        """See `FramedDeserializer`."""
        if schema.schema_type is not SchemaType.AVRO:
            raise undecodable(f"schema {schema.schema_id} is of type {schema.schema_type}, not avro")
        try:
            return self._reader(_document_of(schema.definition)[1], self._wanted)
        except InvalidArgument as error:
            raise undecodable(f"schema {schema.schema_id}: {error.message}") from error

    def _reader(self, written_document: Any, wanted_document: Any) -> Deserializer[Any]:
        written_with, wanted, named = self._pair_of(written_document, wanted_document)
        limits, read = _limits_of(written_with), self._read
        within = _is_parsed_again(written_with) or _is_parsed_again(wanted)
        if within:
            as_field = None if wanted_document is None else _as_field(wanted_document)
            written_with, wanted, named = self._pair_of(_as_field(written_document), as_field)
        defaults = _defaults_of(wanted, named).for_reading()

        def value_of(data: bytes, _context: Context, /) -> Any:
            try:
                limits.check_bytes(data)
                source = io.BytesIO(data)
                value = read(source, written_with, wanted)
                if within:
                    value = value[_FIELD_OF_VALUE]
                behind = len(data) - source.tell()
            except Exception as error:  # fastavro raises any error of Python for missing bytes
                if defaults.why_not and "No default value" in str(error):
                    raise undecodable(defaults.why_not) from error
                raise undecodable(error) from error
            if behind:
                raise undecodable(f"{behind} bytes are behind the value")
            return a_copy(value) if defaults.shared else value

        return value_of

    def _pair_of(self, written_document: Any, wanted_document: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Return both schemas in fastavro's form, and the named types of the second, which may be None."""
        written_with, written_names = _parsed(written_document, "AvroDeserializer")
        if wanted_document is None:
            return written_with, None, {}
        wanted, named = _parsed(wanted_document, "AvroDeserializer")
        return Adoption(written_names, named).adopted(written_with, wanted), wanted, named

    def __call__(self, data: bytes, context: Context, /) -> Any:
        """Deserialize bytes without a frame. Raises `CannotDecode`."""
        if self._unframed is None:
            raise undecodable("the schema is not known; give the deserializer to a consumer")
        return self._unframed(data, context)


_PRIMITIVES = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
"""Names that are schemas by themselves, and need not be written as JSON strings."""


def _document_of(schema: AvroSchema) -> tuple[str, Any]:
    """Return the text of a schema, and the parsed JSON."""
    try:
        named = isinstance(schema, str) and schema in _PRIMITIVES
        document = json.loads(schema) if isinstance(schema, str) and not named else schema
        if isinstance(document, Mapping):  # fastavro marks what it has parsed, and would not parse it again
            document = {name: each for name, each in document.items() if not name.startswith("__")}
        text = schema if isinstance(schema, str) and not named else json.dumps(document, ensure_ascii=False)
        check_depth(text, "a schema of Avro")
    except KeraError:
        raise
    except Exception as error:  # an invalid schema may raise any error of Python
        raise InvalidArgument(f"this is not a valid Avro schema: {words(error)}") from error
    return text, document


def _parsed(document: Any, needed_by: str) -> tuple[Any, dict[str, Any]]:
    """Return a schema parsed by fastavro, with its defaults set aside, and its named types."""
    fastavro = library("fastavro", needed_by)
    named: dict[str, Any] = {}
    try:
        return fastavro.parse_schema(set_aside(document), named_schemas=named), named
    except fastavro.schema.UnknownType as error:
        raise InvalidArgument(f"this is not a valid Avro schema: no type is called {error.name!r}") from error
    except Exception as error:  # an invalid schema may raise any error of Python
        raise InvalidArgument(f"this is not a valid Avro schema: {words(error)}") from error


def _defaults_of(schema: Any, named: dict[str, Any]) -> Defaults:
    try:
        return Defaults(schema, named)
    except ValueError as error:
        raise InvalidArgument(f"this is not a valid Avro schema: {error}") from error


_VALIDATION = {"strict": False, "disable_tuple_notation": True}
_FIELD_OF_VALUE = "value"
_PARSED = "__fastavro_parsed"


def _is_parsed_again(schema: Any) -> bool:
    """Return whether fastavro would parse the schema again for each value: it only marks records as parsed."""
    return isinstance(schema, list) or (isinstance(schema, Mapping) and _PARSED not in schema)


def _as_field(document: Any) -> Any:
    """Return the schema of a record whose only field is of this schema: its bytes are those of the field's value."""
    return {
        "type": "record",
        "name": "kera_value_of_a_schema",
        "fields": [{"name": _FIELD_OF_VALUE, "type": document}],
    }


def _limits_of(schema: Any) -> Limits:
    try:
        return Limits(schema)
    except ValueError as error:
        raise InvalidArgument(f"this Avro schema is not supported: {error}") from error


def _blamed(error: Exception) -> tuple[str, object]:
    """Return the field and the reason, as far as fastavro names them: ``O.lines.L.p is <x> of type …``."""
    for found in getattr(error, "errors", ())[:1]:
        text = str(found)
        said = _FIELD.match(text)
        reason = f"it {text[text.find('is ') :]}" if "is " in text else text
        return (said[1] if said is not None else ""), _INSIDE.sub("}", reason)
    return "", error


_FIELD = re.compile(r"(?:Field\()?[^\s.()]+\.([^\s()]+)\)? (?=is )")
"""The path of a field, behind the name of the record."""
_INSIDE = re.compile(r", '__fastavro_parsed.*\}", re.DOTALL)
"""Marks of fastavro in the text of a schema."""
