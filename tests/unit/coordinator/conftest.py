from collections.abc import AsyncIterator

import pytest

from tests.unit.coordinator.fake_cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A new cluster, without brokers."""
    made = Cluster()
    await made.restart()
    yield made
    await made.close()
