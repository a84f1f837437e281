"""Serializes the values and keys of a producer with serializers before it sends them.

A producer without serializers skips this module: `Producer.send` takes bytes directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kera.client.headers import HeadersLike
from kera.client.producing.open_chunks.records import NO_KEYS
from kera.client.serializers.choosing import serializer_of
from kera.client.serializers.protocols import Context, NeedsSchema, Part, Registry, Schemas, Serializer
from kera.client.serializers.refusing import cannot_encode
from kera.client.types import StreamDescription
from kera.core.errors import CannotEncode, InvalidArgument, KeraError, SchemaMismatch


class _Prepared(NamedTuple):
    """The serializers of one stream."""

    stream_id: int
    typed: bool
    value: Serializer[Any] | None
    value_context: Context
    key: Serializer[Any] | None
    key_context: Context


class Serialization:
    """The serializers of a producer. Any thread may use them for a prepared stream."""

    def __init__(
        self, serializer: Any, key_serializer: Any, registry: Registry | None, *, register_schemas: bool = True
    ) -> None:
        """A serializer of None means that values, or keys, are bytes. Raises `InvalidArgument` for an invalid one."""
        self._value = None if serializer is None else serializer_of(serializer)
        self._key = None if key_serializer is None else serializer_of(key_serializer, "key_serializer")
        self._schemas = Schemas(registry, register=register_schemas)
        self._prepared: dict[str, _Prepared] = {}

    async def prepare(self, stream: StreamDescription) -> None:
        """Get the serializers ready for a stream. Raises the errors of `Schemas.id_of`.

        Does nothing for a stream with columns, whose records have no values or keys to serialize.
        """
        name = stream.name
        known = self._prepared.get(name)
        if known is not None and known.stream_id == stream.stream_id:  # else the stream was deleted and recreated
            return
        value = None if stream.typed else await self._ready(self._value, Context(name, "value"))
        key = None if stream.typed else await self._ready(self._key, Context(name, "key"))
        self._prepared[name] = _Prepared(
            stream.stream_id, stream.typed, value, Context(name, "value"), key, Context(name, "key")
        )

    async def prepare_again(self, stream: StreamDescription) -> None:
        """Prepare a stream that was deleted and recreated since it was prepared; do nothing for others."""
        if stream.name in self._prepared:
            await self.prepare(stream)

    async def _ready(self, serializer: Serializer[Any] | None, context: Context) -> Serializer[Any] | None:
        given: Any = serializer
        return await given.ready(context, self._schemas) if isinstance(given, NeedsSchema) else given

    def sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Producer.send` that serializes values and keys, and passes their bytes to `send`."""

        def serialized(
            stream: str,
            value: Any,
            *,
            keys: Any = NO_KEYS,
            timestamp_us: int | None = None,
            headers: HeadersLike | None = None,
            streamlet: int | None = None,
        ) -> Any:
            value, keys = self.encoded(stream, value, keys)
            if keys is NO_KEYS and timestamp_us is None and headers is None and streamlet is None:
                return send(stream, value)
            return send(stream, value, keys=keys, timestamp_us=timestamp_us, headers=headers, streamlet=streamlet)

        return serialized

    def encoded(self, stream: str, value: Any, keys: Any) -> tuple[Any, Any]:
        """Serialize a value and keys to the bytes that `Producer.send` takes without serializers.

        Raises `CannotEncode`, `SchemaMismatch` for a stream with columns, `InvalidArgument` for a name that is no text.
        """
        prepared = self._prepared.get(stream)
        if prepared is None:
            if not isinstance(stream, str):
                raise InvalidArgument(f"the name of a stream is text, not {stream!r}")
            what: Part = "value" if self._value is not None else "key"
            raise cannot_encode(
                Context(stream, what), f"its serializer is not ready: await producer.prepare({stream!r})"
            )
        if prepared.typed:
            raise SchemaMismatch(
                f"stream {stream!r} has columns, and its records no value: send_rows takes models, send_batch columns",
                stream=stream,
            )
        if value is not None and prepared.value is not None:
            value = _bytes_of(prepared.value, value, prepared.value_context)
        if keys is not NO_KEYS and prepared.key is not None:
            if isinstance(keys, list):
                keys = [_bytes_of(prepared.key, key, prepared.key_context) for key in keys]
            elif keys is None:
                keys = NO_KEYS
            else:
                keys = (_bytes_of(prepared.key, keys, prepared.key_context),)
        return value, keys


def _bytes_of(serializer: Serializer[Any], value: Any, context: Context) -> bytes:
    try:
        made = serializer(value, context)
    except CannotEncode:
        raise
    except KeraError as error:
        raise cannot_encode(context, error.message) from error
    except Exception as error:  # a user's serializer may raise anything
        raise cannot_encode(context, error) from error
    if not isinstance(made, bytes):
        raise cannot_encode(context, f"its serializer gave {type(made).__name__}, not bytes")
    return made
