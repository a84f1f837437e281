"""Decodes values that name the schema that they were written with.

`Registered` asks the registry for the schemas that the records of a page name, and remembers a bounded number of them.
A value that names a schema only by chance, or does not fit its schema, is shown like any other value: no record can
make this code fail.
"""

from __future__ import annotations

import base64
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from kera.client import RegisteredSchema, SchemaRegistry
from kera.client.serializers import AvroDeserializer, Context
from kera.console.browsing.decoding import TAKEN_APART_BYTES_MAX, Shown, is_taken_apart, shown_document, shown_json
from kera.core.errors import CannotDecode, InvalidArgument, KeraError, NotFramed, UnknownSchema
from kera.core.format.schema import schema_from_bytes
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import split_message_path, unframe

ASKED_MAX = 16
"""Maximum number of schemas that are looked up for a page."""
REMEMBERED_MAX = 256
UNKNOWN_S = 30.0
"""How long the registry is not asked again for a schema that it does not have."""
_ANYWHERE = Context("", "value")

T = TypeVar("T")
Read = Callable[[bytes], Any]


class Registered:
    """The schemas of one cluster that the user may see."""

    def __init__(self, schemas: SchemaRegistry, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._schemas, self._now_s = schemas, now_s
        self._known: OrderedDict[int, tuple[RegisteredSchema, Read] | None] = OrderedDict()
        """The schemas by id; None: the schema cannot decode values."""
        self._missed_s: OrderedDict[int, float] = OrderedDict()
        """When the registry had no schema with an id, which it may get later."""

    async def look_up(self, values: Iterable[bytes | None], asked_max: int = ASKED_MAX) -> int:
        """Look up the schemas that these values name, at most `asked_max` of them.

        Return how many schemas the registry was asked for; if the registry fails, `asked_max`.
        """
        while self._missed_s and self._now_s() - next(iter(self._missed_s.values())) >= UNKNOWN_S:
            self._missed_s.popitem(last=False)
        named = {schema_id for value in values if (schema_id := _named(value))}
        wanted = sorted(named - self._known.keys() - self._missed_s.keys())[:asked_max]
        for schema_id in wanted:
            try:
                schema = await self._schemas.by_id(schema_id)
                _remember(self._known, schema_id, (schema, reader_of(schema)))
            except UnknownSchema:
                _remember(self._missed_s, schema_id, self._now_s())
            except (InvalidArgument, CannotDecode):
                _remember(self._known, schema_id, None)
            except KeraError:
                return asked_max  # the records are shown without their schemas
        return len(wanted)

    def document(self, value: bytes | None) -> tuple[str, Any] | None:
        """Return the type of a value's schema, and the document that the schema decodes the value into.

        None: the value names no known schema, or does not fit it.
        """
        known = self._known.get(_named(value))
        if value is None or known is None:
            return None
        schema, read = known
        try:
            return schema.schema_type, read(unframe(value)[1])
        except (KeraError, ValueError, RecursionError, TypeError, KeyError):
            return None

    def shown(self, value: bytes | None, length_max: int) -> Shown | None:
        """Show a value as decoded by its schema; None: for the reasons of `document`, or the value is too long."""
        found = self.document(value) if value is not None and is_taken_apart(value, length_max) else None
        if value is None or found is None:
            return None
        try:
            if found[0] == SchemaType.JSON:  # shown as it is written, because decoding loses digits of numbers
                return shown_json(unframe(value)[1], found[0], len(value), length_max)
            return shown_document(found[1], found[0], len(value), length_max)
        except (ValueError, RecursionError, TypeError):
            return None

    def schema_of(self, value: bytes | None) -> RegisteredSchema | None:
        """Return the schema that a value names, if it is known. The value may not fit it, which `shown` checks."""
        known = self._known.get(_named(value))
        return None if known is None else known[0]


def _remember(remembered: OrderedDict[int, T], schema_id: int, what: T) -> None:
    """Add the newest of a bounded number of things."""
    remembered[schema_id] = what
    remembered.move_to_end(schema_id)
    while len(remembered) > REMEMBERED_MAX:
        remembered.popitem(last=False)


def _named(value: bytes | None) -> int:
    """Return the id of the schema that a value names; 0: it names no schema."""
    if value is None or len(value) > TAKEN_APART_BYTES_MAX:
        return 0
    try:
        return unframe(value)[0]
    except NotFramed:
        return 0


def reader_of(schema: RegisteredSchema) -> Read:
    """Return a function that decodes a payload. Raises `InvalidArgument` for a schema that cannot decode values."""
    match schema.schema_type:
        case SchemaType.AVRO:
            read = AvroDeserializer().reader_of(schema)
            return lambda payload: read(payload, _ANYWHERE)
        case SchemaType.JSON:
            return json.loads
        case SchemaType.PROTOBUF:
            return _protobuf(schema)
    raise InvalidArgument(f"values are not written by a schema of type {schema.schema_type}")


def messages_of(schema: RegisteredSchema) -> list[Descriptor]:
    """Return the outermost messages of the last file of a Protobuf schema. Raises `InvalidArgument`."""
    pool, last = DescriptorPool(), ""
    try:
        for file in FileDescriptorSet.FromString(base64.b64decode(schema.definition)).file:
            pool.AddSerializedFile(file.SerializeToString())
            last = file.name
        return list(pool.FindFileByName(last).message_types_by_name.values())
    except Exception as error:  # a definition can cause any error
        raise InvalidArgument(f"schema {schema.schema_id} is not a schema of Protobuf") from error


def _protobuf(schema: RegisteredSchema) -> Read:
    outermost = messages_of(schema)

    def read(payload: bytes) -> Any:
        path, data = split_message_path(payload)
        try:
            found = outermost[path[0]]
            for number in path[1:]:
                found = found.nested_types[number]
            message = message_factory.GetMessageClass(found).FromString(data)
            return json_format.MessageToDict(message, preserving_proto_field_name=True)
        except Exception as error:
            raise NotFramed("the value does not fit its schema") from error

    return read


def readable(schema: RegisteredSchema) -> str:
    """Return a definition in a form for people, or unchanged if it cannot be parsed."""
    try:
        if schema.schema_type is SchemaType.ARROW:
            return str(schema_from_bytes(base64.b64decode(schema.definition)))
        if schema.schema_type is SchemaType.PROTOBUF:
            files = FileDescriptorSet.FromString(base64.b64decode(schema.definition)).file
            return "\n".join(f"# {file.name}\n{file}" for file in files)
        return json.dumps(json.loads(schema.definition), indent=2, ensure_ascii=False)
    except Exception:  # noqa: BLE001 - a definition can cause any error of the libraries
        return schema.definition
