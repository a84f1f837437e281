"""A coordinator refuses metadata that have a record which it cannot read, and names the record."""

import pytest

from kera.coordinator.cluster.keys import last_id, member_key, stream_key
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
async def test_a_record_that_cannot_be_read_is_named(cluster: Cluster, key: str, value: bytes) -> None:
    stream = await _with_a_stream(cluster)
    key = stream if key == "stream" else key
    await _spoil(cluster.store, key, value)

    with pytest.raises(MetadataDamaged, match=key):
        await cluster.restart()


@pytest.mark.parametrize("key", ["handover/1/0", "starts/1/0", "moves/1/0", "handed-over/01", "access/default"])
async def test_garbage_is_named_where_a_record_may_be_empty(cluster: Cluster, key: str) -> None:
    await _spoil(cluster.store, key, SPOILT[1])

    with pytest.raises(MetadataDamaged, match=key):
        await cluster.restart()


@pytest.mark.parametrize("key", [CLUSTER_ID, last_id("broker")])
async def test_what_others_depend_on_is_not_made_anew(cluster: Cluster, key: str) -> None:
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
