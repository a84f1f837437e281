"""Conversions of values and keys into bytes, and back: JSON, Avro, Protobuf, msgpack, models, and plain values.

A *serializer* is called with a value and its `Context`, and returns bytes; a *deserializer* is called with bytes. Pass
them to `Client.producer`, `Client.consumer` and `Client.group_consumer`; any such function will do. Those here promise:

* a value that cannot be converted to bytes raises `CannotEncode`, which names the field, and nothing is sent;
* bytes are not trusted: invalid ones raise `CannotDecode`, in bounded time and memory;
* None is not a value (it means that a key is deleted), with every serializer.

They hold no state, so one of them may serve any number of producers and consumers. Those of Avro, JSON Schema and
msgpack need libraries: ``pip install 'kera[serializers]'``.
"""

from kera.client.serializers.avro import AvroDeserializer, AvroSerializer
from kera.client.serializers.choosing import DeserializerLike, SerializerLike, deserializer_of, serializer_of
from kera.client.serializers.columns.models import arrow_schema_of
from kera.client.serializers.json import JsonDeserializer, JsonSerializer
from kera.client.serializers.models import ModelDeserializer, ModelSerializer
from kera.client.serializers.msgpack import MsgpackDeserializer, MsgpackSerializer
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
from kera.client.serializers.protocols import Context, Deserializer, Schemas, Serializer

__all__ = [
    "AvroDeserializer",
    "AvroSerializer",
    "BytesDeserializer",
    "BytesSerializer",
    "Context",
    "Deserializer",
    "DeserializerLike",
    "IntDeserializer",
    "IntSerializer",
    "JsonDeserializer",
    "JsonSerializer",
    "ModelDeserializer",
    "ModelSerializer",
    "MsgpackDeserializer",
    "MsgpackSerializer",
    "NoneDeserializer",
    "NoneSerializer",
    "ProtobufDeserializer",
    "ProtobufSerializer",
    "Schemas",
    "Serializer",
    "SerializerLike",
    "StrDeserializer",
    "StrSerializer",
    "arrow_schema_of",
    "deserializer_of",
    "serializer_of",
]
