"""Named producers: one id per name, increasing epochs, and fences against earlier instances."""

import asyncio

import pytest

from kera.coordinator.operations import producers
from kera.coordinator.operations.producers import Instance
from kera.core.base.ids import PRODUCER_EPOCHS
from kera.core.errors import InvalidArgument, Unavailable
from tests.unit.coordinator.fake_cluster import Cluster, until

SECOND = 1 + PRODUCER_EPOCHS


def test_each_instance_of_a_name_has_epochs_above_all_earlier_ones() -> None:
    instance = Instance(7, producers.FIRST_EPOCH)
    taken: set[int] = set()
    for _ in range(5):
        epochs = set(range(instance.first_epoch, instance.first_epoch + PRODUCER_EPOCHS))
        assert not taken or min(epochs) > max(taken)
        taken |= epochs
        instance = producers.successor("loader", instance)
        assert instance.producer_id == 7


def test_a_name_without_further_epochs_is_refused() -> None:
    last = (1 << 32) - PRODUCER_EPOCHS
    assert producers.successor("loader", Instance(7, last - PRODUCER_EPOCHS)) == (7, last)
    with pytest.raises(InvalidArgument, match="1048576 producers with the name 'loader'"):
        producers.successor("loader", Instance(7, last))


def test_the_number_of_producer_names_is_limited() -> None:
    producers.check_room("loader", producers.NAMES_MAX - 1)
    with pytest.raises(InvalidArgument, match="no room for a producer with the new name 'loader'"):
        producers.check_room("loader", producers.NAMES_MAX)


def test_each_producer_name_has_its_own_record() -> None:
    assert producers.record_key("etl.loader-1") == "producers/etl.loader-1"


# --- fences ------------------------------------------------------------------------------------------------------


def told(cluster: Cluster, version: int = 0) -> tuple[int, dict[int, int]]:
    """The version of the fences, and the fences since an earlier version."""
    message = cluster.coordinator.producers.fences(version)
    assert message is not None
    return message.version, dict(zip(message.producer_ids, message.first_epochs, strict=True))


async def some_turns() -> None:
    """Let others run, until all wait for something else."""
    for _ in range(20):
        await asyncio.sleep(0)


async def fenced(cluster: Cluster, first_epoch: int) -> int:
    """Wait until the epochs of ``loader`` before this one are fenced; return the version of the fences."""
    await until(lambda: told(cluster)[1] == {1: first_epoch}, "the earlier epochs are fenced")
    await some_turns()
    return told(cluster)[0]


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    """Two brokers, and one instance of the producer name ``loader``."""
    for launch in "ab":
        await cluster.register(launch)
    assert await cluster.coordinator.producers.init("loader") == (1, 1)
    return cluster


async def test_a_successor_waits_until_all_live_brokers_have_its_fence(two: Cluster) -> None:
    second = asyncio.create_task(two.coordinator.producers.init("loader"))
    version = await fenced(two, SECOND)
    await two.heartbeat(1, fences_version=version)
    await two.heartbeat(2)  # it has not got the fence yet
    await some_turns()
    assert not second.done()

    await two.heartbeat(2, fences_version=version)
    assert await second == (1, SECOND)
    assert two.coordinator.producers.fences(version) is None


async def test_the_first_instance_of_a_name_does_not_wait_for_brokers(two: Cluster) -> None:
    assert await two.coordinator.producers.init("other") == (2, 1)
    assert await two.coordinator.producers.init() == (3, 1)
    assert told(two, version=77 << 32)[1] == {}


async def test_a_successor_does_not_wait_for_a_dead_broker(two: Cluster) -> None:
    await two.silence(2)
    second = asyncio.create_task(two.coordinator.producers.init("loader"))
    await two.heartbeat(1, fences_version=await fenced(two, SECOND))

    assert await second == (1, SECOND)
    await two.heartbeat(2)  # it was only paused, and gets the fence with this answer
    third = asyncio.create_task(two.coordinator.producers.init("loader"))
    await two.heartbeat(1, fences_version=await fenced(two, SECOND + PRODUCER_EPOCHS))
    await some_turns()
    assert not third.done()
    third.cancel()


async def test_the_error_names_a_broker_that_does_not_confirm_a_fence(two: Cluster) -> None:
    two.settings = two.settings.model_copy(update={"heartbeat_interval_ms": 10, "heartbeats_missed_max": 1})
    await two.restart()
    with pytest.raises(Unavailable, match="broker 1 has not said yet that it refuses earlier"):
        await two.coordinator.producers.init("loader")


async def test_a_successor_fails_when_the_coordinator_closes(two: Cluster) -> None:
    second = asyncio.create_task(two.coordinator.producers.init("loader"))
    await fenced(two, SECOND)
    await two.coordinator.close()
    with pytest.raises(Unavailable):
        await second


async def test_the_next_coordinator_sends_all_fences_and_then_only_new_ones(cluster: Cluster) -> None:
    for name in ("p", "q", "p", "q", "once"):
        await cluster.coordinator.producers.init(name)
    version, fences = told(cluster)
    assert fences == {1: SECOND, 2: SECOND}
    await cluster.coordinator.producers.init("p")
    assert told(cluster, version)[1] == {1: SECOND + PRODUCER_EPOCHS}

    await cluster.restart()
    later, fences = told(cluster, version)
    assert fences == {1: SECOND + PRODUCER_EPOCHS, 2: SECOND}
    assert later > version
    assert cluster.coordinator.producers.fences(later) is None
