"""Messages as bytes: with bulk, they are exactly as protobuf serializes them."""

from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import ProtocolError, RecordTooLarge
from kera.core.rpc.api import BACKUP_METHODS, BROKER_METHODS
from kera.core.rpc.wire import BULK_FIELD, FIELDS_BESIDE_BULK_MAX, parse, parse_with_bulk, serialize_with_bulk
from kera.v1 import backup_pb2, broker_pb2, common_pb2, coordinator_pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=8)
CURSORS = st.builds(common_pb2.Cursor, stream_id=U64, streamlet_id=U32, entry=U32, group_id=U64, position=U32)
# At most one attribute: protobuf writes the items of a map in any order.
ERRORS = st.builds(
    common_pb2.Error,
    code=TEXT,
    message=TEXT,
    retriable=st.booleans(),
    attributes=st.dictionaries(TEXT, TEXT, max_size=1),
)
WRITES = st.builds(
    broker_pb2.MultiWriteChunksRequest,
    request_id=U64,
    durability=st.sampled_from([0, 1, 2, 3]),
    chunk_count=U32,
)
READS = st.builds(
    broker_pb2.MultiReadChunksResponse,
    request_id=U64,
    error=st.none() | ERRORS,
    results=st.lists(
        st.builds(broker_pb2.ReadResult, error=st.none() | ERRORS, next=CURSORS, length_bytes=U32, lag_records=U64),
        max_size=4,
    ),
)
MESSAGES_WITH_BULK = WRITES | READS
PIECES = st.lists(st.binary(max_size=300), max_size=4)


def by_protobuf(message: Any, bulk: bytes) -> bytes:
    whole = type(message)()
    whole.CopyFrom(message)
    whole.chunks = bulk
    return bytes(whole.SerializeToString())


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@st.composite
def odd_fields(draw: st.DrawFn) -> bytes:
    """A field as any peer may send it: known or not, of the right type or not, with the right length or not."""
    wire_type = draw(st.sampled_from([0, 1, 2, 2, 2, 3, 4, 5, 6, 7]))
    tag = varint(draw(st.sampled_from([0, 1, 2, 3, 15, 15, 16, 99])) << 3 | wire_type)
    if wire_type == 0:
        return tag + varint(draw(U64))
    if wire_type == 2:
        content = draw(st.binary(max_size=8))
        return tag + varint(len(content) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 1000])) % 2**32) + content
    return tag + bytes({1: 8, 5: 4}.get(wire_type, 0))


ODD_MESSAGES = st.lists(odd_fields(), max_size=5).map(b"".join)


def test_bulk_is_the_last_field_of_each_message() -> None:
    described = [message.fields_by_name for message in broker_pb2.DESCRIPTOR.message_types_by_name.values()]
    with_bulk = [fields for fields in described if "chunks" in fields]

    assert len(with_bulk) == 2
    for fields in with_bulk:
        assert fields["chunks"].number == BULK_FIELD == max(field.number for field in fields.values())
        assert fields["chunks"].type == fields["chunks"].TYPE_BYTES


# --- the same bytes as protobuf's --------------------------------------------------------------------------


@given(message=MESSAGES_WITH_BULK, pieces=PIECES)
def test_a_message_with_bulk_has_the_bytes_of_protobuf(message: Message, pieces: list[bytes]) -> None:
    assert serialize_with_bulk(message, pieces) == by_protobuf(message, b"".join(pieces))


@given(message=MESSAGES_WITH_BULK, bulk=st.binary(max_size=300))
def test_a_message_serialized_by_protobuf_is_parsed(message: Message, bulk: bytes) -> None:
    data = by_protobuf(message, bulk)

    parsed, found = parse_with_bulk(type(message), data)

    assert parsed == message
    assert found == bulk
    assert not bulk or found.obj is data  # in place


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_lengths_are_encoded_as_in_protobuf(size: int) -> None:
    message = broker_pb2.MultiWriteChunksRequest(request_id=1)

    data = serialize_with_bulk(message, [bytes(size)])

    assert data == by_protobuf(message, bytes(size))
    assert len(parse_with_bulk(type(message), data)[1]) == size


def test_bulk_may_be_given_in_pieces_of_any_kind() -> None:
    message = broker_pb2.MultiWriteChunksRequest(request_id=1)
    pieces = [memoryview(b"ab"), bytearray(b"cd"), memoryview(bytearray(8)).cast("Q"), b""]

    assert serialize_with_bulk(message, pieces) == by_protobuf(message, b"abcd" + bytes(8))


# --- messages of other programs ----------------------------------------------------------------------------


@given(message=MESSAGES_WITH_BULK, bulk=st.binary(min_size=1, max_size=300), field=st.sampled_from([16, 1000]))
def test_bulk_before_later_fields_is_found(message: Any, bulk: bytes, field: int) -> None:
    # A client of a later version of the protocol may have a field after it.
    later = varint(field << 3 | 2) + b"\x02hi"
    data = by_protobuf(message, bulk)

    for reordered in (data + later, varint(BULK_FIELD << 3 | 2) + varint(len(bulk)) + bulk + later):
        parsed, found = parse_with_bulk(type(message), reordered)
        assert found == bulk
        assert not parsed.chunks


def test_fields_after_the_bulk_override_earlier_ones_even_with_zero() -> None:
    before = backup_pb2.ReadReplicaResponse(request_id=5, replica=backup_pb2.ReplicaInfo(length=7)).SerializeToString()
    behind = b"\x08\x00" + b"\x1a\x02\x30\x00"  # the request's id, and in the replica its length
    bulk = b"\x7a\x02hi"

    parsed, found = parse_with_bulk(backup_pb2.ReadReplicaResponse, before + bulk + behind)

    assert bytes(found) == b"hi"
    assert (parsed.request_id, parsed.replica.length) == (0, 0)
    with pytest.raises(ProtocolError, match="not a kera"):
        parse_with_bulk(backup_pb2.ReadReplicaResponse, before + bulk + b"\x1a\x02\x30\x80")


@given(message=MESSAGES_WITH_BULK, first=st.binary(min_size=1, max_size=9), second=st.binary(max_size=9))
def test_the_last_of_two_bulk_fields_counts_as_in_protobuf(message: Any, first: bytes, second: bytes) -> None:
    data = by_protobuf(message, first) + b"\x7a" + varint(len(second)) + second

    parsed, found = parse_with_bulk(type(message), data)

    assert found == second == type(message).FromString(data).chunks
    assert not parsed.chunks


# The contents look like the bulk field, so that a step of the wrong length finds another end of the message.
DECEPTIVE = bytes(4) + b"\x7a\x08\0\0"


@pytest.mark.parametrize(
    "unknown",
    [
        varint(20 << 3 | 0) + varint(2**64 - 1),
        varint(20 << 3 | 1) + DECEPTIVE,
        varint(20 << 3 | 2) + b"\x08" + DECEPTIVE,
        varint(20 << 3 | 5) + DECEPTIVE[4:],
    ],
    ids=["varint", "fixed64", "bytes", "fixed32"],
)
def test_unknown_fields_before_the_bulk_are_skipped(unknown: bytes) -> None:
    data = b"\x08\x07" + unknown + b"\x7a\x04bulk"

    parsed, found = parse_with_bulk(broker_pb2.MultiWriteChunksRequest, data)

    assert parsed.request_id == 7
    assert bytes(found) == b"bulk"
    assert found.obj is data  # in place


def test_fields_that_cannot_be_skipped_are_left_to_protobuf() -> None:
    group = varint(20 << 3 | 3) + varint(20 << 3 | 4)

    parsed, found = parse_with_bulk(broker_pb2.MultiWriteChunksRequest, b"\x08\x07" + group + b"\x7a\x04bulk")

    assert parsed.request_id == 7
    assert bytes(found) == b"bulk"


@given(message=MESSAGES_WITH_BULK, bulk=st.binary(min_size=1, max_size=50), data=st.data())
def test_a_message_that_is_cut_short_is_treated_as_by_protobuf(message: Any, bulk: bytes, data: st.DataObject) -> None:
    whole = by_protobuf(message, bulk)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1), label="length")]

    agrees_with_protobuf(type(message), cut)


@given(noise=st.binary() | ODD_MESSAGES)
def test_noise_is_refused_exactly_when_protobuf_refuses_it(noise: bytes) -> None:
    agrees_with_protobuf(broker_pb2.MultiWriteChunksRequest, noise)
    agrees_with_protobuf(broker_pb2.MultiReadChunksResponse, noise)


def agrees_with_protobuf(message_type: Any, data: bytes) -> None:
    try:
        expected = message_type.FromString(data)
    except Exception:  # noqa: BLE001 - whatever protobuf finds wrong
        expected = None
    try:
        parsed, bulk = parse_with_bulk(message_type, data)
    except ProtocolError:
        assert expected is None
    else:
        assert expected is not None
        assert expected.chunks == bulk
        expected.ClearField("chunks")
        assert parsed == expected


@pytest.mark.parametrize("data", [b"\x08", b"\x0a\x05abc", b"\xff" * 20, b"\x08" + b"\x80" * 11])
def test_invalid_bytes_are_refused_with_the_name_of_the_message(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_with_bulk(broker_pb2.MultiWriteChunksRequest, data)
    with pytest.raises(ProtocolError, match=r"not a kera\.v1\.GetStreamIdRequest message"):
        parse(coordinator_pb2.GetStreamIdRequest, data)


def test_a_parsed_message_does_not_keep_its_memory() -> None:
    memory = bytearray(coordinator_pb2.GetStreamIdRequest(name="orders").SerializeToString())

    message = parse(coordinator_pb2.GetStreamIdRequest, memoryview(memory))
    memory[:] = bytes(len(memory))

    assert message.name == "orders"


@pytest.mark.parametrize("bulk_first", [False, True])
def test_the_limit_of_a_message_does_not_count_the_bulk(bulk_first: bool) -> None:
    head, bulk = broker_pb2.MultiReadChunksRequest(removed=range(1000)).SerializeToString(), bytes(5000)
    field = b"\x7a" + varint(len(bulk)) + bulk
    data = field + head if bulk_first else head + field

    _, found = parse_with_bulk(broker_pb2.MultiWriteChunksRequest, data, len(head))

    assert found == bulk
    with pytest.raises(RecordTooLarge, match=f"has {len(head)} bytes beside its bulk"):
        parse_with_bulk(broker_pb2.MultiWriteChunksRequest, data, len(head) - 1)


def test_requests_with_chunks_have_few_other_fields() -> None:
    """Chunks behind more fields would count as part of the message, which has a much lower limit."""
    requests = [method.request.DESCRIPTOR for method in (*BROKER_METHODS, *BACKUP_METHODS) if method.bulk]
    with_chunks = [each for each in requests if BULK_FIELD in each.fields_by_number]

    assert len(with_chunks) >= 2
    for each in with_chunks:
        assert len(each.fields) < FIELDS_BESIDE_BULK_MAX
        assert not [field.name for field in each.fields if field.is_repeated]


def test_the_limit_of_a_message_holds_for_many_fields() -> None:
    data = broker_pb2.MultiReadChunksRequest(ranges=[broker_pb2.ReadRange()] * 1000).SerializeToString()

    assert len(parse_with_bulk(broker_pb2.MultiReadChunksRequest, data, len(data))[0].ranges) == 1000
    with pytest.raises(RecordTooLarge):
        parse_with_bulk(broker_pb2.MultiReadChunksRequest, data, len(data) - 1)
