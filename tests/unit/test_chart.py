"""The values of the Helm chart: the schema has and describes all of them, and refuses others."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "kera"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
COPY = {"name": "clicks", "source": "kafka://k:9092/clicks", "target": "kera:clicks", "args": ["--create"]}


def problems(values: dict[str, Any]) -> list[str]:
    """The errors of values according to the schema."""
    return [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values)]


def objects(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Objects whose keys the schema names, with their paths in the values."""
    if "properties" in schema:
        yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from objects(each, (*path, name))
    if "items" in schema:
        yield from objects(schema["items"], (*path, "[]"))


def changed(path: tuple[str, ...], key: str, value: object) -> dict[str, Any]:
    """The chart's values with one more key in the object at `path`."""
    values: Any = copy.deepcopy(VALUES)
    values["connect"] = [dict(COPY)]
    values["imagePullSecrets"] = [{"name": "registry"}]
    found = values
    for step in path:
        found = found[0] if step == "[]" else found[step]
    found[key] = value
    return dict(values)


def test_the_schema_is_valid_and_accepts_the_values_of_the_chart() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)

    assert problems(VALUES) == []
    assert problems(VALUES | {"connect": [COPY]}) == []


@pytest.mark.parametrize("path", [path for path, _ in objects(SCHEMA)], ids=lambda path: ".".join(path) or "top")
def test_an_unknown_key_is_refused_at_each_level(path: tuple[str, ...]) -> None:
    (problem,) = problems(changed(path, "replicaz", 3))

    assert "'replicaz' was unexpected" in problem


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("broker",), "replicas", "three"),
        (("broker", "settings"), "ARENA_BYTES", 1),
        (("backup",), "storage", "100 GB"),
        ((), "antiAffinity", "sometimes"),
        (("connect", "[]"), "args", ["--follow"]),
        (("connect", "[]"), "name", "Clicks_1"),
        (("image",), "pullPolicy", "always"),
    ],
)
def test_a_wrong_value_is_refused(path: tuple[str, ...], key: str, value: object) -> None:
    assert len(problems(changed(path, key, value))) == 1


def test_the_schema_describes_every_value_and_the_chart_shows_it() -> None:
    optional = {("connect", "[]"), ("imagePullSecrets", "[]")}
    for path, schema in objects(SCHEMA):
        for name, each in schema["properties"].items():
            assert each["description"].endswith((".", "…")), (*path, name)
        if path in optional:
            continue
        shown = VALUES
        for step in path:
            shown = shown[step]
        assert shown.keys() == schema["properties"].keys() - {"global"}, path
