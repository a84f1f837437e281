import pytest

from tests.unit.coordinator.fake_cluster import Cluster
from tests.unit.coordinator.latency.support import World


@pytest.fixture
async def world(cluster: Cluster) -> World:
    """A broker, and two streams, each of which a consumer group reads."""
    made = World(cluster)
    await made.begin()
    return made
