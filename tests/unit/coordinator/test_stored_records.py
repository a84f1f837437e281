"""A coordinator refuses metadata with unreadable or missing records, and names them."""

import json

import pytest

from kera.coordinator.cluster.keys import last_id, member_key, stream_key
from kera.coordinator.store.census import missing_in
from kera.coordinator.store.leadership import LEADER
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import MetadataDamaged, Write
from kera.coordinator.store.metadata_copy import CLUSTER_ID, pack, put_back
from tests.unit.coordinator.fake_cluster import Cluster

BROKER = member_key("broker", 1)
SPOILT = (b"", b"\xff\x00garbage")


async def _spoil(store: MemoryStore, key: str, value: bytes | None) -> None:
    found = await store.get(key)
    await store.write(Write(key, value, found.version if found else 0))


async def _with_a_stream(cluster: Cluster) -> str:
    await cluster.register("launch")
    return stream_key((await cluster.create("stream")).stream_id)


@pytest.mark.parametrize("value", SPOILT)
@pytest.mark.parametrize(
    "key",
    [
        "stream",
        BROKER,
        CLUSTER_ID,
        last_id("broker"),
        last_id("stream"),
        LEADER,
        "access/users/ann",
        "access/rules/0000000000000001",
        "access/tokens/t",
        "applications/group/0000000000000001/00000000",
        "application_uses/group",
        "applications_clock",
        "drops/0000000000000001",
        "feature_level",
        "forgotten/brokers/00000009",
        "latency/fast",
        "producer-blocks/01",
        "producer-claims/01/02",
        "producers/mine",
        "recoveries/00000001/0000000000000001",
        "schemas/ids/00000001",
        "schemas/subjects/abc",
    ],
)
async def test_the_error_names_an_unreadable_record(cluster: Cluster, key: str, value: bytes) -> None:
    stream = await _with_a_stream(cluster)
    key = stream if key == "stream" else key
    await _spoil(cluster.store, key, value)

    with pytest.raises(MetadataDamaged, match=key):
        await cluster.restart()


@pytest.mark.parametrize("key", ["handover/1/0", "starts/1/0", "moves/1/0", "handed-over/01", "access/default"])
async def test_the_error_names_an_unreadable_record_whose_kind_may_be_empty(cluster: Cluster, key: str) -> None:
    await _spoil(cluster.store, key, SPOILT[1])

    with pytest.raises(MetadataDamaged, match=key):
        await cluster.restart()


@pytest.mark.parametrize("key", [CLUSTER_ID, last_id("broker")])
async def test_a_missing_record_that_others_depend_on_is_damage(cluster: Cluster, key: str) -> None:
    await _with_a_stream(cluster)
    await _spoil(cluster.store, key, None)

    with pytest.raises(MetadataDamaged, match=key):
        await cluster.restart()


async def test_a_restored_copy_replaces_a_damaged_record_of_the_leader(cluster: Cluster) -> None:
    await _with_a_stream(cluster)
    copy = pack(cluster.coordinator.state.ledger.snapshot(), 0)
    await _spoil(cluster.store, LEADER, SPOILT[1])

    await put_back(cluster.store, copy, force=True)

    assert await cluster.store.get(LEADER) is None
    assert len((await cluster.restart()).state.catalog) == 1


@pytest.mark.parametrize("value", [None, b"\x0a\x01x"])
async def test_a_deleted_or_replaced_record_is_detected_by_the_census(cluster: Cluster, value: bytes | None) -> None:
    key = await _with_a_stream(cluster)
    await cluster.create("other")
    await cluster.restart()
    kept = cluster.store.records[key].value
    await _spoil(cluster.store, key, value)

    with pytest.raises(MetadataDamaged) as raised:
        await cluster.restart()

    problem = (
        "2 records below streams/ should be there, and 1 is"
        if value is None
        else ("2 records below streams/ should be there, and others were found")
    )
    assert raised.value.message == (
        f"the metadata are damaged: {problem}; put a copy back with kera cluster restore FILE --force, or delete record"
        " census/streams to go on with what is there"
    )
    assert raised.value.attributes == {"key": "census/streams"}
    with pytest.raises(MetadataDamaged):
        await cluster.restart()
    await _spoil(cluster.store, key, kept)
    assert len((await cluster.restart()).state.catalog) == 2


async def test_deleting_the_census_accepts_the_remaining_records(cluster: Cluster) -> None:
    await _spoil(cluster.store, await _with_a_stream(cluster), None)
    with pytest.raises(MetadataDamaged):
        await cluster.restart()
    await _spoil(cluster.store, "census/streams", None)

    assert not len((await cluster.restart()).state.catalog)
    await cluster.heartbeat(1)
    await cluster.create("another")
    assert len((await cluster.restart()).state.catalog) == 1


async def test_the_census_misses_the_last_record_of_a_kind_but_not_a_deleted_stream(cluster: Cluster) -> None:
    key = await _with_a_stream(cluster)
    await cluster.coordinator.streams.delete("stream")
    assert len((await cluster.restart()).state.catalog) == 0
    assert "census/streams" not in cluster.store.records
    await cluster.heartbeat(1)
    key = stream_key((await cluster.create("stream")).stream_id)
    await _spoil(cluster.store, key, None)
    with pytest.raises(MetadataDamaged, match="1 record below streams/ should be there, and 0 are"):
        await cluster.restart()


@pytest.mark.parametrize("value", [b"", b"[]", b'{"records": "many", "sum": 0}'])
async def test_the_error_names_an_unreadable_census(cluster: Cluster, value: bytes) -> None:
    await _with_a_stream(cluster)
    await _spoil(cluster.store, "census/streams", value)
    with pytest.raises(MetadataDamaged, match="record census/streams cannot be read"):
        await cluster.restart()


def test_a_census_is_taken_anew_after_an_earlier_version_has_led() -> None:
    def led_since(epoch: int) -> dict[str, bytes]:
        return {LEADER: json.dumps({"epoch": 9, "census_since": epoch}).encode()}

    def completed(records: dict[str, bytes]) -> dict[str, bytes]:
        changes = missing_in(records)
        return {key: value for key, value in {**records, **changes}.items() if value is not None}

    kept = completed({"streams/1": b"a", "streams/2": b"b", **led_since(5)})
    assert completed(kept) == kept
    without = {key: value for key, value in kept.items() if key != "streams/2"}
    with pytest.raises(MetadataDamaged, match="2 records below streams/ should be there, and 1 is"):
        completed(without)
    # A coordinator that keeps no census has led in between, and deleted the stream.
    anew = completed(without | led_since(7))
    assert json.loads(anew["census/streams"])["records"] == 1
    with pytest.raises(MetadataDamaged, match=r"census/\.since cannot be read"):
        completed(anew | {"census/.since": b"x"})
