import pytest

from tests.unit.coordinator.fake_cluster import Cluster


@pytest.fixture
async def cluster() -> Cluster:
    """A new cluster, without brokers."""
    made = Cluster()
    await made.restart()
    return made
