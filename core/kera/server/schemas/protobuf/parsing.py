"""Parses sets of file descriptors, as Protobuf compilers make them. Pure.

Our own code checks a set first, within bounds; then Protobuf itself has to accept it, as it will have to at readers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from google.protobuf.message import DecodeError

from kera.core.errors import InvalidSchema

PARTS_MAX = 20_000
"""Maximum of messages, fields and values of enums together."""
DEPTH_MAX = 32
"""Maximum depth of nested messages."""
FILES_MAX = 500
NUMBER_MAX = (1 << 29) - 1
_RESERVED = range(19_000, 20_000)
"""Field numbers that Protobuf reserves for itself."""
_OF_TYPES = {
    FieldDescriptorProto.TYPE_MESSAGE: "message",
    FieldDescriptorProto.TYPE_GROUP: "message",
    FieldDescriptorProto.TYPE_ENUM: "enum",
}


@dataclass(slots=True, eq=False)
class ProtoField:
    """A field of a message."""

    name: str
    number: int
    kind: int
    """The type, a value of `FieldDescriptorProto.Type`."""
    type_name: str
    """Full name of the field's message or enum; empty for other types."""
    repeated: bool
    required: bool
    oneof: str
    """Name of the oneof that contains it; empty: none."""
    default: str

    @property
    def word(self) -> str:
        """Its type, for people."""
        kind = FieldDescriptorProto.Type.Name(self.kind).removeprefix("TYPE_").lower()  # type: ignore[arg-type]
        said = f"{kind} {self.type_name}" if self.type_name else kind
        return f"repeated {said}" if self.repeated else said


@dataclass(slots=True, eq=False)
class ProtoMessage:
    """A message, with its fields by number."""

    name: str
    fields: Mapping[int, ProtoField]
    reserved: tuple[tuple[int, int], ...]
    """Ranges of reserved numbers: the first, and the one behind the last."""
    reserved_names: frozenset[str]


@dataclass(slots=True, eq=False)
class ProtoEnum:
    """An enum, with its names by number."""

    name: str
    values: Mapping[int, tuple[str, ...]]
    closed: bool
    """Whether other numbers are invalid (proto2)."""


@dataclass(slots=True, eq=False)
class ProtoSchema:
    """A parsed definition."""

    root: ProtoMessage
    messages: Mapping[str, ProtoMessage]
    enums: Mapping[str, ProtoEnum]


def parsed_protobuf(definition: str, message: str) -> ProtoSchema:
    """Parse the schema in `definition`, for values of type `message`. Raises `InvalidSchema`."""
    try:
        data = base64.b64decode(definition, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidSchema(
            f"the definition of a Protobuf schema is a serialized FileDescriptorSet in base64: {error}"
        ) from None
    try:
        files = FileDescriptorSet.FromString(data).file
    except DecodeError:
        raise InvalidSchema("the definition is not a FileDescriptorSet") from None
    if not 0 < len(files) <= FILES_MAX:
        raise InvalidSchema(f"a FileDescriptorSet has 1 to {FILES_MAX} files, not {len(files)}")
    schema = _Parser().schema(files, message)
    _check_with_protobuf(files)
    return schema


class _Parser:
    def __init__(self) -> None:
        self._left = PARTS_MAX
        self._messages: dict[str, tuple[DescriptorProto, FileDescriptorProto]] = {}
        self._enums: dict[str, ProtoEnum] = {}

    def schema(self, files: Iterable[FileDescriptorProto], message: str) -> ProtoSchema:
        known: set[str] = set()
        last = FileDescriptorProto()
        for last in files:
            if last.syntax not in {"", "proto2", "proto3"}:
                raise InvalidSchema(f"file {last.name}: syntax {last.syntax!r} is not supported: use proto2 or proto3")
            missing = next((name for name in last.dependency if name not in known), None)
            if missing is not None:
                raise InvalidSchema(f"file {last.name} imports {missing}, which has to come before it in the set")
            if last.name in known:
                raise InvalidSchema(f"file {last.name} is there twice")
            known.add(last.name)
            self._collect(last)
        if not message:
            if not last.message_type:
                raise InvalidSchema(f"the last file, {last.name}, has no message")
            message = _full(last.package, last.message_type[0].name)
        messages = {name: self._message(name, one, file) for name, (one, file) in self._messages.items()}
        if message not in messages:
            raise InvalidSchema(f"there is no message {message} in the set", message=message)
        return ProtoSchema(messages[message], messages, self._enums)

    def _collect(self, file: FileDescriptorProto) -> None:
        for enum in file.enum_type:
            self._enum(file.package, enum, file)
        todo = [(file.package, each, 1) for each in file.message_type]
        while todo:
            package, message, depth = todo.pop()
            self._count(1 + len(message.field))
            name = _full(package, message.name)
            if depth > DEPTH_MAX:
                raise InvalidSchema(f"messages are nested deeper than {DEPTH_MAX} levels", limit=DEPTH_MAX)
            self._check_new(name)
            self._messages[name] = (message, file)
            for enum in message.enum_type:
                self._enum(name, enum, file)
            todo += [(name, each, depth + 1) for each in message.nested_type]

    def _enum(self, package: str, enum: EnumDescriptorProto, file: FileDescriptorProto) -> None:
        self._count(1 + len(enum.value))
        name = _full(package, enum.name)
        self._check_new(name)
        values: dict[int, tuple[str, ...]] = {}
        for value in enum.value:
            values[value.number] = (*values.get(value.number, ()), value.name)
        self._enums[name] = ProtoEnum(name, values, closed=file.syntax != "proto3")

    def _message(self, name: str, message: DescriptorProto, file: FileDescriptorProto) -> ProtoMessage:
        fields: dict[int, ProtoField] = {}
        names: set[str] = set()
        for field in message.field:
            if not 0 < field.number <= NUMBER_MAX or field.number in _RESERVED:
                raise InvalidSchema(f"field {name}.{field.name}: {field.number} is not a valid field number")
            if field.number in fields or field.name in names:
                raise InvalidSchema(f"message {name} has two fields {field.name}, or two with number {field.number}")
            names.add(field.name)
            fields[field.number] = self._field(name, message, field, file)
        reserved = tuple((each.start, each.end) for each in message.reserved_range)
        self._count(len(reserved) + len(message.reserved_name))
        return ProtoMessage(name, fields, reserved, frozenset(message.reserved_name))

    def _field(
        self, name: str, message: DescriptorProto, field: FieldDescriptorProto, file: FileDescriptorProto
    ) -> ProtoField:
        if not field.HasField("type"):  # an unknown type counts as missing, too
            raise InvalidSchema(f"field {name}.{field.name}: its type is missing")
        of = _OF_TYPES.get(field.type)
        type_name = field.type_name.removeprefix(".")
        if of and type_name not in (self._messages if of == "message" else self._enums):
            raise InvalidSchema(f"field {name}.{field.name}: there is no {of} {type_name} in the set")
        oneof = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            if not 0 <= field.oneof_index < len(message.oneof_decl):
                raise InvalidSchema(f"field {name}.{field.name} is in a oneof that is not there")
            oneof = message.oneof_decl[field.oneof_index].name
        return ProtoField(
            name=field.name,
            number=field.number,
            kind=field.type,
            type_name=type_name if of else "",
            repeated=field.label == FieldDescriptorProto.LABEL_REPEATED,
            required=field.label == FieldDescriptorProto.LABEL_REQUIRED,
            oneof=oneof,
            default="" if file.syntax == "proto3" else field.default_value,
        )

    def _check_new(self, name: str) -> None:
        if name in self._messages or name in self._enums:
            raise InvalidSchema(f"{name} is there twice")

    def _count(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise InvalidSchema(f"the set has more than {PARTS_MAX} messages, fields and values", limit=PARTS_MAX)


def _check_with_protobuf(files: Iterable[FileDescriptorProto]) -> None:
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        try:
            pool.AddSerializedFile(file.SerializeToString())
        except (TypeError, ValueError, DecodeError) as error:
            raise InvalidSchema(f"file {file.name} is not valid Protobuf: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines: Iterator[str] = iter(str(error).splitlines() or [""])
    return next(lines)[:300]


def _full(package: str, name: str) -> str:
    return f"{package}.{name}" if package else name
