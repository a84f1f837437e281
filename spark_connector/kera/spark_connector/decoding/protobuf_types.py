"""The type of a column for a Protobuf message, and messages as its values.

An absent field with presence (a message, an optional field, a part of a oneof) is null, unless the schema gives it a
default; an absent field without presence has its default. Enumerations become the names of their values, or the number
as text if it has no name.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kera.core.errors import InvalidArgument
from kera.spark_connector.decoding.types import Fields, refused

_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT32: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    FieldDescriptor.CPPTYPE_ENUM: pa.string(),
}


@functools.lru_cache(maxsize=64)
def message_class(definition: str, message: str) -> type[Message]:
    """Return the class of a registered message, in its own pool. Raises `InvalidArgument`."""
    try:
        files = FileDescriptorSet.FromString(base64.b64decode(definition)).file
        pool = DescriptorPool()
        for file in files:
            pool.Add(file)
        if not message:
            package, first = files[-1].package, files[-1].message_type[0].name
            message = f"{package}.{first}" if package else first
        return GetMessageClass(pool.FindMessageTypeByName(message))
    except (DecodeError, ValueError, TypeError, KeyError, IndexError) as error:
        raise InvalidArgument(f"this is not a valid Protobuf schema: {error}") from error


def arrow_type_of(message: type[Message]) -> pa.DataType:
    """Return the type of a message class. Raises `InvalidArgument` with the path of a part without a column type."""
    return _of_message(message.DESCRIPTOR, Fields(), "", ())


def _of_message(descriptor: Any, fields: Fields, path: str, within: tuple[str, ...]) -> pa.DataType:
    if descriptor.full_name in within:
        raise refused(path, f"{descriptor.full_name} contains itself")
    inner = (*within, descriptor.full_name)
    if not descriptor.fields:
        raise refused(path, f"{descriptor.full_name} has no fields")
    return pa.struct(
        [
            pa.field(each.name, _of_field(each, fields, f"{path}.{each.name}" if path else each.name, inner))
            for each in descriptor.fields
        ]
    )


def _of_field(field: Any, fields: Fields, path: str, within: tuple[str, ...]) -> pa.DataType:
    if _is_map(field):
        names, values = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return pa.map_(_of_one(names, fields, path, within), _of_one(values, fields, path, within))
    kind = _of_one(field, fields, path, within)
    return pa.list_(kind) if _is_repeated(field) else kind


def _of_one(field: Any, fields: Fields, path: str, within: tuple[str, ...]) -> pa.DataType:
    fields.take(path, len(within))
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return _of_message(field.message_type, fields, path, within)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else pa.string()
    return _KINDS[field.cpp_type]


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def value_of(message: Any) -> dict[str, Any]:
    """Return a message as a value that `pa.array` takes for `arrow_type_of`."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        held = getattr(message, field.name)
        one = _reader_of(field)
        if _is_map(field):
            entry = field.message_type.fields_by_name
            name_of, each_of = _reader_of(entry["key"]), _reader_of(entry["value"])
            found[field.name] = [(name_of(name), each_of(held[name])) for name in held]
        elif _is_repeated(field):
            found[field.name] = [one(each) for each in held]
        elif field.has_presence and not message.HasField(field.name) and not field.has_default_value:
            found[field.name] = None
        else:
            found[field.name] = one(held)
    return found


def _reader_of(field: Any) -> Callable[[Any], Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return value_of
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        names = field.enum_type.values_by_number
        return lambda number: names[number].name if number in names else str(number)
    return Decimal if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64 else _as_it_is


def _as_it_is(value: Any) -> Any:
    return value
