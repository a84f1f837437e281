"""JSON Schemas of many kinds, and values that a schema allows, as its writers write them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "c")
WORDS = ("", "x", "xy", "xyz")
NUMBERS = (-1, 0, 1, 1.5, 2, 3)
SCALARS = (None, True, False, 0, 1, 1.0, 2.5, "x", "xy")
REFERENCES = ("#/$defs/A", "#/$defs/B")


def schemas(*, references: bool = True) -> st.SearchStrategy[Any]:
    """Any whole schema."""
    inner = st.recursive(_leaves(references=references), _composed, max_leaves=8)
    if not references:
        return inner
    return st.fixed_dictionaries({"A": inner, "B": inner}).flatmap(
        lambda definitions: inner.map(
            lambda schema: {**schema, "$defs": definitions} if isinstance(schema, dict) else schema
        )
    )


def _leaves(*, references: bool) -> st.SearchStrategy[Any]:
    def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({}, optional=keywords)

    counts = st.integers(0, 3)
    numbers = st.sampled_from(NUMBERS)
    bounds = some(minimum=numbers, maximum=numbers, exclusiveMinimum=numbers, exclusiveMaximum=numbers)
    kinds = st.sampled_from(["null", "boolean", "integer", "number", "string"])
    leaves: list[st.SearchStrategy[Any]] = [
        st.sampled_from([True, {}, {"type": "object"}, {"type": "array"}]),
        kinds.map(lambda kind: {"type": kind}),
        st.lists(kinds, min_size=1, max_size=3, unique=True).map(lambda some: {"type": some}),
        bounds.map(lambda keywords: {"type": "integer", **keywords}),
        bounds.map(lambda keywords: {"type": "number", **keywords}),
        some(minLength=counts, maxLength=counts, pattern=st.sampled_from(["x", "^y"])).map(
            lambda keywords: {"type": "string", **keywords}
        ),
        st.lists(st.sampled_from(SCALARS), min_size=1, max_size=4).map(lambda values: {"enum": values}),
        st.sampled_from(SCALARS).map(lambda value: {"const": value}),
        st.sampled_from([1, 2, 0.5]).map(lambda of: {"type": "number", "multipleOf": of}),
    ]
    if references:
        leaves.append(st.sampled_from(REFERENCES).map(lambda to: {"type": "object", "properties": {"a": {"$ref": to}}}))
        leaves.append(st.sampled_from(REFERENCES).map(lambda to: {"type": "array", "items": {"$ref": to}}))
    return st.one_of(leaves)


def _composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    required = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": properties},
        optional={
            "required": required,
            "additionalProperties": st.booleans() | inner,
            "minProperties": st.integers(0, 2),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
            "uniqueItems": st.booleans(),
        },
    )
    several = st.lists(inner, min_size=1, max_size=3)
    branches = st.sampled_from(["anyOf", "oneOf", "allOf"]).flatmap(
        lambda word: several.map(lambda schemas: {word: schemas})
    )
    return st.one_of(objects, objects, arrays, branches)


def changed(schema: Any) -> st.SearchStrategy[Any]:
    """A changed schema: one place in it has another schema."""
    places = [*_places([schema], ()), (0,)]
    return st.sampled_from(places).flatmap(
        lambda place: schemas(references=False).map(lambda other: _with(schema, place[1:], other))
    )


def _places(node: Any, path: tuple[Any, ...]) -> Any:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(value, dict | list):
            if isinstance(value, dict) and key not in {"properties", "$defs"}:
                yield (*path, key)
            if key not in {"enum", "const", "required"}:
                yield from _places(value, (*path, key))


def _with(node: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        definitions = {"$defs": node["$defs"]} if isinstance(node, dict) and "$defs" in node else {}
        return {**other, **definitions} if isinstance(other, dict) else other
    if isinstance(node, dict):
        return {key: _with(value, path[1:], other) if key == path[0] else value for key, value in node.items()}
    return [_with(value, path[1:], other) if at == path[0] else value for at, value in enumerate(node)]


VALUES = st.recursive(
    st.sampled_from(SCALARS) | st.sampled_from(WORDS) | st.sampled_from(NUMBERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


def is_written(schema: Any, value: Any, root: Any) -> bool:
    """Whether writers of a schema, which allows the value, write it: without properties that the schema does not name.

    Combinations of several schemas are not analysed: objects in these are left out.
    """
    if isinstance(schema, bool):
        return True
    if "$ref" in schema:
        return is_written(root["$defs"][schema["$ref"][-1]], value, root)
    if schema.keys() & {"anyOf", "oneOf", "allOf"}:
        return not _has_objects(value)
    if isinstance(value, dict):
        properties, additional = schema.get("properties", {}), schema.get("additionalProperties")
        return all(
            is_written(properties[name], each, root)
            if name in properties
            else additional is not None and is_written(additional, each, root)
            for name, each in value.items()
        )
    if isinstance(value, list):
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        return all(is_written(prefix[at] if at < len(prefix) else items, each, root) for at, each in enumerate(value))
    return True


def _has_objects(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_objects, value))
    return isinstance(value, dict)
