"""Chooses serializers and deserializers: users pass an object, a function, or the type of the values."""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

from google.protobuf.message import Message

from kera.client.serializers.model_classes import is_model
from kera.client.serializers.models import ModelDeserializer, ModelSerializer
from kera.client.serializers.plain import (
    BytesDeserializer,
    BytesSerializer,
    IntDeserializer,
    IntSerializer,
    NoneDeserializer,
    NoneSerializer,
    StrDeserializer,
    StrSerializer,
)
from kera.client.serializers.protobuf import ProtobufDeserializer, ProtobufSerializer
from kera.client.serializers.protocols import Deserializer, Serializer
from kera.core.errors import InvalidArgument

SerializerLike: TypeAlias = Serializer[Any] | type[Any] | None
"""The forms of serializers that a producer accepts; None: values are bytes."""
DeserializerLike: TypeAlias = Deserializer[Any] | type[Any] | None
"""The forms of deserializers that a consumer accepts; None: values stay bytes."""
_PLAIN: dict[Any, tuple[type[Serializer[Any]], type[Deserializer[Any]]]] = {
    bytes: (BytesSerializer, BytesDeserializer),
    str: (StrSerializer, StrDeserializer),
    int: (IntSerializer, IntDeserializer),
    type(None): (NoneSerializer, NoneDeserializer),
}


def serializer_of(given: Any, parameter: str = "serializer") -> Serializer[Any]:
    """Return `given`, or the serializer of a type (`str`, `int`, a dataclass, …). Raises `InvalidArgument`."""
    if isinstance(given, type):
        if given in _PLAIN:
            return _PLAIN[given][0]()
        if is_model(given):
            return ModelSerializer(given)
        if issubclass(given, Message):
            return ProtobufSerializer(given)
    elif callable(given) and not _is_asynchronous(given):
        return given  # type: ignore[no-any-return]
    raise _wrong(given, parameter)


def deserializer_of(given: Any, parameter: str = "deserializer") -> Deserializer[Any]:
    """Return `given`, or the deserializer of a type. Raises `InvalidArgument`."""
    if isinstance(given, type):
        if given in _PLAIN:
            return _PLAIN[given][1]()
        if is_model(given):
            return ModelDeserializer(given)
        if issubclass(given, Message):
            return ProtobufDeserializer(given)
    elif callable(given) and not _is_asynchronous(given):
        return given  # type: ignore[no-any-return]
    raise _wrong(given, parameter)


def _is_asynchronous(given: Any) -> bool:
    return inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(type(given).__call__)


def _wrong(given: Any, parameter: str) -> InvalidArgument:
    hint = f"; did you mean {given.__name__}()?" if isinstance(given, type) and "__call__" in vars(given) else ""
    return InvalidArgument(
        f"{parameter} is {given!r}, and takes a serializer such as JsonSerializer(), a function of a value and its"
        f" context, or a type: str, int, bytes, a dataclass, a pydantic model, a message of Protobuf{hint}",
        field=parameter,
    )
