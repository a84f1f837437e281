"""Targets: schemas, descriptions, read answers and pushed messages, as a client decodes them."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from google.protobuf.message import Message

from kera.client.admin.control import BrokerLoad, DrainStatus, RecoveryDescription, StreamletMove
from kera.client.cluster import push_connect
from kera.client.cluster.fetch import Fetched, NewerSchema, Wanted, batches_of
from kera.client.cluster.push import PushChannel, SubscriptionEnd
from kera.client.cluster.read_session import ReadSession
from kera.client.producing.encoding.partitioner import streamlet_of
from kera.client.producing.lanes.stream_lanes import ProducerIdentity, StreamLanes
from kera.client.settings import ConsumerSettings
from kera.client.types import BackupDescription, BrokerDescription, EntryBounds, StreamDescription, UnlistedStream
from kera.coordinator.cluster import validation
from kera.core.base.ids import EntryId, Position
from kera.core.errors import KeraError, ProtocolError, SchemaMismatch, invariant
from kera.core.format.schema import schema_to_bytes
from kera.core.push import RUN, VERSION, Decoder, PushKind, Run, encode, encode_numbers, numbers_of, runs_of, taken_of
from kera.core.rpc.method import Reply
from kera.core.rpc.wire import parse
from kera.spark_connector.columns import columns_of
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2, push_pb2
from tests.chaos.chunk_uses import stream_of
from tests.chaos.chunks import arrow_source
from tests.fuzz.chunk_targets import numbered
from tests.fuzz.exchanges import filled, theirs
from tests.fuzz.mutating import mutated, near, pieces, wild
from tests.fuzz.payloads import GROUP_ID, SEGMENT_ID, STREAM_ID, framed, placed, sources, spoilt_chunk
from tests.fuzz.protobuf import spoilt
from tests.fuzz.target import Target
from tests.fuzz.wire_targets import in_loop, in_loop_until
from tests.unit.core.rpc.fake_transport import FakeTransport

ENTRY = EntryId(STREAM_ID, 0, 0)
START = Position(GROUP_ID, SEGMENT_ID, 0)
SETTINGS = ConsumerSettings()


# -- schemas -----------------------------------------------------------------------------------------------------------


@cache
def _schemas() -> list[bytes]:
    return [
        *(schema_to_bytes(source.batch.schema) for source in sources()),
        schema_to_bytes(
            pa.schema([("d", pa.dictionary(pa.int8(), pa.string())), ("x", pa.int8())], metadata={"some": "thing"})
        ),
    ]


def _schema(random_: Random) -> bytes:
    return mutated(random_.choice(_schemas()), random_, _schemas())


def _look_at_schema(data: bytes) -> str:
    """Create a stream's description with a schema as a coordinator does, then use it as readers do."""
    stream = common_pb2.StreamInfo()
    stream.CopyFrom(theirs().stream)
    stream.schemas[0].CopyFrom(validation.checked_schema(common_pb2.StreamSchema(arrow_schema=data)))
    description = StreamDescription.from_message(stream)
    repr(description)
    with contextlib.suppress(SchemaMismatch):  # Spark lacks some of Arrow's types
        columns_of(description.schema, typed=True)
    added = validation.extended_schema(stream, data, lambda number: number + 1)
    invariant(not added, "columns that are there count as new ones")
    return "schema"


# -- descriptions ------------------------------------------------------------------------------------------------------


def _stream_and_brokers(message: coordinator_pb2.DescribeStreamResponse) -> object:
    """Make a producer's objects for the stream."""
    stream = StreamDescription.from_message(message.stream, message.brokers)
    StreamLanes(stream, ProducerIdentity(producer_id=9, first_epoch=0, last_epoch=4))
    streamlet_of(b"key", stream.config.streamlets)
    return stream


_DESCRIBED: tuple[tuple[type[Message], Callable[[Any], object]], ...] = (
    (coordinator_pb2.DescribeStreamResponse, _stream_and_brokers),
    (common_pb2.BrokerInfo, BrokerDescription.from_message),
    (common_pb2.BackupInfo, BackupDescription.from_message),
    (broker_pb2.EntryInfo, EntryBounds.from_message),
    (coordinator_pb2.UnknownStream, UnlistedStream.from_message),
    (coordinator_pb2.Move, StreamletMove.from_message),
    (coordinator_pb2.BrokerLoad, BrokerLoad.from_message),
    (coordinator_pb2.DrainResponse, DrainStatus.from_message),
    (coordinator_pb2.RecoveryInfo, RecoveryDescription.from_message),
)


@cache
def _described(number: int) -> Message:
    kind, _ = _DESCRIBED[number]
    if kind is coordinator_pb2.DescribeStreamResponse:
        return coordinator_pb2.DescribeStreamResponse(stream=theirs().stream, brokers=[theirs().broker])
    return filled(kind)


def _description(random_: Random) -> bytes:
    number = random_.choice((0, 0, 0, random_.randrange(len(_DESCRIBED))))
    return numbered(number, spoilt(_described(number), random_))


def _describe(data: bytes) -> str:
    number = int.from_bytes(data[:4], "little") % len(_DESCRIBED)
    kind, make = _DESCRIBED[number]
    repr(make(parse(kind, data[4:])))
    return "described"


# -- answers to reads --------------------------------------------------------------------------------------------------


@cache
def log_chunks() -> list[bytes]:
    """Chunks of a few records with the default schema, as they lie in a log."""
    batch = sources()[0].batch
    found = []
    for at in range(3):
        few = arrow_source(pa.RecordBatch.from_pylist(batch.slice(3 * at, 3).to_pylist(), batch.schema))
        found.append(placed(framed(few, few.payload, sequence=at), 3 * at))
    return found


def _read_answer(random_: Random) -> bytes:
    chunks = list(log_chunks())
    if random_.random() < 0.4:
        at = random_.randrange(len(chunks))
        chunks[at] = spoilt_chunk(chunks[at], random_)
    bulk = b"".join(chunks)
    message = broker_pb2.MultiReadChunksResponse(session_kept=True)
    for handle, length in ((1, len(chunks[0])), (2, len(bulk) - len(chunks[0]))):
        row = message.results.add(handle=handle, length_bytes=length, lag_records=3)
        row.next.CopyFrom(
            common_pb2.Cursor(stream_id=STREAM_ID, group_id=GROUP_ID, segment_id=SEGMENT_ID, position=length)
        )
        if random_.random() < 0.2:
            row.begins_at = random_.choice((1, 128, wild(random_, 32)))
    head = spoilt(message, random_) if random_.random() < 0.7 else message.SerializeToString()
    return numbered(len(head), head + bulk)


class _Item:
    """A range that a read session reads."""

    def __init__(self) -> None:
        self.wanted = Wanted(ENTRY, START, None)


class _Channel:
    """A channel that answers every request with the same reply."""

    def __init__(self, reply: Reply[Any]) -> None:
        self._reply = reply

    async def submit(self, *_: Any, **__: Any) -> Reply[Any]:
        return self._reply


def _read(data: bytes) -> str:
    """A read session takes an answer, and its chunks are opened."""
    size = int.from_bytes(data[:4], "little")
    message, bulk = parse(broker_pb2.MultiReadChunksResponse, data[4 : 4 + size]), memoryview(data)[4 + size :]
    session = ReadSession(_Channel(Reply(message, [bulk])), items=[_Item(), _Item()])  # type: ignore[arg-type]
    told = in_loop_until(session.read(bytes_max=1 << 20, wait_ms=0, timeout_s=1.0))
    for each in told:
        _open(each.fetched)
        if each.fetched.error is not None:
            repr(each.fetched.error.attributes)
    return "read"


def _open(fetched: Fetched) -> None:
    try:
        for batch in batches_of(fetched, stream_of(sources()[0].batch.schema), SETTINGS):
            batch.batch.validate(full=True)
    except NewerSchema as newer:
        invariant(newer.rest.buffers, "nothing is left of what was not opened")


# -- pushed messages ---------------------------------------------------------------------------------------------------

SLOTS, SLOT_BYTES, ROWS_AT, ROW_BYTES, SLOTS_AT = 4, 1 << 14, 4096, 64, 8192
ARENA_BYTES = SLOTS_AT + SLOTS * SLOT_BYTES
LANES = 3


@cache
def _arena() -> memoryview:
    """The shared memory of a broker: each slot has chunks, and those of the last slot are corrupt."""
    memory = mmap.mmap(-1, ARENA_BYTES)
    for slot in range(SLOTS):
        memory[ROWS_AT + slot * ROW_BYTES : ROWS_AT + slot * ROW_BYTES + 8] = (slot + 1).to_bytes(8, "little")
        data = bytearray(b"".join(log_chunks()))
        if slot == SLOTS - 1:
            data[500] ^= 1
        memory[SLOTS_AT + slot * SLOT_BYTES : SLOTS_AT + slot * SLOT_BYTES + len(data)] = bytes(data)
    return memoryview(memory)


def broker_hello(**changed: Any) -> push_pb2.PushHello:
    """A broker's greeting."""
    fields: dict[str, Any] = {
        "version": VERSION, "broker_id": 1, "broker_epoch": 1, "arena_path": "/nowhere", "arena_bytes": ARENA_BYTES,
        "slots": SLOTS, "slot_bytes": SLOT_BYTES, "slots_at": SLOTS_AT, "rows_at": ROWS_AT, "row_bytes": ROW_BYTES,
    }  # fmt: skip
    return push_pb2.PushHello(**{**fields, **changed})


def some_run(random_: Random) -> Run:
    """A run, unchanged half of the time, else with one field changed."""
    slot, first = random_.randrange(SLOTS), random_.randrange(3)
    length = sum(map(len, log_chunks()[first:]))
    offset = sum(map(len, log_chunks()[:first]))
    run = Run(
        random_.randrange(1, LANES + 1), slot, slot + 1, SLOTS_AT + slot * SLOT_BYTES + offset, length, SEGMENT_ID,
        GROUP_ID + slot, offset, 5,
    )  # fmt: skip
    if random_.random() < 0.5:
        return run
    at = random_.randrange(len(run))
    bits = 64 if at in {2, 3, 6, 8} else 32
    return run._replace(**{run._fields[at]: near(random_, run[at], bits)})


def _pushed(random_: Random) -> bytes:
    """Messages of a broker, with the length of the first piece in front."""
    messages = []
    for _ in range(random_.choice((1, 2, 4))):
        match random_.randrange(4):
            case 0:
                end = push_pb2.PushEnd(lane=random_.randrange(LANES + 2), reason=random_.randrange(1, 6))  # type: ignore[arg-type]
                end.next.CopyFrom(theirs().cursors[0])
                if end.reason == push_pb2.PushEnd.FAILED:
                    end.error.CopyFrom(common_pb2.Error(code="data_lost", message="gone", attributes={"x": "[1]"}))
                body = spoilt(end, random_) if random_.random() < 0.6 else end.SerializeToString()
                messages.append(encode(PushKind.END, body))
            case 1:
                kind = random_.choice(list(PushKind))
                messages.append(encode(kind, random_.choice((b"", random_.randbytes(64), bytes(8)))))
            case _:
                runs = [some_run(random_) for _ in range(random_.choice((1, 1, 3)))]
                messages.append(encode(PushKind.RUNS, b"".join(RUN.pack(*run) for run in runs)))
    data = b"".join(messages)
    if random_.random() < 0.3:
        data = mutated(data, random_, messages)
    parts = pieces(data, random_)
    return numbered(len(parts[0]) if parts else 0, data)


def _take_pushed(data: bytes) -> str:
    """A client's runs lie within the arena's slots, and all of its subscriptions end with the connection."""
    size, data = int.from_bytes(data[:4], "little"), data[4:]
    ended: list[SubscriptionEnd] = []
    fetched: list[Fetched] = []

    def push() -> bool:
        channel = PushChannel(broker_hello(), _arena(), Decoder(), "somewhere")
        transport = FakeTransport()
        channel.connection_made(transport)
        reader = channel.subscriber("some", 1 << 20)
        for _ in range(LANES):
            reader.open(Wanted(ENTRY, START, None), fetched.append, ended.append)
        channel.data_received(data[:size])
        if not transport.closed:
            channel.data_received(data[size:])
        failed, transport.closed = transport.closed, True
        channel.connection_lost(None)
        return failed

    failed = in_loop(push)
    invariant(len(ended) == LANES, f"{len(ended)} of {LANES} subscriptions have ended with their connection")
    first = pa.py_buffer(_arena()).address
    for each in fetched:
        (buffer,) = each.buffers
        at = buffer.address - first
        invariant(at >= SLOTS_AT and at + buffer.size <= ARENA_BYTES, "a run that lies elsewhere")
        with contextlib.suppress(KeraError):
            _open(each)
    return f"{'refused' if failed else 'taken'}, {len(fetched)} runs"


def _greeting(random_: Random) -> bytes:
    return spoilt(broker_hello(arena_path="."), random_)


@cache
def _arena_file() -> Path:
    descriptor, path = tempfile.mkstemp()
    os.truncate(descriptor, ARENA_BYTES)
    os.close(descriptor)
    return Path(path)


def _greet(data: bytes) -> str:
    """A client maps a broker's memory by the greeting, and reads the numbers at the places that it names."""
    hello = parse(push_pb2.PushHello, data)
    with socket.socket(socket.AF_UNIX) as unconnected:
        memory = push_connect._map(hello, os.open(_arena_file(), os.O_RDONLY), unconnected)

    def look() -> None:
        channel = PushChannel(hello, memory, Decoder(), "somewhere")
        invariant(sum(channel._generations) == 0, "other numbers than are there")

    in_loop(look)
    return "mapped"


def _message(random_: Random) -> bytes:
    """Messages of a reader, and of a broker."""
    subscribe = push_pb2.PushSubscribe(consumer_group="some", window_bytes=1 << 20)
    subscribe.lanes.add(lane=1, start=theirs().cursors[0])
    messages = [
        encode(PushKind.SUBSCRIBE, spoilt(subscribe, random_)),
        encode_numbers(PushKind.CANCEL, [1, 2, wild(random_, 32)]),
        encode_numbers(PushKind.RELEASE, [wild(random_, 32)] * random_.choice((1, 100))),
        encode(PushKind.TAKEN, wild(random_).to_bytes(8, "little")),
        encode(PushKind.RUNS, RUN.pack(*some_run(random_))),
        encode(PushKind.HELLO, spoilt(broker_hello(), random_)),
    ]
    random_.shuffle(messages)
    data = b"".join(messages[: random_.choice((1, 2, 3))])
    data = mutated(data, random_, messages) if random_.random() < 0.6 else data
    parts = pieces(data, random_)
    return numbered(len(parts[0]) if parts else 0, data)


_BODIES: dict[PushKind, Callable[[bytes], object]] = {
    PushKind.HELLO: lambda body: parse(push_pb2.PushHello, body),
    PushKind.RUNS: lambda body: list(runs_of(body)),
    PushKind.END: lambda body: parse(push_pb2.PushEnd, body),
    PushKind.SUBSCRIBE: lambda body: parse(push_pb2.PushSubscribe, body),
    PushKind.CANCEL: numbers_of,
    PushKind.RELEASE: numbers_of,
    PushKind.TAKEN: taken_of,
}


def _decode(data: bytes) -> str:
    """Any pieces give the same messages, and the same error behind them."""
    size, data = int.from_bytes(data[:4], "little"), data[4:]
    whole, parts = _decoded([data]), _decoded([data[:size], data[size:]])
    invariant(whole == parts, "in pieces it says something else")
    for kind, body in whole[0]:
        with contextlib.suppress(ProtocolError):
            _BODIES.get(kind, bytes)(body)
    return "refused" if whole[1] else f"{min(3, len(whole[0]))} messages"


def _decoded(parts: list[bytes]) -> tuple[list[tuple[PushKind, bytes]], str]:
    decoder = Decoder()
    found: list[tuple[PushKind, bytes]] = []
    try:
        for part in parts:
            found.extend(decoder.feed(part))
    except ProtocolError as error:
        return found, error.message
    return found, ""


CLIENT_TARGETS = (
    Target("schemas", _schema, _look_at_schema, ("kera.core.format.schema", "kera.coordinator.cluster.validation")),
    Target("descriptions", _description, _describe, ("kera.client.types", "kera.client.admin.control")),
    Target("read-answers", _read_answer, _read, ("kera.client.cluster.read_session", "kera.client.cluster.fetch")),
    Target("push-messages", _message, _decode, ("kera.core.push",)),
    Target("push-to-client", _pushed, _take_pushed, ("kera.core.push", "kera.client.cluster.push")),
    Target("push-greetings", _greeting, _greet, ("kera.client.cluster.push_connect",)),
)
