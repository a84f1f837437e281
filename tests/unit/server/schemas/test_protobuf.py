"""Sets of file descriptors: valid ones, and which messages can read values of another."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from kera.core.errors import InvalidSchema
from kera.core.schemas import SchemaType
from kera.server.schemas.compatibility import Definition
from kera.server.schemas.protobuf.parsing import DEPTH_MAX, FILES_MAX
from kera.v1 import coordinator_pb2
from tests.unit.core.schemas.support import backward, forward, of_files, protobuf

LABELS = {"optional": 1, "required": 2, "repeated": 3}


def field(
    number: int, name: str, kind: str = "int32", label: str = "optional", oneof: int | None = None, default: str = ""
) -> FieldDescriptorProto:
    """A field of a scalar type, of a message (``.M``) or of an enum (``!E``)."""
    made = FieldDescriptorProto(name=name, number=number, label=LABELS[label])  # type: ignore[arg-type]
    if kind[0] in ".!":
        made.type = FieldDescriptorProto.TYPE_MESSAGE if kind[0] == "." else FieldDescriptorProto.TYPE_ENUM
        made.type_name = f".{kind[1:]}"
    else:
        made.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    if oneof is not None:
        made.oneof_index = oneof
    if default:
        made.default_value = default
    return made


def message(*fields: FieldDescriptorProto, name: str = "M", oneofs: tuple[str, ...] = ()) -> DescriptorProto:
    made = DescriptorProto(name=name, field=fields)
    for oneof in oneofs:
        made.oneof_decl.add(name=oneof)
    return made


def enum(**values: int) -> EnumDescriptorProto:
    made = EnumDescriptorProto(name="E")
    for name, number in values.items():
        made.value.add(name=name, number=number)
    return made


def of(*fields: FieldDescriptorProto, **more: Any) -> Definition:
    return protobuf(message(*fields), **more)


def reserving(*fields: FieldDescriptorProto, number: int = 0, name: str = "") -> Definition:
    made = message(*fields)
    if number:
        made.reserved_range.add(start=number, end=number + 1)
    if name:
        made.reserved_name.append(name)
    return protobuf(made)


def file_of(module: Any) -> FileDescriptorProto:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


def test_sets_of_files_by_compilers_are_accepted() -> None:
    imported = []
    for each in coordinator_pb2.DESCRIPTOR.dependencies:
        imported.append(FileDescriptorProto())
        each.CopyToProto(imported[-1])
    of_files(*imported, file_of(coordinator_pb2)).parsed()
    parsed = of_files(
        file_of(timestamp_pb2),
        FileDescriptorProto(
            name="a.proto",
            package="shop.v1",
            syntax="proto3",
            dependency=["google/protobuf/timestamp.proto"],
            message_type=[message(field(1, "at", ".google.protobuf.Timestamp")), message(name="Other")],
        ),
        message="shop.v1.Other",
    ).parsed()
    assert parsed.root.name == "shop.v1.Other"


def test_the_default_message_is_the_first_of_the_last_file() -> None:
    assert protobuf(message(name="First"), message(name="Second")).parsed().root.name == "First"


def bad_enum(syntax: str) -> Definition:
    return protobuf(message(field(1, "a", "!E")), enum_type=[enum(A=1)], syntax=syntax)


def nested(levels: int) -> DescriptorProto:
    made = DescriptorProto(name="N")
    for _ in range(levels - 1):
        made = DescriptorProto(name="N", nested_type=[made])
    return made


BAD: list[tuple[Callable[[], Definition], str]] = [
    (lambda: Definition(SchemaType.PROTOBUF, "!!"), "in base64"),
    (lambda: Definition(SchemaType.PROTOBUF, base64.b64encode(b"\xff" * 9).decode()), "not a FileDescriptorSet"),
    (lambda: Definition(SchemaType.PROTOBUF, base64.b64encode(b"\x1b" * 99_999).decode()), "not a FileDescriptorSet"),
    (lambda: Definition(SchemaType.PROTOBUF, base64.b64encode(b"\x12\x00").decode()), "has 1 to 500 files, not 0"),
    (lambda: of_files(*[FileDescriptorProto(name="a")] * (FILES_MAX + 1)), "has 1 to 500 files"),
    (protobuf, "the last file, a.proto, has no message"),
    (lambda: protobuf(message(), message="a.Nope"), "there is no message a.Nope"),
    (lambda: protobuf(message(), message()), "M is there twice"),
    (lambda: protobuf(message(name="E"), enum_type=[enum(A=0)]), "E is there twice"),
    (lambda: protobuf(message(), syntax="editions"), "syntax 'editions' is not supported"),
    (lambda: protobuf(message(), dependency=["b.proto"]), "imports b.proto, which has to come before"),
    (lambda: of_files(*[FileDescriptorProto(name="a", syntax="proto3")] * 2), "file a is there twice"),
    (lambda: of(field(0, "a")), "0 is not a valid field number"),
    (lambda: of(field(19_500, "a")), "19500 is not a valid field number"),
    (lambda: of(field(1 << 29, "a")), "is not a valid field number"),
    (lambda: of(field(1, "a"), field(1, "b")), "two fields b, or two with number 1"),
    (lambda: of(field(1, "a"), field(2, "a")), "two fields a, or two with number 2"),
    (lambda: of(field(1, "a", ".Nope")), "there is no message Nope in the set"),
    (lambda: of(field(1, "a", "!M")), "there is no enum M in the set"),
    (lambda: of(field(1, "a", oneof=3)), "in a oneof that is not there"),
    (lambda: of(FieldDescriptorProto(name="a", number=1)), "field M.a: its type is missing"),
    (lambda: bad_enum("proto3"), "not valid Protobuf"),
    (lambda: of(field(1, "a b")), "not valid Protobuf"),
    (lambda: protobuf(nested(DEPTH_MAX + 1)), "nested deeper than 32"),
    (lambda: protobuf(*(message(name=f"M{n}") for n in range(20_001))), "more than 20000 messages"),
]


@pytest.mark.parametrize(("make", "said"), BAD, ids=[said for _, said in BAD])
def test_an_invalid_set_is_refused(make: Callable[[], Definition], said: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        make().parsed()
    assert said in caught.value.message


COMPATIBLE = [
    (of(), of(field(1, "a"))),
    (of(field(1, "a"), field(2, "b")), of(field(1, "a"))),
    (of(field(1, "old")), of(field(1, "new"))),
    (of(field(1, "a")), of(field(1, "a", "int64"))),
    (of(field(1, "a", "uint32")), of(field(1, "a", "uint64"))),
    (of(field(1, "a", "uint32")), of(field(1, "a", "int64"))),
    (of(field(1, "a", "bool")), of(field(1, "a", "int32"))),
    (of(field(1, "a", "sint32")), of(field(1, "a", "sint64"))),
    (of(field(1, "a", "string")), of(field(1, "a", "bytes"))),
    (of(field(1, "a")), of(field(1, "a", label="repeated"))),
    (of(field(1, "a", label="required"), syntax="proto2"), of(field(1, "a"), syntax="proto2")),
    (protobuf(message(name="Old")), protobuf(message(name="New"))),
    (
        protobuf(message(field(1, "a", "!E")), enum_type=[enum(A=0, B=1)]),
        protobuf(message(field(1, "a", "!E")), enum_type=[enum(A=0)]),
    ),
    (protobuf(message(field(1, "a", "!E")), enum_type=[enum(A=0)]), of(field(1, "a", "int32"))),
    (of(field(1, "a")), protobuf(message(field(1, "a", oneof=0), field(2, "b", oneof=0), oneofs=("o",)))),
    (
        protobuf(message(field(1, "a", oneof=0), field(2, "b", oneof=0), oneofs=("o",))),
        of(field(1, "a"), field(2, "b")),
    ),
    (of(field(1, "next", ".M")), of(field(1, "next", ".M"), field(2, "value"))),
]


@pytest.mark.parametrize(("writer", "reader"), COMPATIBLE)
def test_messages_that_can_read_another_are_compatible(writer: Definition, reader: Definition) -> None:
    assert backward(writer, reader) == []
    assert forward(reader, writer) == []


INNER = message(field(1, "zip", "string"), name="A")
DIFFERENT = [
    (of(field(1, "a", "int64")), of(field(1, "a")), ["field a: int32, was int64"]),
    (of(field(1, "a")), of(field(1, "a", "uint32")), ["field a: uint32, was int32"]),
    (of(field(1, "a")), of(field(1, "a", "string")), ["field a: string, was int32"]),
    (of(field(1, "a", "bytes")), of(field(1, "a", "string")), ["field a: string, was bytes"]),
    (of(field(1, "a", "fixed32")), of(field(1, "a", "sfixed32")), ["field a: sfixed32, was fixed32"]),
    (of(field(1, "a", label="repeated")), of(field(1, "a")), ["field a: int32, was repeated int32"]),
    (of(field(1, "a")), of(field(2, "a")), ["field a: number 2, was number 1"]),
    (
        of(field(1, "a"), syntax="proto2"),
        of(field(1, "a", label="required"), syntax="proto2"),
        ["field a: required, was optional"],
    ),
    (of(syntax="proto2"), of(field(1, "a", label="required"), syntax="proto2"), ["field a: is new, and required"]),
    (
        of(field(1, "a", default="1"), syntax="proto2"),
        of(field(1, "a", default="2"), syntax="proto2"),
        ["field a: default '2', was default '1'"],
    ),
    (
        protobuf(message(field(1, "address", ".A")), INNER),
        protobuf(message(field(1, "address", ".A")), message(field(1, "zip"), name="A")),
        ["field address.zip: int32, was string"],
    ),
    (
        protobuf(message(field(1, "a", ".A")), INNER),
        protobuf(message(field(1, "a", "bytes")), INNER),
        ["field a: bytes, was message A"],
    ),
    (
        protobuf(message(field(1, "a", "!E")), enum_type=[enum(A=0, B=1)], syntax="proto2"),
        protobuf(message(field(1, "a", "!E")), enum_type=[enum(A=0)], syntax="proto2"),
        ["field a: enum E has no longer B"],
    ),
    (
        protobuf(message(field(1, "a", "!E")), enum_type=[enum(A=0, B=1)]),
        protobuf(message(field(1, "a", "!E")), enum_type=[enum(A=0, C=1)]),
        ["field a: 1 is C, was 1 is B"],
    ),
    (
        of(field(1, "a"), field(2, "b")),
        protobuf(message(field(1, "a", oneof=0), field(2, "b", oneof=0), oneofs=("o",))),
        ["the schema: a, b are in oneof o now, so that only one of them counts"],
    ),
    (reserving(number=4), of(field(4, "a")), ["field a: its number 4 was reserved"]),
    (reserving(name="a"), of(field(4, "a")), ["field a: its name was reserved"]),
    (
        of(field(1, "next", ".M"), field(2, "v", "int64")),
        of(field(1, "next", ".M"), field(2, "v")),
        ["field v: int32, was int64"],
    ),
]


@pytest.mark.parametrize(("old", "new", "said"), DIFFERENT)
def test_incompatible_changes_are_named_by_field_and_reason(old: Definition, new: Definition, said: list[str]) -> None:
    assert backward(old, new) == said


def test_a_field_may_be_removed_by_reserving_it() -> None:
    assert backward(of(field(4, "a")), reserving(number=4, name="a")) == []


def test_changes_that_earlier_readers_cannot_read_are_named() -> None:
    required = of(field(1, "a", label="required"), syntax="proto2")
    assert forward(required, of(syntax="proto2")) == ["field a: is gone, and was required"]
    assert forward(reserving(number=4), of(field(4, "a"))) == ["field a: its number 4 was reserved"]
    one_of = protobuf(message(field(1, "a", oneof=0), field(2, "b", oneof=0), oneofs=("o",)))
    assert forward(one_of, of(field(1, "a"), field(2, "b"))) == [
        "the schema: a, b were in oneof o, so that only one of them counts"
    ]


def test_optional_fields_of_proto3_are_not_a_oneof() -> None:
    optional = [field(1, "a", oneof=0), field(2, "b", oneof=1)]
    for each in optional:
        each.proto3_optional = True
    new = protobuf(message(*optional, oneofs=("_a", "_b")))
    assert backward(of(field(1, "a"), field(2, "b")), new) == []
