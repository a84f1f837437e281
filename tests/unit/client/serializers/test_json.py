"""JSON: strict writing and reading, with and without a schema."""

from typing import Any

import pytest

from kera.client.serializers import JsonDeserializer, JsonSerializer
from kera.core.errors import CannotDecode, CannotEncode, InvalidArgument, NotFramed, UnknownSchema
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import frame, unframe
from tests.unit.client.serializers.fake_registry import FakeRegistry
from tests.unit.client.serializers.support import CONTEXT, ready

SCHEMA = {"type": "object", "properties": {"lines": {"type": "array", "items": {"type": "integer"}}}}


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def test_json_is_written_without_spaces_in_utf_8() -> None:
    assert JsonSerializer()({"ä": [1, None, True, 1.5]}, CONTEXT) == '{"ä":[1,null,true,1.5]}'.encode()


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({"a": [1, {"b": float("nan")}]}, "a[1].b", "not JSON compliant"),
        ({"a": {"b": {1}}}, "a.b", "set"),
        ({"a": [{1: 2}]}, "a[0]", "1 is not a name"),
        ({1: 2, "1": 3}, "", "1 is not a name"),
        ({"a": "\ud800"}, "a", "surrogates"),
        (object(), "", "object"),
        (itself(), "", "contains itself"),
    ],
)
def test_the_error_for_a_value_outside_json_names_the_field(value: Any, field: str, words: str) -> None:
    with pytest.raises(CannotEncode, match=words) as caught:
        JsonSerializer()(value, CONTEXT)
    assert caught.value.attributes["stream"] == "orders"
    assert caught.value.attributes["field"] == field
    assert words in caught.value.attributes["reason"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, "too deeply"),
        (b'{"a":1,"b":{"c":1,"c":2}}', "'c' comes twice"),
        (b"NaN", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"1e999", "more than a float"),
        (b"[-1.0E-999]", "closer to 0 than a float"),
        (b"9" * 5_000, "4300 digits"),
        (b"\xff", "utf-8"),
        ('"ä"'.encode("utf-16"), "utf-8"),
        (b"", "Expecting value"),
        (b"1 2", "Extra data"),
        (b'{"a":["\\ud800"]}', "surrogates"),
        (b'{"\\uDC00x":1}', "surrogates"),
    ],
)
def test_malformed_json_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(CannotDecode, match=words):
        JsonDeserializer()(data, CONTEXT)


def test_a_duplicate_among_very_many_names_is_found_in_one_pass() -> None:
    names = b",".join(b'"%d":0' % number for number in range(200_000))
    with pytest.raises(CannotDecode, match="'199999' comes twice"):
        JsonDeserializer()(b"{" + names + b',"199999":0}', CONTEXT)  # searching for each name would take hours


def test_a_pair_of_surrogates_reads_as_one_character() -> None:
    assert JsonDeserializer()(b'"\\ud83d\\ude00"', CONTEXT) == "\U0001f600"


def test_a_truncated_frame_is_refused() -> None:
    with pytest.raises(NotFramed):
        JsonDeserializer()(b"\x00\x00", CONTEXT)


async def test_a_value_begins_with_the_id_of_its_schema() -> None:
    registry = FakeRegistry()
    serializer = JsonSerializer(SCHEMA)
    data = (await ready(serializer, registry))({"lines": [1]}, CONTEXT)
    assert unframe(data) == (1, b'{"lines":[1]}')
    assert (registry.schemas[0].subject, registry.schemas[0].schema_type) == ("orders-value", SchemaType.JSON)
    assert JsonDeserializer(SCHEMA)(data, CONTEXT) == {"lines": [1]}


async def test_the_error_for_a_value_outside_its_schema_names_the_field() -> None:
    for serializer in (JsonSerializer(SCHEMA, framed=False), await ready(JsonSerializer(SCHEMA), FakeRegistry())):
        with pytest.raises(CannotEncode, match="'x' is not of type 'integer'") as caught:
            serializer({"lines": [1, "x"]}, CONTEXT)
        assert caught.value.attributes["field"] == "lines[1]"
    with pytest.raises(CannotDecode, match=r"lines\[1\]: 'x' is not of type"):
        JsonDeserializer(SCHEMA)(frame(1, b'{"lines":[1,"x"]}'), CONTEXT)


async def test_without_registration_only_a_schema_that_is_registered_already_is_used() -> None:
    registry = FakeRegistry()
    with pytest.raises(UnknownSchema, match="register_schemas"):
        await ready(JsonSerializer(SCHEMA), registry, register=False)
    await ready(JsonSerializer(SCHEMA), registry)
    await ready(JsonSerializer({"type": "null"}), registry)
    text = '{  "properties": {"lines": {"items": {"type": "integer"}, "type": "array"}}, "type": "object"}'
    data = (await ready(JsonSerializer(text), registry, register=False))({}, CONTEXT)
    assert unframe(data) == (1, b"{}")


def test_an_invalid_schema_is_refused() -> None:
    for schema in ({"type": "nonsense"}, "no JSON", {"pattern": 1}):
        with pytest.raises(InvalidArgument, match="not a valid JSON Schema"):
            JsonSerializer(schema)
    with pytest.raises(InvalidArgument, match="need one"):
        JsonSerializer(framed=True)


def test_a_schema_behind_a_url_is_not_fetched() -> None:
    serializer = JsonSerializer({"$ref": "http://127.0.0.1:9/schema"}, framed=False)
    with pytest.raises(CannotEncode, match="which it does not have"):
        serializer({}, CONTEXT)


def test_an_unprepared_serializer_says_so() -> None:
    with pytest.raises(CannotEncode, match=r"not ready: await producer\.prepare\('orders'\)"):
        JsonSerializer(SCHEMA)({}, CONTEXT)


def test_a_value_too_deep_for_a_recursive_schema_is_refused() -> None:
    deserializer = JsonDeserializer({"items": {"$ref": "#"}})
    with pytest.raises(CannotDecode, match="too deeply"):
        deserializer(b"[" * 900 + b"]" * 900, CONTEXT)
