"""The interfaces of serializers and deserializers, and of the registry of schemas that they use.

Sending is synchronous and the registry is not. So a serializer asks for the id of its schema before the first value: a
producer calls `ready` when it prepares a stream, and sends with the serializer that this returns. A deserializer gets
each schema before the first value that names it (`FramedDeserializer`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from kera.core.errors import InvalidArgument, UnknownSchema, UnknownSubject
from kera.core.schemas import SchemaType

Part = Literal["key", "value"]
T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class Context(NamedTuple):
    """The stream of some data, and the part of its records that they are."""

    stream: str
    part: Part = "value"

    @property
    def subject(self) -> str:
        """The subject of its schemas in the registry."""
        return f"{self.stream}-{self.part}"


class Serializer(Protocol[T_contra]):
    """Turns a value into bytes."""

    def __call__(self, value: T_contra, context: Context, /) -> bytes:
        """Return the bytes of `value`. Raises `CannotEncode`; any other error is converted to it."""
        ...


class Deserializer(Protocol[T_co]):
    """Turns bytes into a value."""

    def __call__(self, data: bytes, context: Context, /) -> T_co:
        """Return the value in `data`. Raises `CannotDecode`; any other error is converted to it."""
        ...


@runtime_checkable
class NeedsSchema(Protocol):
    """A serializer that must ask the registry before its first use."""

    async def ready(self, context: Context, schemas: Schemas) -> Serializer[Any]:
        """Return a serializer that can be called with values of `context`. Raises the errors of `Schemas`."""
        ...


class Schema(Protocol):
    """The parts of a registered schema that deserializers use."""

    @property
    def schema_id(self) -> int:
        """The schema's id within the cluster."""
        ...

    @property
    def schema_type(self) -> SchemaType:
        """The language of the definition."""
        ...

    @property
    def definition(self) -> str:
        """The text of the schema."""
        ...

    @property
    def message(self) -> str:
        """For Protobuf: the name of the message; empty: the first message of the last file."""
        ...


class Registry(Protocol):
    """The part of `Client.schemas` that serializers use."""

    async def register(self, subject: str, schema_type: SchemaType, definition: str, *, message: str = "") -> Schema:
        """Register a schema as the next version of `subject`, or return the version that has it already."""
        ...

    async def by_id(self, schema_id: int) -> Schema:
        """Return the schema with this id. Raises `UnknownSchema`."""
        ...

    async def versions(self, subject: str) -> list[int]:
        """Return the numbers of the versions of `subject`. Raises `UnknownSubject`."""
        ...

    async def version(self, subject: str, number: int) -> Schema:
        """Return a version of `subject`. Raises `UnknownSubject`, `UnknownSchema`."""
        ...


@runtime_checkable
class FramedDeserializer(Protocol):
    """A deserializer of values that name their schemas: it makes a reader for each schema."""

    @property
    def framed(self) -> bool:
        """Whether values name their schemas; otherwise, the deserializer is called like any other."""
        ...

    def reader_of(self, schema: Schema) -> Deserializer[Any]:
        """Return the deserializer for payloads written with `schema`. Raises `CannotDecode` if they cannot be read."""
        ...


@runtime_checkable
class RowDeserializer(Protocol):
    """A deserializer that also makes values from the rows of streams with columns."""

    def rows_of(self, schema: pa.Schema, stream: str) -> Callable[[Mapping[str, Any]], Any]:
        """Return a function that makes a value from a row, by column name. The function raises `CannotDecode`.

        Raises `InvalidArgument` for columns that the deserializer cannot use.
        """
        ...


class Schemas:
    """The registry, as a producer's serializers see it."""

    def __init__(self, registry: Registry | None, *, register: bool = True) -> None:
        """Use `registry`. `register`: whether missing schemas are registered."""
        self._registry = registry
        self._register = register

    async def id_of(self, context: Context, schema_type: SchemaType, definition: str, message: str = "") -> int:
        """Return the id of a schema under the subject of `context`.

        Raises the errors of `SchemaRegistry.register`, and `UnknownSchema` for a missing schema without `register`.
        """
        if self._registry is None:
            raise InvalidArgument("a serializer with a schema needs the registry of a client; see Client.producer")
        if self._register:
            found = await self._registry.register(context.subject, schema_type, definition, message=message)
            return found.schema_id
        try:
            numbers = await self._registry.versions(context.subject)
        except UnknownSubject:
            numbers = []
        for number in reversed(numbers):
            known = await self._registry.version(context.subject, number)
            if (known.schema_type, known.message) == (schema_type, message) and _same(known, definition):
                return known.schema_id
        raise UnknownSchema(
            f"the schema of the serializer is not among the {len(numbers)} versions of subject {context.subject!r};"
            " register it, or let the producer do so (register_schemas)",
            subject=context.subject,
        )


def _same(known: Schema, definition: str) -> bool:
    """Return whether two definitions differ only in their notation."""
    if known.definition == definition:
        return True
    try:
        if known.schema_type in {SchemaType.AVRO, SchemaType.JSON}:
            return bool(json.loads(known.definition) == json.loads(definition))
        return base64.b64decode(known.definition) == base64.b64decode(definition)
    except (ValueError, RecursionError):
        return False
