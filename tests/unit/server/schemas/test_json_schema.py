"""JSON Schemas: valid ones, and which allow all values of another."""

from __future__ import annotations

import datetime
import decimal
import enum
from typing import Any, Literal

import pydantic
import pytest

from kera.core.errors import InvalidSchema
from kera.server.schemas.compatibility import Definition
from kera.server.schemas.json_schema.parsing import PATTERN_CHARS_MAX, SCHEMAS_MAX
from tests.unit.core.schemas.support import backward, forward, json_schema

TEXT, INTEGER, NUMBER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "null"}


def of(*required: str, additional: Any = None, **properties: Any) -> dict[str, Any]:
    """An object with these properties."""
    more = {} if additional is None else {"additionalProperties": additional}
    return {"type": "object", "properties": properties, "required": list(required), **more}


def kinds(*names: str) -> dict[str, Any]:
    """One of several objects; their kind tells them apart."""
    return {"oneOf": [of("kind", kind={"const": name}, **{name: TEXT}) for name in names]}


TREE = {"$defs": {"T": of(left={"$ref": "#/$defs/T"}, value=INTEGER)}, "$ref": "#/$defs/T"}
NESTED = {"oneOf": [of(a={"$ref": "#"}), of("b", b=TEXT, a={"$ref": "#"})]}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        TREE,
        of("a", a=TEXT),
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a", **TEXT},
        {**DRAFT_7, "items": [TEXT, INTEGER], "additionalItems": False},
        {"prefixItems": [TEXT], "items": False},
        {"$defs": {"a": {"$anchor": "here", **TEXT}}, "$ref": "#here"},
        {"properties": {"$ref": TEXT, "$id": TEXT, "a/b~c": TEXT, "d": {"$ref": "#/properties/a~1b~0c"}}},
        {"patternProperties": {"^x-": TEXT}, "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": TEXT}},
        {"enum": [1, "a", None, [1], {"a": 1}], "multipleOf": 0.5, "minLength": 1.0},
        {**DRAFT_7, "dependencies": {"a": ["b"], "b": {"properties": {"c": {"$ref": "#", "description": "hidden"}}}}},
        {"if": TEXT, "then": {"minLength": 3}, "else": True, "not": NULL, "x-ours": {"$ref": "http://not.looked.at"}},
    ],
)
def test_a_valid_schema_is_accepted(schema: Any) -> None:
    json_schema(schema).parsed()


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ([], "[] is not a schema"),
        ("string", "'string' is not a schema"),
        ({"$ref": "http://example.com/a.json"}, "is in another document, and nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "is in another document, and nothing is fetched"),
        ({"$ref": "other.json#/a"}, "is in another document, and nothing is fetched"),
        ({"allOf": [{"$dynamicRef": "https://example.com"}]}, "is in another document"),
        ({"$ref": 5}, "5 is not a reference"),
        ({"$ref": "#/$defs/a"}, "the schema has no value at '#/$defs/a'"),
        ({"$ref": "#a"}, "there is no anchor 'a'"),
        ({"$ref": "#/x", "x": {}}, "'#/x' is not a schema"),
        ({"enum": [{}], "$ref": "#/enum/0"}, "'#/enum/0' is not a schema"),
        ({"allOf": [{"$id": "https://example.com/a"}]}, "$id is taken of the whole schema only"),
        ({"$ref": "#"}, "refers to itself about the same value"),
        ({"anyOf": [TEXT, {"$ref": "#"}]}, "refers to itself about the same value"),
        (
            {"$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
            "refers to itself about the same value",
        ),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "not a supported draft"),
        ({"$schema": 4}, "not a supported draft"),
        ({**DRAFT_7, "$ref": "#", "type": "string"}, "$ref hides what stands beside it"),
        ({"items": [TEXT]}, "prefixItems since draft 2020-12"),
        ({"type": "text"}, "'text' is neither a type"),
        ({"type": []}, "[] is neither a type"),
        ({"type": ["null", "null"]}, "is neither a type"),
        ({"type": None}, "None is neither a type"),
        ({"enum": []}, "it is a list of values"),
        ({"required": "a"}, "it is a list of names"),
        ({"required": ["a", "a"]}, "it is a list of names"),
        ({"properties": []}, "it is an object with schemas"),
        ({"properties": {"a": 5}}, "at /properties/a: 5 is not a schema"),
        ({"anyOf": []}, "it is a list of schemas"),
        ({"oneOf": {}}, "it is a list of schemas"),
        ({"minLength": -1}, "-1 is not a whole number from 0"),
        ({"maxItems": True}, "True is not a whole number from 0"),
        ({"minimum": "1"}, "is not a number that is allowed here"),
        ({"exclusiveMinimum": True}, "is not a number that is allowed here"),
        ({"multipleOf": 0}, "is not a number that is allowed here"),
        ({"uniqueItems": 1}, "neither true nor false"),
        ({"pattern": "("}, "is not a regular expression that Python knows"),
        ({"pattern": "(" * 900}, "is not a regular expression that Python knows"),
        ({"pattern": "a" * (PATTERN_CHARS_MAX + 1)}, "a pattern has at most"),
        ({"patternProperties": {"(": True}}, "is not a regular expression that Python knows"),
        ({"pattern": 5}, "5 is not text"),
        ({"dependentRequired": ["a"]}, "an object with lists of names"),
        ({"$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}}}, "the anchor 'x' is there twice"),
        ({"anyOf": [True] * (SCHEMAS_MAX + 1)}, "more than 10000 schemas"),
    ],
)
def test_an_invalid_schema_or_one_in_another_document_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        json_schema(schema).parsed()
    assert said in caught.value.message


COMPATIBLE: list[tuple[Any, Any]] = [
    (TEXT, True),
    (TEXT, {}),
    (False, TEXT),
    (TEXT, {"type": ["string", "null"]}),
    (TEXT, {"anyOf": [NULL, TEXT]}),
    ({"anyOf": [NULL, TEXT]}, {"anyOf": [TEXT, NULL, INTEGER]}),
    ({"type": ["null", "string"]}, {"anyOf": [NULL, TEXT]}),
    ({"anyOf": [NULL, TEXT]}, {"type": ["null", "string"]}),
    ({"enum": ["a", None]}, {"anyOf": [NULL, TEXT]}),
    (INTEGER, NUMBER),
    ({"type": "integer", "title": "a"}, {"type": "integer", "description": "b", "default": 5, "x-of": 5}),
    (of(a=TEXT), of(a=TEXT, b=INTEGER)),
    (of(a=TEXT, additional=False), of(a=TEXT, b=INTEGER, additional=False)),
    (of("a", a=TEXT), of(a=TEXT)),
    (of(a=TEXT), of(additional=TEXT)),
    (of(a=TEXT, additional=INTEGER), of(a=TEXT, additional=NUMBER)),
    ({"enum": ["a", "b"]}, {"enum": ["c", "b", "a"]}),
    ({"const": 1}, {"enum": [1.0, 2]}),
    ({"const": "a"}, {"type": "string", "minLength": 1, "maxLength": 1}),
    ({"enum": [3, 6]}, {"type": "integer", "minimum": 3, "exclusiveMaximum": 7, "multipleOf": 3}),
    ({"type": "integer", "minimum": 5}, {"type": "integer", "exclusiveMinimum": 4}),
    ({"type": "integer", "maximum": 5}, {"type": "number", "exclusiveMaximum": 5.5}),
    ({"type": "integer", "multipleOf": 6}, {"type": "integer", "multipleOf": 3}),
    ({"type": "integer"}, {"type": "number", "multipleOf": 0.5}),
    ({"type": "string", "minLength": 3, "maxLength": 5}, {"type": "string", "minLength": 2, "maxLength": 6}),
    ({"type": "string", "pattern": "a", "format": "date"}, {"type": "string", "pattern": "a", "format": "date"}),
    ({"type": "array", "items": INTEGER}, {"type": "array", "items": NUMBER}),
    ({"type": "array", "prefixItems": [TEXT, INTEGER], "items": False}, {"type": "array", "prefixItems": [TEXT]}),
    ({"type": "array", "items": TEXT, "maxItems": 1}, {"type": "array", "prefixItems": [TEXT], "items": INTEGER}),
    ({**DRAFT_7, "items": [TEXT], "additionalItems": INTEGER}, {"prefixItems": [TEXT], "items": INTEGER}),
    ({"type": "array", "uniqueItems": True, "minItems": 2}, {"type": "array", "minItems": 1}),
    ({"allOf": [of("a", a=TEXT), of("b", b=INTEGER)]}, of("a", "b", a=TEXT, b=INTEGER)),
    (of("a", "b", a=TEXT, b=INTEGER), {"allOf": [of("a", a=TEXT), of("b", b=INTEGER)]}),
    (TREE, TREE | {"title": "tree"}),
    (
        kinds("a", "b") | {"discriminator": {"propertyName": "kind", "mapping": {"a": "#/oneOf/0"}}},
        kinds("a", "b", "c") | {"discriminator": {"propertyName": "kind"}},
    ),
    (kinds("a", "b"), kinds("b", "a", "c")),
    (
        {"oneOf": [of(kind={"const": "a"}), of(kind={"const": "b"})]},
        {"oneOf": [of(kind={"const": "b"}), of(kind={"const": "a"})]},
    ),
    (NESTED, NESTED | {"title": "branches of which it is not told which one applies, in themselves"}),
    ({"type": "string", "not": {"const": "a"}}, {"type": "string", "not": {"const": "a"}}),
    ({"type": "string", "not": {"const": "a"}}, TEXT),
    ({"type": "string", "minimum": 5}, {"type": "string", "minimum": 9, "contains": TEXT, "required": ["a"]}),
    (of(a=TEXT) | {"patternProperties": {"^x": TEXT}}, of(a=TEXT) | {"patternProperties": {"^x": True}}),
    (of(a=TEXT) | {"dependentRequired": {"a": ["b"]}}, of(a=TEXT)),
]


@pytest.mark.parametrize(("writer", "reader"), COMPATIBLE)
def test_a_schema_that_allows_at_least_as_much_is_compatible(writer: Any, reader: Any) -> None:
    assert backward(json_schema(writer), json_schema(reader)) == []
    assert forward(json_schema(reader), json_schema(writer)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (TEXT, INTEGER, "the schema: integer, was string"),
        (NUMBER, INTEGER, "the schema: integer, was number"),
        (True, TEXT, "the schema: string, was anything"),
        (TEXT, False, "the schema: is no longer allowed"),
        (of(a=of(zip=TEXT)), of(a=of(zip=INTEGER)), "field a.zip: integer, was string"),
        (of(a=TEXT), of("a", a=TEXT), "field a: was optional, and is required now"),
        (of(), of("a", a=TEXT), "field a: is new, and is required now"),
        (of(a=TEXT), of(a=TEXT, additional=False) | {"properties": {}}, "field a: is no longer allowed"),
        (of(additional=True), of(additional=False), "field {}: is no longer allowed"),
        (of(additional=True), of(a=TEXT), "field a: string, was anything"),
        (of(additional=TEXT), of(additional=INTEGER), "field {}: integer, was string"),
        ({"enum": ["a", "b"]}, {"enum": ["a"]}, 'the schema: "b" is no longer one of its values'),
        ({"enum": [1]}, {"enum": [True]}, "the schema: 1 is no longer one of its values"),
        (TEXT, {"enum": ["a"]}, 'the schema: one of "a", was any value'),
        ({"anyOf": [TEXT, NULL]}, TEXT, "the schema: string, was null"),
        ({"anyOf": [TEXT, NULL]}, {"anyOf": [INTEGER, NULL]}, "the schema: integer or null, was string"),
        (
            of(a={"anyOf": [of(b=TEXT), NULL]}),
            of(a={"anyOf": [of(b=INTEGER), NULL]}),
            "field a.b: integer, was string",
        ),
        ({"type": "integer"}, {"type": "integer", "minimum": 3}, "the schema: minimum 3, was without minimum"),
        (
            {"type": "integer", "minimum": 3},
            {"type": "integer", "exclusiveMinimum": 3},
            "the schema: exclusive minimum 3, was minimum 3",
        ),
        (
            {"type": "integer", "maximum": 3},
            {"type": "integer", "maximum": 2},
            "the schema: maximum 2, was maximum 3",
        ),
        ({"enum": [1, 9]}, {"type": "integer", "maximum": 8}, "the schema: maximum 8, was maximum 9"),
        (INTEGER, INTEGER | {"multipleOf": 2}, "the schema: multipleOf 2, was without multipleOf"),
        (TEXT, TEXT | {"maxLength": 5}, "the schema: maxLength 5, was without maxLength"),
        (TEXT | {"minLength": 1}, TEXT | {"minLength": 2}, "the schema: minLength 2, was minLength 1"),
        (TEXT, TEXT | {"pattern": "^a"}, "the schema: pattern ^a, was without pattern"),
        (TEXT | {"format": "date"}, TEXT | {"format": "uuid"}, "the schema: format uuid, was format date"),
        ({"type": "array"}, {"type": "array", "uniqueItems": True}, "the schema: items have to be unique now"),
        ({"type": "array", "items": TEXT}, {"type": "array", "items": INTEGER}, "field []: integer, was string"),
        (
            {"type": "array", "prefixItems": [TEXT]},
            {"type": "array", "prefixItems": [INTEGER]},
            "field [0]: integer, was string",
        ),
        (
            TREE,
            {"$defs": {"T": of(left={"$ref": "#/$defs/T"}, value=TEXT)}, "$ref": "#/$defs/T"},
            "field value: string, was integer",
        ),
        (kinds("a", "b"), kinds("a"), 'field kind: "b" is no longer one of its values'),
        (TEXT, {"oneOf": [TEXT, True]}, "the schema: it is unknown whether only one branch of oneOf applies"),
        (
            {"oneOf": [of(a=TEXT), of("b", a=TEXT, b=INTEGER)]},
            {"oneOf": [of(a=TEXT), of(a=TEXT, b=INTEGER)]},
            "the schema: it is unknown whether only one branch of oneOf applies",
        ),
        (TEXT, TEXT | {"not": {"const": "a"}}, "the schema: 'not' is not understood here, and may"),
        (TEXT, TEXT | {"mystery": 5}, "the schema: 'mystery' is not understood here, and may"),
        (TEXT | {"mystery": 4}, TEXT | {"mystery": 5}, "the schema: 'mystery' is not understood here, and may"),
        (TEXT | {"mystery": 5}, TEXT, "the schema: 'mystery' is not understood here, and may"),
        (
            {"type": "string", "not": {"$ref": "#/$defs/a"}, "$defs": {"a": TEXT}},
            {"type": "string", "not": {"$ref": "#/$defs/a"}, "$defs": {"a": TEXT}},
            "the schema: 'not' is not understood here, and may",
        ),
        (
            of(a={"$dynamicRef": "#"}),
            of(a={"$dynamicRef": "#"}),
            "field a: '$dynamicRef' is not understood here, and may",
        ),
        (
            of(a=TEXT),
            of(a=TEXT) | {"dependentRequired": {"a": ["b"]}},
            "the schema: 'dependentRequired' is not understood",
        ),
        (
            of(a=TEXT),
            of(a=TEXT) | {"patternProperties": {"^a": INTEGER}},
            "the schema: 'patternProperties' is not under",
        ),
        (
            of() | {"patternProperties": {"^a": INTEGER}},
            of(ab=TEXT) | {"patternProperties": {"^a": INTEGER}},
            "the schema: 'patternProperties' is not understood",
        ),
    ],
)
def test_a_schema_that_allows_less_is_named_by_field_and_reason(old: Any, new: Any, said: str) -> None:
    found = backward(json_schema(old), json_schema(new))
    assert len(found) == 1
    assert found[0].startswith(said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (of("a", a=TEXT), of(), "field a: is gone, and was required"),
        (of("a", a=TEXT), of(a=TEXT), "field a: is optional now, and was required"),
        ({"enum": ["a"]}, {"enum": ["a", "b"]}, 'the schema: "b" is one of its values, and was not'),
        (of(a=TEXT, additional=False), of(a=TEXT, b=TEXT), "field b: is new, and was not allowed"),
        (INTEGER, NUMBER, "the schema: number, was integer"),
    ],
)
def test_changes_that_earlier_readers_do_not_allow_are_named(old: Any, new: Any, said: str) -> None:
    assert forward(json_schema(old), json_schema(new)) == [said]


def test_a_comparison_of_too_many_alternatives_is_refused() -> None:
    product = {"allOf": [{"anyOf": [{"required": [f"a{i}_{j}"]} for j in range(8)]} for i in range(40)]}
    other = {"allOf": [{"anyOf": [{"required": [f"b{i}_{j}"]} for j in range(8)]} for i in range(40)]}
    with pytest.raises(InvalidSchema, match="takes too long"):
        backward(json_schema(product), json_schema(other))


class Color(enum.Enum):
    RED = "red"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Bird(pydantic.BaseModel):
    kind: Literal["bird"]


class Order(pydantic.BaseModel):
    id: int
    at: datetime.datetime
    price: decimal.Decimal
    tags: list[str] = []
    counts: dict[str, int] = {}
    color: Color = Color.RED
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    before: Order | None = None
    place: tuple[int, str] = (1, "a")


class WithNote(Order):
    note: str | None = None


class WithBird(Order):
    pet: Cat | Dog | Bird = pydantic.Field(discriminator="kind")  # type: ignore[assignment]


class WithCustomer(Order):
    customer: str


def of_model(model: type[pydantic.BaseModel]) -> Definition:
    return json_schema(model.model_json_schema())


def test_changes_of_pydantic_models_are_compared_as_expected() -> None:
    order = of_model(Order)
    for new in (Order, WithNote):
        assert backward(order, of_model(new)) == forward(order, of_model(new)) == []
    assert backward(order, of_model(WithBird)) == []
    assert forward(order, of_model(WithBird)) == ['field pet.kind: "bird" is one of its values, and was not']
    assert backward(order, of_model(WithCustomer)) == ["field customer: is new, and is required now"]
    assert forward(order, of_model(WithCustomer)) == []
