"""Values that name the schema that they were written with: what that schema makes of them.

`Registered` asks the registry for the schemas that the records of a page name, and remembers a bounded number of them.
A value that only happens to begin like one that names a schema, or does not fit the schema that it names, is shown as
any other: nothing here fails because of what somebody has put into a record.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

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
"""Schemas that are looked up for one page."""
REMEMBERED_MAX = 256
_ANYWHERE = Context("", "value")

Read = Callable[[bytes], Any]


class Registered:
    """Schemas of one cluster, as far as who asks may see them."""

    def __init__(self, schemas: SchemaRegistry) -> None:
        self._schemas = schemas
        self._known: OrderedDict[int, tuple[RegisteredSchema, Read] | None] = OrderedDict()
        """By id; None: there is none, or nothing can be read by it."""

    async def look_up(self, values: Iterable[bytes | None], asked_max: int = ASKED_MAX) -> int:
        """Learn the schemas that these values name, at most `asked_max` of them.

        Returns how many the registry was asked for; if the registry fails, `asked_max`.
        """
        unknown = {schema_id for value in values if (schema_id := _named(value))} - self._known.keys()
        wanted = sorted(unknown)[:asked_max]
        for schema_id in wanted:
            try:
                schema = await self._schemas.by_id(schema_id)
                self._remember(schema_id, (schema, reader_of(schema)))
            except (UnknownSchema, InvalidArgument, CannotDecode):
                self._remember(schema_id, None)
            except KeraError:
                return asked_max  # the records are shown all the same
        return len(wanted)

    def document(self, value: bytes | None) -> tuple[str, Any] | None:
        """The type of a value's schema, and what that decodes the value to.

        None: the value names no schema that is known, or does not fit it.
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
        """A value as its schema decodes it; None: as of `document`, or the value is too long."""
        found = self.document(value) if value is not None and is_taken_apart(value, length_max) else None
        if value is None or found is None:
            return None
        try:
            if found[0] == SchemaType.JSON:  # as it is written: what was decoded has lost digits of numbers
                return shown_json(unframe(value)[1], found[0], len(value), length_max)
            return shown_document(found[1], found[0], len(value), length_max)
        except (ValueError, RecursionError, TypeError):
            return None

    def schema_of(self, value: bytes | None) -> RegisteredSchema | None:
        """The one that a value names, if it is known; whether the value fits it is what `shown` finds out."""
        known = self._known.get(_named(value))
        return None if known is None else known[0]

    def _remember(self, schema_id: int, known: tuple[RegisteredSchema, Read] | None) -> None:
        self._known[schema_id] = known
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)


def _named(value: bytes | None) -> int:
    """The id of the schema that a value names; 0: none."""
    if value is None or len(value) > TAKEN_APART_BYTES_MAX:
        return 0
    try:
        return unframe(value)[0]
    except NotFramed:
        return 0


def reader_of(schema: RegisteredSchema) -> Read:
    """A function that makes a document of a payload. Raises `InvalidArgument` for a schema by which nothing can be
    read.
    """
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
    """The outermost messages of the last file of a schema of Protobuf. Raises `InvalidArgument`."""
    pool, last = DescriptorPool(), ""
    try:
        for file in FileDescriptorSet.FromString(base64.b64decode(schema.definition)).file:
            pool.AddSerializedFile(file.SerializeToString())
            last = file.name
        return list(pool.FindFileByName(last).message_types_by_name.values())
    except Exception as error:  # it raises whatever a definition makes it
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
    """A definition as people read it. One that cannot be read is shown as it is."""
    try:
        if schema.schema_type is SchemaType.ARROW:
            return str(schema_from_bytes(base64.b64decode(schema.definition)))
        if schema.schema_type is SchemaType.PROTOBUF:
            files = FileDescriptorSet.FromString(base64.b64decode(schema.definition)).file
            return "\n".join(f"# {file.name}\n{file}" for file in files)
        return json.dumps(json.loads(schema.definition), indent=2, ensure_ascii=False)
    except Exception:  # noqa: BLE001 - a definition may make the libraries raise anything
        return schema.definition
