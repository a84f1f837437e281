"""The page that stores a record: stored values, errors beside their fields, and inputs that are kept."""

import base64
import json

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from kera.client import RegisteredSchema, SchemaType
from kera.client.serializers import Context, MsgpackDeserializer
from kera.client.testing import FakeCluster
from kera.console import limits
from kera.console.browsing import encoding
from kera.console.browsing.encoding import encode, reason_of
from kera.console.browsing.formats import Decoder
from kera.console.browsing.registered import Registered
from kera.core.errors import CannotDecode, CannotEncode, InvalidArgument
from tests.unit.console.browser import Answer, Browser
from tests.unit.console.conftest import MakeBrowser

AVRO = {"type": "record", "name": "Ride", "fields": [{"name": "who", "type": "string"}, {"name": "km", "type": "int"}]}
JSON_SCHEMA = {"type": "object", "properties": {"km": {"type": "integer"}}, "required": ["km"]}
PAGE = "/streams/s/produce"


def schema(schema_type: SchemaType, definition: object, message: str = "") -> RegisteredSchema:
    text = definition if isinstance(definition, str) else json.dumps(definition)
    return RegisteredSchema("s-value", 1, 7, schema_type, text, message=message)


def protobuf(message: str = "") -> RegisteredSchema:
    file = FileDescriptorProto()
    DescriptorProto.DESCRIPTOR.file.CopyToProto(file)
    definition = base64.b64encode(FileDescriptorSet(file=[file]).SerializeToString()).decode()
    return schema(SchemaType.PROTOBUF, definition, message)


class Registry:
    """A registry with one schema."""

    def __init__(self, one: RegisteredSchema) -> None:
        self.one = one

    async def by_id(self, _: int) -> RegisteredSchema:
        return self.one


async def store(browser: Browser, *headers: tuple[str, str], **fields: str) -> Answer:
    page = await browser.get(PAGE)
    pairs = [pair for name, value in headers for pair in (("header_name", name), ("header_value", value))]
    return await browser.post(PAGE, [("csrf", page.csrf), *fields.items(), *pairs])


@pytest.mark.parametrize(
    ("one", "document"),
    [
        (schema(SchemaType.AVRO, AVRO), {"who": "ada", "km": 3}),
        (schema(SchemaType.JSON, JSON_SCHEMA), {"km": 3}),
        (protobuf(), {"file": [{"name": "a.proto"}]}),
        (protobuf("google.protobuf.DescriptorProto.ExtensionRange"), {"start": 3, "end": 4}),
    ],
    ids=["avro", "json", "protobuf", "protobuf, nested"],
)
async def test_a_value_typed_for_a_schema_can_be_decoded_with_it(
    one: RegisteredSchema, document: dict[str, object]
) -> None:
    value = await encode("schema", json.dumps(document), one, "s")
    reader = Registered(Registry(one))  # type: ignore[arg-type]
    await reader.look_up([value])
    assert Decoder("schema", reader).document(value) == document


@pytest.mark.parametrize(
    ("kind", "text", "one", "reason"),
    [
        ("json", "", None, "is empty"),
        ("json", "{", None, "this is not JSON"),
        ("json", "[" * 100_000, None, "nested too deeply"),
        ("msgpack", "{'a': 1}", None, "this is not JSON"),
        ("null", "x", None, "a null value has no content"),
        ("schema", "{}", None, "no schema was chosen"),
        ("schema", '{"who": "ada", "km": "far"}', schema(SchemaType.AVRO, AVRO), "km"),
        ("schema", '{"km": "far"}', schema(SchemaType.JSON, JSON_SCHEMA), "km: 'far' is not of type 'integer'"),
        ("schema", '{"km": 1.5}', protobuf(), "does not fit message google.protobuf.FileDescriptorSet"),
        ("schema", "[]", protobuf(), "a JSON object"),
        ("schema", "{}", protobuf("no.Such"), "no message no.Such"),
        ("schema", "{}", schema(SchemaType.PROTOBUF, "bm9uZQ=="), "not a schema of Protobuf"),
        ("schema", "{}", schema(SchemaType.ARROW, ""), "not written by a schema of type arrow"),
    ],
)
async def test_a_value_that_does_not_fit_is_refused_with_a_reason(
    kind: str, text: str, one: RegisteredSchema | None, reason: str
) -> None:
    with pytest.raises((InvalidArgument, CannotEncode, CannotDecode)) as found:
        await encode(kind, text, one, "s")
    error = found.value
    assert isinstance(error, InvalidArgument | CannotEncode | CannotDecode)
    assert reason in reason_of(error)


async def test_a_schema_check_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "CHECK_TIMEOUT_S", 0.5)
    hostile = schema(SchemaType.JSON, {"pattern": "^(a+)+$"})
    with pytest.raises(InvalidArgument, match="takes too long"):
        await encode("schema", json.dumps("a" * 60 + "b"), hostile, "s")


async def test_json_is_stored_as_typed_and_msgpack_as_its_serializer_encodes_it() -> None:
    assert await encode("json", '{"a": 1.0e1 }', None, "s") == b'{"a": 1.0e1 }'
    packed = await encode("msgpack", '{"a": [1, null]}', None, "s")
    assert packed is not None
    assert MsgpackDeserializer()(packed, Context("s")) == {"a": [1, None]}


async def test_a_stored_record_has_its_headers_and_is_shown_at_its_offset(
    console: MakeBrowser, cluster: FakeCluster
) -> None:
    cluster.create_stream("s")
    browser = await console(admin=True)
    done = await store(browser, ("a", "1"), ("a", "2"), ("", ""), ("b", ""), key="k", value="line one\r\nline two")
    where = "/streams/s/record?streamlet=0&entry=0&offset=0&done=produced"
    assert (done.status, done.header("location")) == (303, where)
    assert cluster.stream("s").values() == [b"line one\nline two"]
    page = await browser.get(where)
    assert page.status == 200
    assert "The record is stored." in page.text
    assert page.text.count('<th scope="row">a</th>') == 2
    assert '<pre class="value text">k</pre>' in page.text


async def test_a_tombstone_is_stored(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    browser = await console(admin=True)
    assert (await store(browser, key="k", **{"as": "null"})).status == 303
    assert (await store(browser, key="k", value="", **{"as": "text"})).status == 303
    assert cluster.stream("s").values() == [None, b""]


@pytest.mark.parametrize(
    ("fields", "headers", "name", "text"),
    [
        ({"as": "json", "value": "{<b>"}, (), "value", "this is not JSON"),
        ({"as": "null", "value": "<b>"}, (), "value", "a null value has no content"),
        ({"value": "<b>"}, (("", "lost"),), "headers", "has no name"),
        ({"as": "xml", "value": "<b>"}, (), "as", "takes one of"),
        ({"as": "schema", "value": "<b>"}, (), "subject", "choose the subject"),
        ({"as": "schema", "value": "<b>", "subject": "s" * 300}, (), "subject", "256 are the most"),
        ({"as": "schema", "value": "<b>", "subject": "s-value", "version": "x"}, (), "version", "takes a number"),
    ],
)
async def test_an_error_is_shown_beside_its_field_and_inputs_are_kept(
    console: MakeBrowser,
    cluster: FakeCluster,
    fields: dict[str, str],
    headers: tuple[tuple[str, str], ...],
    name: str,
    text: str,
) -> None:
    cluster.create_stream("s")
    browser = await console(admin=True)
    page = await store(browser, ("trace", "17"), *headers, key='"k"', **fields)
    assert page.status == 400
    _, there, rest = page.text.partition(f'id="{name}-error"')
    assert there
    assert text in rest.partition("</p>")[0]
    for typed in ("&#34;k&#34;", "&lt;b&gt;", 'value="trace"', 'value="17"'):
        assert typed in page.text
    assert cluster.stream("s").values() == []


async def test_rows_for_headers_can_be_added_up_to_the_limit(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    browser = await console(admin=True)
    page = await store(browser, ("trace", "17"), add="1", value="kept")
    assert (page.status, page.text.count('name="header_name"')) == (200, 4)
    assert ">\nkept</textarea>" in page.text
    full = await store(browser, *[("h", "")] * limits.PRODUCED_HEADERS_MAX, add="1")
    assert full.text.count('name="header_name"') == limits.PRODUCED_HEADERS_MAX
    assert 'name="add"' not in full.text
    many = await store(browser, *[("h", "")] * (limits.PRODUCED_HEADERS_MAX + 1))
    assert (many.status, cluster.stream("s").values()) == (400, [])


async def test_a_read_only_console_stores_no_record(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    reader = await console()
    assert (await reader.get(PAGE)).status == 403
    assert (await reader.post(PAGE, {"value": "x", "csrf": "x"})).status == 403
    assert PAGE not in (await reader.get("/streams/s/messages")).text
    assert cluster.stream("s").values() == []
