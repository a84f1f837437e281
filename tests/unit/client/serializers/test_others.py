"""Serializers of msgpack, models, Protobuf and plain values, and types that choose a serializer."""

import base64
import dataclasses
import datetime
import enum
import sys
import uuid
from decimal import Decimal
from typing import Any

import pydantic
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from kera.client.schemas.registry import RegisteredSchema
from kera.client.serializers import (
    BytesDeserializer,
    BytesSerializer,
    Context,
    IntDeserializer,
    IntSerializer,
    ModelDeserializer,
    ModelSerializer,
    MsgpackDeserializer,
    MsgpackSerializer,
    NoneDeserializer,
    NoneSerializer,
    ProtobufDeserializer,
    ProtobufSerializer,
    StrDeserializer,
    StrSerializer,
    deserializer_of,
    serializer_of,
)
from kera.client.serializers.protobuf import path_of
from kera.client.serializers.refusing import library
from kera.core.errors import CannotDecode, CannotEncode, InvalidArgument, NotFramed
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import frame, message_path_to_bytes, unframe
from kera.v1 import broker_pb2, common_pb2
from tests.unit.client.serializers.fake_registry import FakeRegistry
from tests.unit.client.serializers.support import CONTEXT, framed_round_trip, ready

NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)


CODE = uuid.UUID(int=7)


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Line:
    price: float
    blob: bytes = b""


@dataclasses.dataclass
class Order:
    number: int
    at: datetime.datetime = NOON
    cost: Decimal = Decimal("1.50")
    color: Color = Color.RED
    code: uuid.UUID = CODE
    lines: list[Line] = dataclasses.field(default_factory=list)


class Item(pydantic.BaseModel):
    number: int
    at: datetime.datetime = NOON
    lines: list[Line] = []


# --- msgpack ------------------------------------------------------------------------------------------------


def test_a_msgpack_value_reads_back_the_same() -> None:
    value = {"a": [1, None, b"\xff", "ä", {"b": 1.5}], "at": NOON}
    assert MsgpackDeserializer()(MsgpackSerializer()(value, CONTEXT), CONTEXT) == value


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({"a": [1, {"b": object()}]}, "a[1].b", "object"),
        ({"a": {1: 1}}, "a", "1 is not a name"),
        ({"a": datetime.datetime(2026, 1, 1)}, "a", "tzinfo"),  # noqa: DTZ001 - that is the point
        ({"a": 1 << 70}, "a", "out of range|too (big|large)"),
        ({"a": "\ud800"}, "a", "surrogates"),
        (itself(), "", "contains itself"),
    ],
)
def test_the_error_for_a_value_outside_msgpack_names_the_field(value: Any, field: str, words: str) -> None:
    with pytest.raises(CannotEncode, match=words) as caught:
        MsgpackSerializer()(value, CONTEXT)
    assert caught.value.attributes["field"] == field


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xc0\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 100_000,
        (b"\xdd" + (1 << 20).to_bytes(4, "big")) * 1_000 + b"\xc0" * (1 << 20),
        b"\x82\xa1a\x01\xa1a\x02",  # a duplicate name
        b"\x81\x01\x02",  # a number as a name
        b"\x81\x91\x01\x02",
        b"\xa1\xff",  # text that is not UTF-8
        b"\xc7\x0c\xff" + b"\xff" * 12,  # an impossible time
    ],
)
def test_malformed_msgpack_is_refused(data: bytes) -> None:
    with pytest.raises(CannotDecode):
        MsgpackDeserializer()(data, CONTEXT)


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        Order(1, lines=[Line(float("inf"), b"\xff\xfe")]),
        Item(number=1, lines=[Line(1.5)]),
    ],
)
async def test_a_model_reads_back_the_same(value: Any) -> None:
    kind = type(value)
    data = ModelSerializer(kind)(value, CONTEXT)
    assert ModelDeserializer(kind)(data, CONTEXT) == value
    registry = FakeRegistry()
    framed = (await ready(ModelSerializer(kind, framed=True), registry))(value, CONTEXT)
    assert unframe(framed) == (1, data)
    assert registry.schemas[0].schema_type is SchemaType.JSON
    assert ModelDeserializer(kind)(framed, CONTEXT) == value


def test_a_pydantic_config_of_a_dataclass_is_applied() -> None:
    @dataclasses.dataclass
    class Hexed:
        blob: bytes

        __pydantic_config__ = pydantic.ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    data = ModelSerializer(Hexed)(Hexed(b"\xff"), CONTEXT)
    assert data == b'{"blob":"ff"}'
    assert ModelDeserializer(Hexed)(data, CONTEXT) == Hexed(b"\xff")


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        (Order("x"), "number", "Expected `int`"),  # type: ignore[arg-type]
        (Order(1, lines=[Line("x")]), "lines", "Expected `float`"),  # type: ignore[arg-type]
        (Order(1, at="soon"), "at", "Expected `datetime`"),  # type: ignore[arg-type]
        (Line(1.5), "", "it is Line, not Order"),
        ({"number": 1}, "", "it is dict"),
    ],
)
def test_the_error_for_an_instance_that_breaks_its_model_names_the_field(value: Any, field: str, words: str) -> None:
    with pytest.raises(CannotEncode, match=words) as caught:
        ModelSerializer(Order)(value, CONTEXT)
    assert caught.value.attributes["field"] == field


@pytest.mark.parametrize("kind", [Order, Item])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"number":"x"}',
        b"\xff",
        b"[" * 100_000,
        b'{"number":' + b"9" * 5_000 + b"}",
        b'{"number":1,"at":"99999-01-01"}',
    ],
)
def test_data_that_does_not_fit_the_model_is_refused(kind: Any, data: bytes) -> None:
    with pytest.raises(CannotDecode):
        ModelDeserializer(kind)(data, CONTEXT)


def test_an_exception_in_a_models_validator_makes_the_value_undecodable() -> None:
    class Strict(pydantic.BaseModel):
        number: int

        @pydantic.field_validator("number")
        @classmethod
        def checked(cls, number: int) -> int:
            return number // 0

    with pytest.raises(CannotDecode, match="ZeroDivisionError"):
        ModelDeserializer(Strict)(b'{"number":1}', CONTEXT)


def test_very_many_wrong_values_are_counted_and_not_listed() -> None:
    data = b'{"number":1,"lines":[' + b",".join([b"{}"] * 100_000) + b"]}"
    for kind in (Order, Item):
        with pytest.raises(CannotDecode, match="100000 values in it are not as"):
            ModelDeserializer(kind)(data, CONTEXT)


def test_an_instance_of_a_subclass_is_refused() -> None:
    @dataclasses.dataclass
    class Longer(Line):
        note: str = ""

    with pytest.raises(CannotEncode, match="it is Longer, not Line"):
        ModelSerializer(Line)(Longer(1.0), CONTEXT)


def test_a_class_that_is_not_a_model_is_refused() -> None:
    @dataclasses.dataclass
    class Odd:
        what: object
        where: "Nowhere"  # type: ignore[name-defined]  # noqa: F821 - that is the point

    for kind in (int, dict, Line(1.0), Odd):
        with pytest.raises(InvalidArgument):
            ModelSerializer(kind)  # type: ignore[arg-type]


# --- Protobuf -----------------------------------------------------------------------------------------------


async def test_a_message_is_read_with_the_schema_that_it_names() -> None:
    message = common_pb2.Cursor(stream_id=7)
    read = await framed_round_trip(
        ProtobufSerializer(common_pb2.Cursor), ProtobufDeserializer(common_pb2.Cursor), message
    )
    assert read == message


async def test_a_file_is_registered_after_its_imports() -> None:
    registry = FakeRegistry()
    await ready(ProtobufSerializer(broker_pb2.EntryInfo), registry)
    files = FileDescriptorSet.FromString(base64.b64decode(registry.schemas[0].definition)).file
    assert [each.name for each in files][-1] == "kera/v1/broker.proto"
    assert "kera/v1/common.proto" in [each.name for each in files]
    assert registry.schemas[0].message == "kera.v1.EntryInfo"


async def test_another_message_of_the_file_is_refused() -> None:
    with pytest.raises(CannotDecode, match=r"kera\.v1\.Cursor, and kera\.v1\.StreamConfig is read"):
        await framed_round_trip(
            ProtobufSerializer(common_pb2.Cursor),
            ProtobufDeserializer(common_pb2.StreamConfig),
            common_pb2.Cursor(),
        )


async def test_the_path_of_a_nested_message_is_found() -> None:
    nested = FileDescriptorSet.DESCRIPTOR.file.message_types_by_name["DescriptorProto"].nested_types[0]
    outer, inner = path_of(nested)
    assert FileDescriptorSet.DESCRIPTOR.file.message_types_by_name["DescriptorProto"].nested_types[inner] == nested
    assert list(FileDescriptorSet.DESCRIPTOR.file.message_types_by_name)[outer] == "DescriptorProto"


def test_a_hostile_file_of_many_messages_is_read_without_making_all_names() -> None:
    file = FileDescriptorProto(name="t.proto", package="p" * 100_000)
    outer = file.message_type.add(name="Outer")
    for number in range(10_000):
        outer.nested_type.add(name=f"M{number}")
    definition = base64.b64encode(FileDescriptorSet(file=[file]).SerializeToString()).decode()
    schema = RegisteredSchema("orders-value", 1, 1, SchemaType.PROTOBUF, definition)
    reader = ProtobufDeserializer(common_pb2.Cursor).reader_of(schema)
    for path in ([0, 7], [0], [1], [0, 10_000]):
        with pytest.raises(CannotDecode, match=r"kera\.v1\.Cursor is read"):
            reader(message_path_to_bytes(path), CONTEXT)


async def test_malformed_messages_and_definitions_are_refused() -> None:
    registry = FakeRegistry()
    serializer = await ready(ProtobufSerializer(common_pb2.Cursor), registry)
    _, payload = unframe(serializer(common_pb2.Cursor(stream_id=1), CONTEXT))
    reader = ProtobufDeserializer(common_pb2.Cursor).reader_of(registry.schemas[0])
    for bad in (b"", b"\x80", payload[:1] + b"\xff\xff", b"\x02\x7e" + payload, payload[:-1]):
        with pytest.raises(CannotDecode):
            reader(bad, CONTEXT)
    for definition in ("nonsense", "", base64.b64encode(b"\xff").decode()):
        registry.schemas[0] = dataclasses.replace(registry.schemas[0], definition=definition)
        with pytest.raises(CannotDecode, match="schema 1"):
            ProtobufDeserializer(common_pb2.Cursor).reader_of(registry.schemas[0])


def test_a_value_of_another_class_is_refused() -> None:
    serializer = ProtobufSerializer(common_pb2.Cursor, framed=False)
    for value in (common_pb2.StreamConfig(), b"", {"stream_id": 1}):
        with pytest.raises(CannotEncode, match=r"not kera\.v1\.Cursor"):
            serializer(value, CONTEXT)  # type: ignore[arg-type]
    no_classes: list[Any] = [int, common_pb2.Cursor()]
    for kind in no_classes:
        with pytest.raises(InvalidArgument):
            ProtobufSerializer(kind)


# --- plain --------------------------------------------------------------------------------------------------


def test_plain_values_read_back_the_same() -> None:
    assert BytesDeserializer()(BytesSerializer()(bytearray(b"\xff"), CONTEXT), CONTEXT) == b"\xff"
    assert StrDeserializer()(StrSerializer()("ä", CONTEXT), CONTEXT) == "ä"
    for number in (0, -1, (1 << 63) - 1, -(1 << 63)):
        assert IntDeserializer()(IntSerializer()(number, CONTEXT), CONTEXT) == number
    assert IntDeserializer()(b"\xff\xff\xff\xfe", CONTEXT) == -2
    assert NoneDeserializer()(b"anything", CONTEXT) is None


@pytest.mark.parametrize(
    ("serializer", "value"),
    [
        (BytesSerializer(), "text"),
        (StrSerializer(), b"bytes"),
        (StrSerializer(), "\ud800"),
        (IntSerializer(), 1.0),
        (IntSerializer(), True),
        (IntSerializer(), 1 << 63),
        (NoneSerializer(), b""),
    ],
)
def test_a_plain_value_of_another_type_is_refused(serializer: Any, value: Any) -> None:
    with pytest.raises(CannotEncode, match="'orders'"):
        serializer(value, CONTEXT)


@pytest.mark.parametrize(("deserializer", "data"), [(StrDeserializer(), b"\xff"), (IntDeserializer(), b"123")])
def test_malformed_plain_values_are_refused(deserializer: Any, data: bytes) -> None:
    with pytest.raises(CannotDecode):
        deserializer(data, CONTEXT)


# --- types, and libraries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value"),
    [(str, "a"), (int, 1), (bytes, b"a"), (Order, Order(1)), (Item, Item(number=1))],
)
def test_a_type_chooses_a_serializer_for_its_values(kind: Any, value: Any) -> None:
    assert deserializer_of(kind)(serializer_of(kind)(value, CONTEXT), CONTEXT) == value


def test_a_message_class_chooses_the_protobuf_serializer() -> None:
    assert isinstance(serializer_of(common_pb2.Cursor), ProtobufSerializer)
    assert isinstance(deserializer_of(common_pb2.Cursor), ProtobufDeserializer)


async def asynchronous(value: Any, _context: Context) -> Any:
    return value


@pytest.mark.parametrize("given", ["json", 7, dict, MsgpackSerializer, object(), asynchronous])
def test_an_object_that_does_not_serialize_is_refused(given: Any) -> None:
    for choose in (serializer_of, deserializer_of):
        with pytest.raises(InvalidArgument, match="takes a serializer such as") as caught:
            choose(given, "key_serializer")
        assert caught.value.attributes["field"] == "key_serializer"
        assert ("did you mean MsgpackSerializer()?" in caught.value.message) == (given is MsgpackSerializer)


def test_the_error_names_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(InvalidArgument, match=r"needs msgpack: pip install 'kera\[serializers\]'"):
        MsgpackSerializer()
    with pytest.raises(InvalidArgument, match="needs nothing_of_this_name"):
        library("nothing_of_this_name", "somebody")


def test_a_framed_model_is_read_and_a_truncated_frame_is_refused() -> None:
    assert ModelDeserializer(Line)(frame(1, b'{"price":1}'), CONTEXT) == Line(1.0)
    with pytest.raises(NotFramed):
        ModelDeserializer(Line)(b"\x00", CONTEXT)
