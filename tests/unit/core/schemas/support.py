"""Short forms of definitions, and the incompatibilities of two definitions."""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from kera.core.schemas import Compatibility, SchemaType
from kera.server.schemas.compatibility import Definition, Version, incompatibilities

BACKWARD_END = ": it cannot read version 1"
FORWARD_END = ": readers of version 1 cannot read it"


def avro(schema: Any) -> Definition:
    return Definition(SchemaType.AVRO, json.dumps(schema))


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    """A record; each field is a name and a type, and perhaps a default."""
    described = [{"name": each[0], "type": each[1], **({"default": each[2]} if each[2:] else {})} for each in fields]
    return {"type": "record", "name": name, "fields": described, **more}


def json_schema(schema: Any) -> Definition:
    return Definition(SchemaType.JSON, json.dumps(schema))


def protobuf(*messages: DescriptorProto, syntax: str = "proto3", message: str = "", **fields: Any) -> Definition:
    file = FileDescriptorProto(name="a.proto", syntax=syntax, message_type=messages, **fields)
    return of_files(file, message=message)


def of_files(*files: FileDescriptorProto, message: str = "") -> Definition:
    data = FileDescriptorSet(file=files).SerializeToString()
    return Definition(SchemaType.PROTOBUF, base64.b64encode(data).decode(), message)


def arrow(schema: pa.Schema) -> Definition:
    return Definition(SchemaType.ARROW, base64.b64encode(schema.serialize().to_pybytes()).decode())


def backward(old: Definition, new: Definition) -> list[str]:
    """Why the new definition cannot read data of the old one."""
    return _said(old, new, Compatibility.BACKWARD, BACKWARD_END)


def forward(old: Definition, new: Definition) -> list[str]:
    """Why readers of the old definition cannot read data of the new one."""
    return _said(old, new, Compatibility.FORWARD, FORWARD_END)


def _said(old: Definition, new: Definition, mode: Compatibility, end: str) -> list[str]:
    found = incompatibilities(new, [Version(1, old)], mode)
    assert all(each.endswith(end) or each == "and more" for each in found)
    return [each.removesuffix(end) for each in found]
