"""Copies of the metadata: their content, damaged copies, and putting a copy back into a store."""

import json
import zlib

import pytest

from kera.coordinator.coordinator import COPY_BYTES_MAX
from kera.coordinator.store import metadata_copy
from kera.coordinator.store.leadership import LEADER
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import Check, VersionConflict, Write
from kera.coordinator.store.metadata_copy import RESTORED, pack, put_back, unpack
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.core.rpc.limits import BULK_BYTES_MAX, check_size
from kera.v1 import coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster

RECORDS = {"cluster_id": b"c", "streams/01": b"\x00\xff" * 10, "empty": b""}
AFTER = {**RECORDS, RESTORED: b"{}"}


def test_a_copy_has_all_records_except_the_leader() -> None:
    copy = unpack(pack({**RECORDS, LEADER: b"me"}, 17))

    assert copy == ("c", 17, RECORDS)


@pytest.mark.parametrize("at", [-1, -20, 30])
def test_a_damaged_copy_is_refused(at: int) -> None:
    data = bytearray(pack(RECORDS, 17))
    data[at] ^= 1
    with pytest.raises(InvalidArgument):
        unpack(bytes(data))


@pytest.mark.parametrize("data", [b"", b"{}\n", b"[1]\n", b"anything else", pack(RECORDS, 17)[:-3]])
def test_an_incomplete_copy_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        unpack(data)


def with_body(body: bytes, **fields: object) -> bytes:
    """A copy with another body, a right checksum, and other fields in its head; None removes a field."""
    head = {**json.loads(pack(RECORDS, 17).partition(b"\n")[0]), "crc32": f"{zlib.crc32(body):08x}", **fields}
    return json.dumps({key: value for key, value in head.items() if value is not None}).encode() + b"\n" + body


@pytest.mark.parametrize(
    "data",
    [
        with_body(b"no zlib"),
        with_body(zlib.compress(bytes(100))[:-3]),
        with_body(zlib.compress(b"\x01")),
        with_body(zlib.compress(b"\x05\0\0\0\x09\0\0\0key")),
        with_body(zlib.compress(b"\x01\0\0\0\0\0\0\0\xff")),
        with_body(zlib.compress(b""), created_us="yesterday"),
        with_body(zlib.compress(b""), cluster_id=None),
    ],
)
def test_a_copy_whose_records_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="is damaged"):
        unpack(data)


def test_a_copy_that_unpacks_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    monkeypatch.setattr(metadata_copy, "UNPACKED_BYTES_MAX", limit)
    assert unpack(pack({"largest": bytes(limit - 15)}, 17)).records
    with pytest.raises(InvalidArgument, match=f"more than {limit} bytes") as raised:
        unpack(pack({"largest": bytes(limit)}, 17))
    assert raised.value.attributes == {"limit_bytes": limit}


async def test_a_copy_is_put_back_into_an_empty_store() -> None:
    store = MemoryStore()
    await put_back(store, pack(RECORDS, 17))

    assert {key: record.value for key, record in (await store.list("")).items()} == AFTER


async def test_existing_metadata_are_replaced_only_with_force() -> None:
    store, leader = MemoryStore(), b'{"address": "me:1", "epoch": 3}'
    await store.write(Write("cluster_id", b"d", 0), Write("streams/02", b"x", 0), Write(LEADER, leader, 0))
    with pytest.raises(InvalidArgument, match="--force"):
        await put_back(store, pack(RECORDS, 17))
    assert (await store.list("streams/")).keys() == {"streams/02"}

    await put_back(store, pack(RECORDS, 17), force=True)

    assert {key: record.value for key, record in (await store.list("")).items()} == {**AFTER, LEADER: leader}
    with pytest.raises(VersionConflict):  # each write of a leader depends on this record
        await store.write(Check(LEADER, 1), Write("streams/03", b"y", 0))


async def test_a_cluster_continues_from_a_copy(cluster: Cluster) -> None:
    await cluster.register("a")
    stream = await cluster.create("orders")
    copy = await cluster.coordinator.copy_metadata()
    cluster_id = cluster.coordinator.state.cluster_id
    await cluster.create("younger")
    cluster.store = MemoryStore()
    await put_back(cluster.store, copy)

    await cluster.restart()

    assert cluster.coordinator.state.cluster_id == cluster_id
    assert [one.name for one in cluster.coordinator.state.catalog.streams()] == ["orders"]
    assert cluster.coordinator.state.catalog.named("orders") == stream


def test_the_largest_copy_fits_into_an_answer() -> None:
    answer = coordinator_pb2.ReadMetadataResponse(copy=bytes(COPY_BYTES_MAX))

    check_size(api.READ_METADATA, answer.ByteSize(), 0, BULK_BYTES_MAX)
