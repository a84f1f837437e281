import pytest

from tests.unit.coordinator.fake_cluster import Cluster
from tests.unit.coordinator.latency.support import World


@pytest.fixture
async def world(cluster: Cluster) -> World:
    """A broker and two streams; a consumer group reads each stream."""
    made = World(cluster)
    await made.begin()
    return made
