"""Compatible schemas: the readers' library can read any value written with the other schema."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kera.core.errors import InvalidSchema
from kera.core.schemas import Compatibility, SchemaType
from kera.server.schemas.compatibility import Definition, Version, incompatibilities
from tests.examples import examples
from tests.property import json_schema_world
from tests.property.avro_world import CannotBeWritten, evolved, named_in, read, schemas, values, written

SLOW = settings(
    max_examples=examples(200, quick=20),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    deadline=None,
)


def avro(schema: Any) -> Definition:
    return Definition(SchemaType.AVRO, json.dumps(schema))


@SLOW
@given(st.data())
def test_values_of_a_compatible_avro_schema_are_read_by_fastavro(data: st.DataObject) -> None:
    writer = data.draw(schemas())
    reader = data.draw(st.one_of(evolved(writer), evolved(writer), schemas()))
    try:
        found = incompatibilities(avro(reader), [Version(1, avro(writer))], Compatibility.BACKWARD)
    except InvalidSchema:
        assume(False)  # a change has made an invalid schema
    backwards = incompatibilities(avro(writer), [Version(1, avro(reader))], Compatibility.FORWARD)
    assert bool(found) == bool(backwards)  # the same question
    assume(not found)
    for value in data.draw(st.lists(values(writer, named_in(writer)), min_size=1, max_size=3)):
        with contextlib.suppress(CannotBeWritten):
            read(written(writer, value), writer, reader)


@SLOW
@given(st.data())
def test_an_avro_schema_is_compatible_with_itself(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    assert incompatibilities(avro(schema), [Version(1, avro(schema))], Compatibility.FULL_TRANSITIVE) == []


def json_schema(schema: Any) -> Definition:
    return Definition(SchemaType.JSON, json.dumps(schema))


@SLOW
@given(st.data())
def test_values_of_a_compatible_json_schema_are_valid_for_jsonschema(data: st.DataObject) -> None:
    writer = data.draw(json_schema_world.schemas())
    reader = data.draw(json_schema_world.changed(writer) | json_schema_world.schemas())
    try:
        found = incompatibilities(json_schema(reader), [Version(1, json_schema(writer))], Compatibility.BACKWARD)
        backwards = incompatibilities(json_schema(writer), [Version(1, json_schema(reader))], Compatibility.FORWARD)
    except InvalidSchema:
        assume(False)  # the comparison would take too long
    assert bool(found) == bool(backwards)
    assume(not found)
    writes, reads = Draft202012Validator(writer), Draft202012Validator(reader)
    for value in data.draw(st.lists(json_schema_world.VALUES, min_size=5, max_size=20)):
        if writes.is_valid(value) and json_schema_world.is_written(writer, value, writer):
            reads.validate(value)


@SLOW
@given(json_schema_world.schemas())
def test_a_valid_json_schema_is_valid_for_jsonschema_too(schema: Any) -> None:
    json_schema(schema).parsed()
    Draft202012Validator.check_schema(schema)


WORDS = re.findall(
    "[^ ]+",
    "type name fields items values symbols default size aliases logicalType properties $ref required enum anyOf"
    " allOf oneOf not minimum maxLength record int string object",
)
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)


@SLOW
@pytest.mark.parametrize(
    ("kind", "valid"),
    [(SchemaType.AVRO, schemas()), (SchemaType.JSON, json_schema_world.schemas())],
    ids=["avro", "json"],
)
@given(data=st.data())
def test_any_json_is_compared_or_refused(kind: SchemaType, valid: st.SearchStrategy[Any], data: st.DataObject) -> None:
    one, other = (Definition(kind, json.dumps(data.draw(valid | JUNK))) for _ in range(2))
    with contextlib.suppress(InvalidSchema):
        assert incompatibilities(one, [Version(1, other)], Compatibility.NONE) == []
        assert incompatibilities(one, [Version(1, one)], Compatibility.FULL) == []
        incompatibilities(one, [Version(1, other)], Compatibility.FULL)
