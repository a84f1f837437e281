"""Protobuf messages of generated classes.

A producer registers the definition of its class, and values begin with the definition's id and with the path to the
message in its file. A consumer has its own class, and checks that the message has the same name. Beyond that,
Protobuf's own rules apply.
"""

from __future__ import annotations

import base64
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError, EncodeError, Message

from kera.client.serializers.framed import WithFrame
from kera.client.serializers.protocols import Context, Deserializer, Schema, Schemas, Serializer
from kera.client.serializers.refusing import cannot_encode, undecodable
from kera.core.errors import InvalidArgument
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import message_path_to_bytes, split_message_path

_SHOWN_CHARS = 100
"""Maximum length of a foreign name in an error."""
MessageT = TypeVar("MessageT", bound=Message)


class ProtobufSerializer(Generic[MessageT]):
    """Messages of one class."""

    def __init__(self, message: type[MessageT], *, framed: bool = True) -> None:
        """Make the serializer. Raises `InvalidArgument`.

        `framed`: the schema is registered, and values begin with its id.
        """
        self._message = _checked(message)
        self.framed = framed

    async def ready(self, context: Context, schemas: Schemas) -> Serializer[MessageT]:
        """See `NeedsSchema`."""
        if not self.framed:
            return self.payload
        descriptor = self._message.DESCRIPTOR
        schema_id = await schemas.id_of(context, SchemaType.PROTOBUF, definition_of(descriptor), descriptor.full_name)
        return WithFrame(self.payload, schema_id, message_path_to_bytes(path_of(descriptor)))

    def payload(self, value: MessageT, context: Context, /) -> bytes:
        """Return the bytes of `value`, without a frame. Raises `CannotEncode`."""
        if not isinstance(value, self._message):
            raise cannot_encode(context, f"it is {type(value).__name__}, not {self._message.DESCRIPTOR.full_name}")
        try:
            return value.SerializeToString()
        except (EncodeError, ValueError, RecursionError) as error:
            missing: list[str] = value.FindInitializationErrors()  # type: ignore[attr-defined]  # the stubs lack it
            raise cannot_encode(context, error, missing[0] if missing else "") from error

    def __call__(self, value: MessageT, context: Context, /) -> bytes:
        """Return the bytes of `value`. Raises `CannotEncode`, also if a framed serializer is not ready yet."""
        if self.framed:
            raise cannot_encode(context, f"the serializer is not ready: await producer.prepare({context.stream!r})")
        return self.payload(value, context)


class ProtobufDeserializer(Generic[MessageT]):
    """Reads the output of `ProtobufSerializer`, and of other serializers with Protobuf and a registry."""

    def __init__(self, message: type[MessageT], *, framed: bool = True) -> None:
        """Make the deserializer. Raises `InvalidArgument`."""
        self._message = _checked(message)
        self.framed = framed

    def reader_of(self, schema: Schema) -> Deserializer[MessageT]:
        """See `FramedDeserializer`."""
        if schema.schema_type is not SchemaType.PROTOBUF:
            raise undecodable(f"schema {schema.schema_id} is of type {schema.schema_type}, not protobuf")
        file = _last_file(schema)
        wanted = self._message.DESCRIPTOR.full_name
        known: tuple[int, ...] | None = None

        def message_of(data: bytes, context: Context, /) -> MessageT:
            nonlocal known
            path, payload = split_message_path(data)
            found = wanted if path == known else _name_at(file, path)
            if found != wanted:
                what = f"message {found[-_SHOWN_CHARS:]}" if found else f"of no message of schema {schema.schema_id}"
                raise undecodable(f"it is {what}, and {wanted} is read")
            known = path
            return self._parsed(payload, context)

        return message_of

    def _parsed(self, data: bytes, _context: Context, /) -> MessageT:
        try:
            return self._message.FromString(data)
        except (DecodeError, ValueError, RecursionError) as error:
            raise undecodable(error) from error

    def __call__(self, data: bytes, context: Context, /) -> MessageT:
        """Return the message in `data`. Raises `CannotDecode`."""
        if self.framed:
            raise undecodable("the schema is not known; give the deserializer to a consumer")
        return self._parsed(data, context)


def _checked(message: type[MessageT]) -> type[MessageT]:
    given: Any = message
    if not isinstance(given, type) or not issubclass(given, Message):
        raise InvalidArgument(f"{message!r} is not the generated class of a Protobuf message")
    return message


def definition_of(message: Any) -> str:
    """Return the file of a message and its imports, each file after its own imports, in the registry's form."""
    files: dict[str, Any] = {}

    def add(file: Any) -> None:
        if file.name not in files:
            for imported in file.dependencies:
                add(imported)
            files[file.name] = file

    add(message.file)
    found = FileDescriptorSet()
    for file in files.values():
        file.CopyToProto(found.file.add())
    return base64.b64encode(found.SerializeToString(deterministic=True)).decode()


def path_of(message: Any) -> list[int]:
    """Return the path of a message within its file: the number of the outermost message, and so on inwards."""
    path = []
    while message is not None:
        outer = message.containing_type
        siblings = message.file.message_types_by_name.values() if outer is None else outer.nested_types
        path.append(next(number for number, each in enumerate(siblings) if each.full_name == message.full_name))
        message = outer
    return path[::-1]


def _name_at(file: FileDescriptorProto, path: tuple[int, ...]) -> str:
    """Return the full name of the message at `path`; empty: the path leads to no message.

    The name is made on demand: the names of all messages in a hostile file could be far larger than the file.
    """
    messages, names = file.message_type, [file.package] if file.package else []
    for number in path:
        if number >= len(messages):
            return ""
        names.append(messages[number].name)
        messages = messages[number].nested_type
    return ".".join(names)


def _last_file(schema: Schema) -> FileDescriptorProto:
    try:
        files = FileDescriptorSet.FromString(base64.b64decode(schema.definition)).file
    except (DecodeError, ValueError) as error:
        raise undecodable(f"schema {schema.schema_id} is not valid Protobuf: {error}") from error
    if not files:
        raise undecodable(f"schema {schema.schema_id} has no file")
    return files[-1]
