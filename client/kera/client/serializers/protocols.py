"""The interfaces of serializers and deserializers, and of the registry of schemas that they use.

Sending is synchronous and the registry is not. So whoever needs a schema's id asks for it before the first value: a
producer calls `ready` when it prepares a stream, and sends with what that gives. Whoever needs a schema to read is told
it before the first value that names it (`FramedDeserializer`).
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
    """The stream that data belong to, and their part of its records."""

    stream: str
    part: Part = "value"

    @property
    def subject(self) -> str:
        """Under which its schemas are registered."""
        return f"{self.stream}-{self.part}"


class Serializer(Protocol[T_contra]):
    """Turns a value into bytes."""

    def __call__(self, value: T_contra, context: Context, /) -> bytes:
        """Raises `CannotEncode`; whatever else it raises becomes one."""
        ...


class Deserializer(Protocol[T_co]):
    """Turns bytes into a value."""

    def __call__(self, data: bytes, context: Context, /) -> T_co:
        """Raises `CannotDecode`; whatever else it raises becomes one."""
        ...


@runtime_checkable
class NeedsSchema(Protocol):
    """A serializer that needs to know something of the registry first."""

    async def ready(self, context: Context, schemas: Schemas) -> Serializer[Any]:
        """One that may be called with values of `context`. Raises what `Schemas` does."""
        ...


class Schema(Protocol):
    """The used part of a registered schema."""

    @property
    def schema_id(self) -> int:
        """Id within the cluster."""
        ...

    @property
    def schema_type(self) -> SchemaType:
        """The language."""
        ...

    @property
    def definition(self) -> str:
        """The text."""
        ...

    @property
    def message(self) -> str:
        """For Protobuf: the message; empty: the first one of the last file."""
        ...


class Registry(Protocol):
    """The used part of `Client.schemas`."""

    async def register(self, subject: str, schema_type: SchemaType, definition: str, *, message: str = "") -> Schema:
        """Make it the next version, or find it."""
        ...

    async def by_id(self, schema_id: int) -> Schema:
        """Raises `UnknownSchema`."""
        ...

    async def versions(self, subject: str) -> list[int]:
        """Raises `UnknownSubject`."""
        ...

    async def version(self, subject: str, number: int) -> Schema:
        """Raises `UnknownSubject`, `UnknownSchema`."""
        ...


@runtime_checkable
class FramedDeserializer(Protocol):
    """A deserializer of values that name their schemas: it makes a reader of each schema."""

    @property
    def framed(self) -> bool:
        """Whether values do; else it is called with them as any other is."""
        ...

    def reader_of(self, schema: Schema) -> Deserializer[Any]:
        """The deserializer for payloads that were written with `schema`. Raises `CannotDecode` if there cannot be
        one.
        """
        ...


@runtime_checkable
class RowDeserializer(Protocol):
    """A deserializer that also makes values of the rows of streams with columns."""

    def rows_of(self, schema: pa.Schema, stream: str) -> Callable[[Mapping[str, Any]], Any]:
        """A function that makes them from rows by the names of columns; raises `CannotDecode`.

        Raises `InvalidArgument` for columns that it has no use for.
        """
        ...


class Schemas:
    """The registry, as a producer's serializers see it."""

    def __init__(self, registry: Registry | None, *, register: bool = True) -> None:
        """`register`: whether a schema that is not there is registered."""
        self._registry = registry
        self._register = register

    async def id_of(self, context: Context, schema_type: SchemaType, definition: str, message: str = "") -> int:
        """The id of a schema under the subject of `context`.

        Raises what `SchemaRegistry.register` does, and `UnknownSchema` when it is not there and not to be registered.
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
    """Whether they differ in nothing but how they are written."""
    if known.definition == definition:
        return True
    try:
        if known.schema_type in {SchemaType.AVRO, SchemaType.JSON}:
            return bool(json.loads(known.definition) == json.loads(definition))
        return base64.b64decode(known.definition) == base64.b64decode(definition)
    except (ValueError, RecursionError):
        return False
