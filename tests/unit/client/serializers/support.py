"""Helpers that the tests of serializers share."""

from typing import Any

from kera.client.serializers import Context, Schemas, Serializer
from kera.client.serializers.protocols import NeedsSchema
from kera.core.schemas.framing import unframe
from tests.unit.client.serializers.fake_registry import FakeRegistry

CONTEXT = Context("orders")


async def ready(serializer: NeedsSchema, registry: FakeRegistry, *, register: bool = True) -> Serializer[Any]:
    return await serializer.ready(CONTEXT, Schemas(registry, register=register))


async def framed_round_trip(serializer: NeedsSchema, deserializer: Any, value: Any) -> Any:
    """Write a value with a registry, and read it as a consumer does."""
    registry = FakeRegistry()
    schema_id, payload = unframe((await ready(serializer, registry))(value, CONTEXT))
    return deserializer.reader_of(await registry.by_id(schema_id))(payload, CONTEXT)
