"""A fake cluster with one stream, ``s``, and a client's view of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kera.client.cluster.cluster import Cluster
from kera.client.cluster.timing import Timing
from kera.client.testing import FakeCluster, FakeStream

STREAM_ID = 7
NEVER_S = 3600.0


@dataclass
class Fleet:
    """See the head of this module."""

    fake: FakeCluster
    s: FakeStream
    cluster: Cluster

    def questions(self, method: str = "DescribeStream") -> int:
        """The number of requests to the coordinator."""
        return len(self.fake.coordinator.requests.named(method))

    def cursors(self, broker_id: int) -> list[Any]:
        """Requests to truncate and to commit that a broker got."""
        requests = self.fake.brokers[broker_id].requests
        return requests.named("TruncateStreamlets") + requests.named("CommitCursors")

    def wanted(self, broker_id: int) -> list[int]:
        """The streamlets of all ranges that clients asked a broker for."""
        requests = self.fake.brokers[broker_id].requests.named("MultiReadChunks")
        return [each.start.streamlet_id for request in requests for each in request.ranges]


MakeFleet = Callable[..., Awaitable[Fleet]]


@asynccontextmanager
async def a_fleet(
    *, brokers: int = 3, streamlets: int = 1, timing: Timing | None = None, **settings: Any
) -> AsyncIterator[Fleet]:
    """A fake cluster for the length of a block; `settings` are the client's."""
    async with FakeCluster(brokers=brokers) as fake:
        cluster = Cluster(fake.bootstrap, fake.settings(**settings), timing=timing)
        try:
            yield Fleet(fake, fake.create_stream("s", streamlets=streamlets), cluster)
        finally:
            await cluster.close()
