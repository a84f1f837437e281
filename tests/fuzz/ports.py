"""Inputs for the ports of daemons: frames, gRPC, HTTP, readers' messages. Pure: made from a seed and a `World`.

They call every method of each service, also at daemons that lack it. A request that is *meant* to change somebody
else's resources is not sent (`World.allows`): an admitted user may delete a stream by its name, without any defect.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from kera.core.errors import CorruptChunk, ProtocolError
from kera.core.format.chunk import MAGIC, verify_run
from kera.core.push import PushKind, encode, encode_numbers
from kera.core.rpc import Method, api
from kera.core.rpc.frames import HEADER_BYTES as FRAME_BYTES
from kera.core.rpc.frames import FrameKind, decode_header
from kera.core.rpc.grpc_options import AUTHENTICATE_METADATA, ERROR_METADATA
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.v1 import access_pb2, push_pb2
from tests.fuzz import http2
from tests.fuzz.exchanges import METHODS, Frame, chunk_of, conversation, request_of
from tests.fuzz.hello import spoilt_hello
from tests.fuzz.mutating import mutated, wild
from tests.fuzz.payloads import framed, placed, sources, spoilt_chunk, spoilt_payload, with_payload
from tests.fuzz.protobuf import spoilt
from tests.fuzz.wire_targets import http_head
from tests.integration.field_cases import CASES, STRANGER_ID, Theirs

_BY_NUMBER = {method.number: method for method in METHODS}
SERVICES = {
    "coordinator": {api.COORDINATOR, api.CONSUMER_GROUPS, api.ACCESS, api.LATENCY},
    "broker": {api.BROKER},
    "backup": {api.BACKUP},
}
"""Services that only daemons of a role have. All daemons have any other service."""
WAIT_MS_MAX = 50
"""Requests that want to wait longer for an answer are not sent."""
REQUESTS_MAX = 16
"""Requests of one connection."""
OTHER_SERVICE = 0.05
"""How often a daemon gets a call of a method that it may not have."""
TRIES = 1_000
STRANGERS = 1 << 16
VALID = 0.15
"""The share of requests that are valid, so that the cluster has some state to break."""
STREAM_ID_AT = 16
"""The place of the stream id in a chunk's header."""
GROUP = "group:"
"""Prefix of a consumer group's name in the path of a latency constraint."""
_SAYS_WHERE = frozenset({"kera.v1.StreamletAssignment"})
"""Messages that name brokers without changing them."""
LOGINS = 0.4
"""How often a client authenticates where daemons ask for it."""
SCRAM_STEPS = (
    b"n,,n=some,r=fyko+d2lbbFgONRv9qkxdawL",
    b"n,,n=admin,r=rOprNGfwEbeRWgbNEkqO",
    b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
)
TOKENS = (
    "kera_0123_4567",
    "kera_",
    "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9.",
    "eyJhbGciOiJSUzI1NiIsImtpZCI6IngifQ.e30.AA",
)
GRPC_PATHS = ("/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")


@dataclass(frozen=True)
class World:
    """The contents of a cluster: those that requests use, and those that belong to others."""

    foreign: Theirs
    names: frozenset[str]
    """Names of others' streams, consumer groups, members and producers."""
    stream_ids: frozenset[int]
    member_ids: frozenset[int]
    """Ids of the cluster's brokers and backups."""
    producer_ids: tuple[int, ...]
    """Ids that the coordinator has given to any client that asked."""
    asks: bool = False
    """Daemons ask clients to authenticate: then many requests do."""
    valid: float = VALID
    """The share of requests that are valid."""
    requests: dict[int, Message] = field(default_factory=dict, compare=False)
    strangers: set[int] = field(default_factory=set, compare=False)
    """Ids of invented brokers whose replicas backups may have."""

    def request(self, method: Method[Any, Any]) -> Message:
        """A valid request."""
        return self.requests.setdefault(method.number, request_of(method, self.foreign))

    def allows(self, method: Method[Any, Any], head: bytes, bulk: bytes = b"") -> bool:
        """Whether a request, as far as a daemon parses it, leaves others' resources alone."""
        if self._has_chunks_of_others(bulk) or self._has_chunks_of_others(head):
            return False
        try:
            message = method.request.FromString(head)
        except DecodeError:
            return True
        case = CASES.get(method)
        rights = case.rights if case is not None else tuple(each.name for each in message.DESCRIPTOR.fields)
        return not any(self._is_of_others(*_field(message, name)) for name in rights)

    def _is_of_others(self, message: Message, known: FieldDescriptor) -> bool:
        kind = known.message_type
        if kind is not None and (kind.GetOptions().map_entry or kind.full_name in _SAYS_WHERE):
            return False
        found = getattr(message, known.name)
        for value in found if known.is_repeated else [found]:
            if kind is not None:
                if any(self._is_of_others(value, each) for each in kind.fields):
                    return True
            elif known.type == FieldDescriptor.TYPE_STRING:
                if value.removeprefix(GROUP) in self.names:
                    return True
            elif known.name.startswith("stream_id"):
                if value in self.stream_ids:
                    return True
            elif known.name.startswith(("broker_id", "backup_id")) and value in self.member_ids:
                return True
        return False

    def _has_chunks_of_others(self, data: bytes) -> bool:
        at = data.find(MAGIC)
        while at >= 0:
            stream_id = int.from_bytes(data[at + STREAM_ID_AT : at + STREAM_ID_AT + 8], "little")
            if stream_id in self.stream_ids:
                return True
            at = data.find(MAGIC, at + 1)
        return False


def _field(message: Message, path: str) -> tuple[Message, FieldDescriptor]:
    """A field by its name, or ``inner.name`` in a message within the message; with the message that has it."""
    *outer, name = path.split(".")
    for each in outer:
        message = getattr(message, each)
    known: Any = message.DESCRIPTOR.fields_by_name[name]
    return message, known


class Sent(NamedTuple):
    """The bytes that are sent over a connection."""

    data: bytes
    requests: int
    """Whole requests, which are answered; 0 if unknown."""


class Called(NamedTuple):
    """The path, messages and metadata of a call of gRPC."""

    path: str
    messages: list[bytes]
    metadata: list[tuple[str, str | bytes]]
    is_stream: bool


def methods_of(role: str, random_: Random) -> Method[Any, Any]:
    """A method, mostly one that the daemon has."""
    return random_.choice(METHODS if random_.random() < OTHER_SERVICE else _methods(role))


def _method(role: str, world: World, random_: Random) -> Method[Any, Any]:
    return api.AUTHENTICATE if world.asks and random_.random() < LOGINS else methods_of(role, random_)


@cache
def _methods(role: str) -> list[Method[Any, Any]]:
    of_others = set().union(*SERVICES.values()) - SERVICES[role]
    return [method for method in METHODS if method.service not in of_others]


def request(method: Method[Any, Any], world: World, random_: Random) -> tuple[bytes, bytes]:
    """Head and bulk of a request, most of the time with changes."""
    for _ in range(TRIES):
        bulk = _bulk(method, world, random_)
        message = world.request(method)
        if method.service == api.BACKUP:
            message = _of_a_stranger(method, world, random_, bulk)
        elif method is api.AUTHENTICATE:
            message = _login(random_)
        head = message.SerializeToString() if random_.random() < world.valid else spoilt(message, random_)
        if world.allows(method, head, bulk) and not _waits(method, head):
            return head, bulk
    raise AssertionError(f"nothing can be said with {method.name} that is not about somebody else's")


def _of_a_stranger(method: Method[Any, Any], world: World, random_: Random, bulk: bytes) -> Message:
    """A request of an invented broker to a backup. The id varies, because a fence is permanent."""
    message: Any = method.request()
    message.CopyFrom(world.request(method))
    message.broker_id = STRANGER_ID + random_.randrange(STRANGERS) + STRANGERS * (method is api.FENCE_BROKER)
    if method is api.REPLICATE:
        world.strangers.add(message.broker_id)
        message.virtual_log_id, message.persist = 1, random_.random() < 0.2
        message.close = random_.random() < 0.2
        with contextlib.suppress(CorruptChunk):
            _, message.checksum = verify_run(memoryview(bulk), 0, 0, 1 << 10)
    found: Message = message
    return found


def _login(random_: Random) -> Message:
    message = access_pb2.AuthenticateRequest()
    if random_.random() < 0.4:
        message.token = random_.choice(TOKENS)
    else:
        message.scram = random_.choice(SCRAM_STEPS)
        message.exchange_id = random_.choice((0, 0, 1, wild(random_)))
        if random_.random() < 0.5:
            message.scram = mutated(message.scram, random_, SCRAM_STEPS)
    return message


def _waits(method: Method[Any, Any], head: bytes) -> bool:
    """Whether a request asks for a long wait before its answer."""
    if "wait_ms" not in method.request.DESCRIPTOR.fields_by_name:
        return False
    try:
        return bool(method.request.FromString(head).wait_ms > WAIT_MS_MAX)
    except DecodeError:
        return False


def _bulk(method: Method[Any, Any], world: World, random_: Random) -> bytes:
    if method is api.MULTI_WRITE_CHUNKS:
        return b"".join(hostile_chunk(world, random_) for _ in range(random_.choice((1, 1, 2, 5))))
    if method is api.REPLICATE:
        chunks = b"".join(placed(hostile_chunk(world, random_)) for _ in range(random_.choice((0, 1, 1, 3))))
        return mutated(chunks, random_) if random_.random() < 0.3 else chunks
    return chunk_of(world.foreign, 0, 0, 9) if method.bulk and random_.random() < 0.1 else b""


def hostile_chunk(world: World, random_: Random) -> bytes:
    """A chunk for the foreign stream, most of the time with something wrong."""
    producer_id = random_.choice(world.producer_ids)
    if random_.random() < world.valid:
        return chunk_of(world.foreign, random_.randrange(2), 0, producer_id)
    source = sources()[random_.choice((0, 1))]
    chunk = bytearray(framed(source, source.payload))
    schema_id = world.foreign.stream.schemas[-1].schema_id
    struct.pack_into(
        "<QIIQ", chunk, STREAM_ID_AT, world.foreign.stream.stream_id, random_.randrange(2), schema_id, producer_id
    )
    payload = source.payload if random_.random() < 0.5 else spoilt_payload(source, random_)
    whole = with_payload(bytes(chunk), payload)
    return whole if random_.random() < 0.4 else spoilt_chunk(whole, random_)


# -- frames ------------------------------------------------------------------------------------------------------------


def frames(role: str, world: World, random_: Random) -> Sent:
    """Requests over a framed connection: whole frames, or now and then invalid ones."""
    sent = []
    for number in range(random_.randrange(1, REQUESTS_MAX + 1)):
        method = _method(role, world, random_)
        sent.append(Frame(FrameKind.REQUEST, method.number, number + 1, *request(method, world, random_)))
    if random_.random() < max(0.7, world.valid):
        return Sent(b"".join(frame.data for frame in sent), len(sent))
    return Sent(_harmless(conversation(sent, random_), sent, world), 0)


def _harmless(data: bytes, sent: list[Frame], world: World) -> bytes:
    """`data`, or the original frames if the changed bytes would affect others' resources."""
    at = 0
    while at < len(data):
        try:
            header = decode_header(memoryview(data), at, BULK_BYTES_MAX)
        except (ProtocolError, struct.error):
            return data  # the connection ends here
        begin = at + FRAME_BYTES
        at = begin + header.head_bytes
        method = _BY_NUMBER.get(header.method)
        if method is not None and not world.allows(method, data[begin:at], data[at : at + header.bulk_bytes]):
            return b"".join(frame.data for frame in sent)
        at += header.bulk_bytes
    return data


# -- gRPC --------------------------------------------------------------------------------------------------------------


def call(role: str, world: World, random_: Random) -> Called:
    """A call of gRPC with bytes and metadata that no client sends."""
    method = _method(role, world, random_)
    messages = []
    for _ in range(random_.choice((1, 1, 3)) if method.bulk else 1):
        head, bulk = request(method, world, random_)
        messages.append(head + http2.bulk_field(bulk) if bulk else head)
    path = method.path
    if random_.random() < 0.05:
        path = random_.choice((*GRPC_PATHS, path + "x", path[:-1], "/", "/x/y", path.replace("kera", "KERA")))
        messages = [mutated(each, random_) for each in messages]
        messages = [each for each in messages if not world._has_chunks_of_others(each)]
    metadata = _metadata(random_)
    if method is api.AUTHENTICATE and random_.random() < 0.8:
        metadata.append((AUTHENTICATE_METADATA, messages.pop() if messages else b""))
    return Called(path, messages or [b""], metadata, method.bulk)


def _metadata(random_: Random) -> list[tuple[str, str | bytes]]:
    keys = (ERROR_METADATA, "some-bin", "grpc-timeout", "te", "content-type", "user-agent", "x", "grpc-encoding")
    found: list[tuple[str, str | bytes]] = []
    for _ in range(random_.choice((0, 0, 1, 3, 30))):
        key = random_.choice(keys)
        size = random_.choice((0, 1, 50, 900))
        value: str | bytes = random_.randbytes(size) if key.endswith("-bin") else "v" * size
        found.append((key, value))
    return found


def raw_http2(role: str, world: World, random_: Random) -> Sent:
    """A call of gRPC as bytes of HTTP/2, some of them changed."""
    method = methods_of(role, random_)
    head, bulk = request(method, world, random_)
    data = http2.spoilt_call(method.path, head + (http2.bulk_field(bulk) if bulk else b""), random_)
    if world._has_chunks_of_others(data) or any(name.encode() in data for name in world.names):
        data = http2.PREFACE
    return Sent(data, 0)


# -- HTTP, and the push channel ----------------------------------------------------------------------------------------


def http(role: str, world: World, random_: Random) -> Sent:
    """A request for metrics or health."""
    del role, world
    return Sent(http_head(random_), 0)


def pushed(role: str, world: World, random_: Random) -> Sent:
    """A reader's messages to a broker's push socket."""
    del role
    messages = []
    for number in range(random_.randrange(1, 5)):
        subscribe = push_pb2.PushSubscribe(consumer_group="foreign-group", window_bytes=1 << 20)
        subscribe.lanes.add(lane=number + 1, start=random_.choice(world.foreign.cursors))
        body = subscribe.SerializeToString() if random_.random() < 0.4 else spoilt(subscribe, random_)
        messages.append(
            random_.choice(
                (
                    encode(PushKind.SUBSCRIBE, body),
                    encode(PushKind.SUBSCRIBE, body),
                    encode_numbers(PushKind.CANCEL, [random_.choice((1, number, wild(random_, 32)))]),
                    encode_numbers(
                        PushKind.RELEASE, [random_.choice((0, 1, wild(random_, 32)))] * random_.choice((1, 900))
                    ),
                    encode(PushKind.TAKEN, random_.choice((1, 100, wild(random_))).to_bytes(8, "little")),
                    encode(random_.choice(list(PushKind)), random_.randbytes(16)),
                )
            )
        )
    data = b"".join(messages)
    return Sent(mutated(data, random_, messages) if random_.random() < 0.3 else data, 0)


def unencrypted(role: str, world: World, random_: Random) -> Sent:
    """Bytes for a TLS port from a client that speaks TLS badly, or not at all."""
    if random_.random() < 0.7:
        return Sent(spoilt_hello(random_), 0)
    return Sent(random_.choice((frames, raw_http2, http))(role, world, random_).data, 0)


PROTOCOLS = {
    "frames_address": (frames,),
    "frames_unix_path": (frames,),
    "grpc_address": (call, raw_http2),
    "metrics_address": (http,),
    "push_unix_path": (pushed,),
}
"""The inputs for each kind of address in a daemon's ready line. A kind that is missing here is not fuzzed."""
UNENCRYPTED = dict.fromkeys(("frames_address", "grpc_address", "metrics_address"), (unencrypted,))
NO_PORTS = frozenset({"arena_path"})
"""Keys of a ready line that look like an address but name a file."""


def has_error(message: Message) -> str | None:
    """The text of an error in an answer, or in a part of it, that reports a defect of the daemon."""
    for known, value in message.ListFields():
        if known.message_type is None or known.message_type.GetOptions().map_entry:
            continue
        for each in value if known.is_repeated else [value]:
            if known.message_type.full_name == "kera.v1.Error" and each.code == "internal":
                return str(each.message)
            if (found := has_error(each)) is not None:
                return found
    return None
