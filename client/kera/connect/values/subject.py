"""Chooses the schema of the registry with which a copy writes.

A schema can be derived from rows with columns. If the subject does not exist, it is registered with that schema. An
existing subject is used unchanged if it has all columns; otherwise a version with the missing columns as optional
fields is registered, and the registry decides whether that is compatible. No schema can be derived from values that are
JSON already, so their subject must exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from kera.client.serializers.protocols import Schema
from kera.connect.errors import Refused
from kera.connect.values.columns import avro_field, avro_schema_of, json_property, json_schema_of
from kera.core.errors import SchemaMismatch, UnknownSubject
from kera.core.schemas import SchemaType, stream_of


class Version(Schema, Protocol):
    """A version of a subject, as in `kera.client`."""

    @property
    def version(self) -> int:
        """The number of the version, from 1."""
        ...


class Registry(Protocol):
    """The used part of `Client.schemas`."""

    async def register(self, subject: str, schema_type: SchemaType, definition: str) -> Version:
        """Register the next version, or return the existing one. Raises `IncompatibleSchema`."""
        ...

    async def latest(self, subject: str) -> Version:
        """Return the latest version. Raises `UnknownSubject`."""
        ...


class Chosen(NamedTuple):
    """The schema that a copy writes with."""

    version: Version
    exact: bool
    """Whether the schema was derived from the columns, so that their values need no conversion."""


async def choose(registry: Registry, subject: str, kind: SchemaType, columns: pa.Schema | None, shown: str) -> Chosen:
    """Return the schema for rows with `columns`, or for values that are JSON (None); `shown`: the source.

    Raises `UnknownSubject`, `SchemaMismatch`, `IncompatibleSchema`, `Refused`.
    """
    derived = None if columns is None else _derived(columns, subject, kind)
    try:
        latest = await registry.latest(subject)
    except UnknownSubject as error:
        if derived is None:
            raise UnknownSubject(
                f"subject {subject!r} is not registered, and {shown} has no columns to derive a schema from: register"
                f" one first: kera schema register {subject} FILE --type {kind}",
                subject=subject,
            ) from error
        return Chosen(await registry.register(subject, kind, derived), exact=True)
    if latest.schema_type is not kind:
        raise Refused(
            f"subject {subject!r} has schemas of type {latest.schema_type}, and --value is {kind}: give another"
            " --subject"
        )
    if columns is None or derived is None:
        return Chosen(latest, exact=False)
    if _same(latest.definition, derived):
        return Chosen(latest, exact=True)
    evolved = evolve(latest.definition, columns, kind, f"version {latest.version} of subject {subject!r}", shown)
    if evolved is None:
        return Chosen(latest, exact=False)
    return Chosen(await registry.register(subject, kind, evolved), exact=_same(evolved, derived))


def _derived(columns: pa.Schema, subject: str, kind: SchemaType) -> str:
    if kind is SchemaType.JSON:
        return _text(json_schema_of(columns))
    name = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in stream_of(subject))
    return _text(avro_schema_of(columns, f"_{name}" if name[:1].isdigit() else name))


def _text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _same(one: str, other: str) -> bool:
    return bool(json.loads(one) == json.loads(other))


def evolve(definition: str, columns: pa.Schema, kind: SchemaType, version: str, shown: str) -> str | None:
    """Return `definition` with optional fields for missing columns; None: it has all columns.

    `version` and `shown` describe the schema and the source. Raises `SchemaMismatch` if the schema is no record, or
    requires other columns.
    """
    schema = json.loads(definition)
    if kind is SchemaType.JSON:
        return _evolve_json(schema, columns)
    if not isinstance(schema, Mapping) or schema.get("type") != "record":
        raise SchemaMismatch(f"{version} is not a record, and {shown} gives rows: give another --subject")
    fields = schema["fields"]
    for field in fields:
        if field["name"] not in columns.names and "default" not in field:
            raise SchemaMismatch(
                f"{version} has a field {field['name']!r} without a default, and {shown} has no such column",
                column=field["name"],
            )
    known = {field["name"] for field in fields}
    added = [avro_field(field, schema["name"]) for field in _optional(columns, known)]
    return _text({**schema, "fields": [*fields, *added]}) if added else None


def _evolve_json(schema: Any, columns: pa.Schema) -> str | None:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return None  # the schema does not list properties, so values are only checked against it
    added = {field.name: json_property(field) for field in _optional(columns, set(properties))}
    return _text({**schema, "properties": {**properties, **added}}) if added else None


def _optional(columns: pa.Schema, known: set[str]) -> list[pa.Field]:
    """Return the columns that are not `known`, as nullable fields."""
    return [field.with_nullable(nullable=True) for field in columns if field.name not in known]
