"""Values with a registered schema: decoding, and values that only appear to have a schema."""

import base64
import io
import json
from typing import Any

import fastavro
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from hypothesis import given
from hypothesis import strategies as st

from kera.client import RegisteredSchema
from kera.console.browsing.registered import ASKED_MAX, UNKNOWN_S, Registered, readable
from kera.core.errors import NotAllowed, UnknownSchema
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import frame, message_path_to_bytes

AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "who", "type": "string"}],
}
ORDER = {"id": 7, "who": "<b>ada</b>"}


def registered(schema_id: int, schema_type: SchemaType, definition: str) -> RegisteredSchema:
    return RegisteredSchema("orders-value", schema_id, schema_id, schema_type, definition)


def descriptors() -> str:
    """The descriptors of google/protobuf/descriptor.proto itself, which has nested messages."""
    file = FileDescriptorProto()
    DescriptorProto.DESCRIPTOR.file.CopyToProto(file)
    return base64.b64encode(FileDescriptorSet(file=[file]).SerializeToString()).decode()


def avro(value: Any) -> bytes:
    written = io.BytesIO()
    fastavro.schemaless_writer(written, fastavro.parse_schema(AVRO), value)
    return written.getvalue()


class Registry:
    """A registry with some schemas that notes the requested ids."""

    def __init__(self, *schemas: RegisteredSchema, error: Exception | None = None) -> None:
        self.schemas = {each.schema_id: each for each in schemas}
        self.asked: list[int] = []
        self.error = error

    async def by_id(self, schema_id: int) -> RegisteredSchema:
        self.asked.append(schema_id)
        if self.error is not None:
            raise self.error
        if schema_id not in self.schemas:
            raise UnknownSchema(f"no schema has the id {schema_id}")
        return self.schemas[schema_id]


ALL = (
    registered(1, SchemaType.AVRO, json.dumps(AVRO)),
    registered(2, SchemaType.JSON, '{"type": "object"}'),
    registered(3, SchemaType.PROTOBUF, descriptors()),
    registered(4, SchemaType.PROTOBUF, "bm9uZQ=="),
    registered(5, SchemaType.AVRO, "{"),
    registered(6, SchemaType.ARROW, ""),
)
MESSAGE_NUMBER = list(DescriptorProto.DESCRIPTOR.file.message_types_by_name).index("DescriptorProto")
PROTOBUF = message_path_to_bytes([MESSAGE_NUMBER]) + DescriptorProto(name="<b>name</b>").SerializeToString()


async def a_reader(*values: bytes | None, error: Exception | None = None) -> tuple[Registered, Registry]:
    registry = Registry(*ALL, error=error)
    reader = Registered(registry)  # type: ignore[arg-type]
    await reader.look_up(values)
    return reader, registry


@pytest.mark.parametrize(
    ("value", "kind", "document"),
    [
        (frame(1, avro(ORDER)), "avro", ORDER),
        (frame(2, b'{"a": "\xc3\xbc"}'), "json", {"a": "ü"}),
        (frame(3, PROTOBUF), "protobuf", {"name": "<b>name</b>"}),
    ],
)
async def test_a_value_is_decoded_with_its_schema(value: bytes, kind: str, document: object) -> None:
    reader, _ = await a_reader(value)
    found = reader.shown(value, 1000)
    assert found is not None
    assert (found.kind, json.loads(found.text), found.size_bytes) == (kind, document, len(value))
    schema = reader.schema_of(value)
    assert schema is not None
    assert schema.schema_type == kind


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"\x00",
        b"plain",
        frame(99, b"nobody knows the schema"),
        frame(1, avro(ORDER) + b"behind"),
        frame(1, b""),
        frame(2, b"not json"),
        frame(2, b"[" * 50_000),
        frame(3, b"\x02\x7e\x00"),
        frame(3, message_path_to_bytes([MESSAGE_NUMBER, 99]) + b""),
        frame(3, message_path_to_bytes([MESSAGE_NUMBER]) + b"\xff\xff"),
        frame(4, b"x"),
        frame(5, b"x"),
        frame(6, b"x"),
    ],
)
async def test_a_value_that_does_not_fit_its_schema_is_not_decoded(value: bytes | None) -> None:
    reader, _ = await a_reader(value)
    assert reader.shown(value, 1000) is None


@given(st.sampled_from([each.schema_id for each in ALL]), st.binary(max_size=60))
async def test_any_bytes_after_a_schema_id_are_shown_in_bounds_or_not_decoded(schema_id: int, payload: bytes) -> None:
    value = frame(schema_id, payload)
    reader, _ = await a_reader(value)
    found = reader.shown(value, 100)
    assert found is None or len(found.text) <= 100


async def test_schemas_are_requested_once_and_up_to_a_limit_per_page() -> None:
    values = [frame(number, b"x") for number in range(100, 200)]
    reader, registry = await a_reader(*values, *values)
    assert len(registry.asked) == ASKED_MAX
    await reader.look_up(values[:ASKED_MAX])
    assert len(registry.asked) == ASKED_MAX


async def test_an_unknown_schema_is_requested_again_after_a_while() -> None:
    now_s = 0.0
    registry = Registry()
    reader = Registered(registry, now_s=lambda: now_s)  # type: ignore[arg-type]
    value = frame(1, avro(ORDER))
    await reader.look_up([value])
    registry.schemas[1] = ALL[0]
    now_s = UNKNOWN_S - 1
    await reader.look_up([value])
    assert (registry.asked, reader.schema_of(value)) == ([1], None)
    now_s = UNKNOWN_S
    await reader.look_up([value])
    assert (registry.asked, reader.schema_of(value)) == ([1, 1], ALL[0])


async def test_unusable_schemas_do_not_block_the_decoding_of_other_values() -> None:
    values = [frame(4, b"x"), frame(5, b"x"), frame(6, b"x"), frame(7, b"x"), frame(8, avro(ORDER))]
    nothing = {"type": "record", "name": "N", "fields": [{"name": f"n{at}", "type": "null"} for at in range(200)]}
    schemas = registered(7, SchemaType.AVRO, json.dumps(nothing)), registered(8, SchemaType.AVRO, json.dumps(AVRO))
    registry = Registry(*ALL, *schemas)
    reader = Registered(registry)  # type: ignore[arg-type]
    for _ in range(2):
        await reader.look_up(values)
    assert registry.asked == [4, 5, 6, 7, 8]
    assert reader.shown(values[-1], 1000) is not None


async def test_a_value_with_a_forbidden_schema_is_not_decoded() -> None:
    value = frame(1, avro(ORDER))
    reader, registry = await a_reader(value, error=NotAllowed("no"))
    assert reader.shown(value, 100) is None
    assert registry.asked == [1]


def test_definitions_of_all_types_are_shown_as_text() -> None:
    assert '"name": "Order"' in readable(ALL[0])
    assert "DescriptorProto" in readable(ALL[2])
    assert [readable(ALL[at]) for at in (4, 5)] == ["{", ""]
