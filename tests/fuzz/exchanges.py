"""Valid messages between peers: a request and an answer of every method.

The requests are those of `field_cases`, about resources of a cluster. A method that is missing there, and each answer,
gets a message with a value in every field, so a new method is fuzzed at once.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from crc32c import crc32c
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.rpc import Method, api
from kera.core.rpc.frames import HEADER_BYTES, FrameKind, with_header
from kera.v1 import common_pb2
from tests.chaos.chunks import batches
from tests.fuzz.mutating import mutated, near, wild
from tests.fuzz.protobuf import spoilt
from tests.integration.field_cases import CASES, Theirs

METHODS: tuple[Method[Any, Any], ...] = tuple(
    sorted({each for each in vars(api).values() if isinstance(each, Method)}, key=lambda method: method.number)
)
"""All methods of the tables, in the order of their numbers."""
DEPTH_MAX = 3
"""Depth limit of the messages within messages that are filled."""
STREAMLETS = 2
MessageT = TypeVar("MessageT", bound=Message)


@cache
def theirs() -> Theirs:
    """The resources in requests that no daemon gets."""
    schemas = [common_pb2.StreamSchema(schema_id=1, arrow_schema=schema_to_bytes(DEFAULT_SCHEMA))]
    config = common_pb2.StreamConfig(streamlets=STREAMLETS, entries=1, group_segments=4)
    assignments = [
        common_pb2.StreamletAssignment(streamlet_id=number, broker_id=1, broker_epoch=1, first_group_id=1)
        for number in range(STREAMLETS)
    ]
    stream = common_pb2.StreamInfo(stream_id=7, name="foreign", config=config, schemas=schemas, assignments=assignments)
    return Theirs(
        stream=stream,
        consumer_group="foreign-group",
        member="foreign-member",
        producer="foreign-producer",
        cursors=tuple(
            common_pb2.Cursor(stream_id=7, streamlet_id=number, group_id=1, segment_id=1)
            for number in range(STREAMLETS)
        ),
        broker=common_pb2.BrokerInfo(broker_id=1, broker_epoch=1, frames_address="127.0.0.1:1"),
        coordinator_epoch=1,
    )


def request_of(method: Method[Any, Any], of: Theirs) -> Message:
    """A valid request; for a method without a case, one with a value in every field."""
    return CASES[method].build(of) if method in CASES else filled(method.request)


def filled(kind: type[MessageT], depth: int = DEPTH_MAX) -> MessageT:
    """A message with a value in every field."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            value = _VALUES.get(field.cpp_type, 1)
            if field.type == FieldDescriptor.TYPE_BYTES:
                value = theirs().stream.schemas[0].arrow_schema if "schema" in field.name else b"some"
            if field.is_repeated:
                getattr(message, field.name).extend([value, value])
            else:
                setattr(message, field.name, value)
        elif depth and not field.message_type.GetOptions().map_entry:
            within = getattr(message, field.name)
            inner = filled(type(within.add() if field.is_repeated else within), depth - 1)
            (within[0] if field.is_repeated else within).CopyFrom(inner)
    return message


_VALUES: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_STRING: "some",
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
}


# -- frames ------------------------------------------------------------------------------------------------------------

_FIELDS = (
    ("kind", 3, 1),
    ("method", 4, 4),
    ("request id", 8, 8),
    ("head", 16, 4),
    ("bulk", 20, 4),
    ("reserved", 24, 4),
)
"""Fields of a frame's header with a checksum: name, place, width."""


class Frame(NamedTuple):
    """The parts of a frame."""

    kind: int
    method: int
    request_id: int
    head: bytes
    bulk: bytes = b""

    @property
    def data(self) -> bytes:
        """The bytes that are sent."""
        return with_header(self.head, FrameKind(self.kind), self.method, self.request_id, len(self.bulk)) + self.bulk


def checked(header: bytes | bytearray) -> bytes:
    """A frame's header whose fields were changed, with a valid checksum."""
    return bytes(header[:28]) + crc32c(bytes(header[:28])).to_bytes(4, "little")


def with_spoilt_header(data: bytes, random_: Random) -> bytes:
    """A frame with another number in one field of its header, and a valid checksum."""
    header = bytearray(data[:HEADER_BYTES])
    _, at, width = random_.choice(_FIELDS)
    was = int.from_bytes(header[at : at + width], "little")
    header[at : at + width] = near(random_, was, 8 * width).to_bytes(width, "little")
    return checked(header) + data[HEADER_BYTES:]


def conversation(frames: list[Frame], random_: Random) -> bytes:
    """The bytes of frames after a few changes: some repeated, moved or cut, some with other headers."""
    sent = [frame.data for frame in frames]
    for _ in range(random_.choice((1, 1, 2))):
        at = random_.randrange(len(sent))
        match random_.randrange(7):
            case 0:
                sent.insert(random_.randrange(len(sent) + 1), sent[at])
            case 1:
                random_.shuffle(sent)
            case 2:
                sent[at] = sent[at][: random_.randrange(len(sent[at]) + 1)]
            case 3:
                sent[at] = mutated(sent[at], random_, sent)
            case _:
                sent[at] = with_spoilt_header(sent[at], random_)
    return b"".join(sent)


# -- chunks ------------------------------------------------------------------------------------------------------------


def chunk_of(of: Theirs, streamlet: int, sequence: int, producer_id: int, rows: int = 3) -> bytes:
    """A chunk that a broker accepts, if it is the next chunk of its producer."""
    return encode_chunk(
        _payload(rows),
        record_count=rows,
        stream_id=of.stream.stream_id,
        streamlet_id=streamlet,
        schema_id=of.stream.schemas[-1].schema_id,
        producer_id=producer_id,
        producer_epoch=0,
        sequence=sequence,
        created_us=5,
        min_timestamp_us=0,
        max_timestamp_us=5,
    ).to_bytes()


@cache
def _payload(rows: int) -> pa.Buffer:
    return encode_payload(batches()[1].slice(0, rows))


@cache
def _request_of(method: Method[Any, Any]) -> Message:
    return request_of(method, theirs())


def spoilt_request(method: Method[Any, Any], of: Theirs, random_: Random) -> bytes:
    """The head of a valid request, with changes."""
    return spoilt(_request_of(method) if of is theirs() else request_of(method, of), random_)


def some_number(random_: Random) -> int:
    """A request's number, often a small one."""
    return random_.choice((random_.randrange(1, 100), wild(random_)))
