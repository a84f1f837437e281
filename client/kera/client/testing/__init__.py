"""A cluster for tests: brokers and a coordinator in this process, which clients reach over real sockets.

::

    async with FakeCluster(brokers=2) as cluster:
        client = cluster.client()
        await client.admin.create_stream("orders")
        async with client.producer() as producer:
            await producer.prepare("orders")
            await producer.send("orders", b"hello")
        assert cluster.stream("orders").values() == [b"hello"]

It speaks the clients' protocol, keeps everything in memory, and fails when and how a test asks for it:
`FakeBroker.refuse`, `slow_down`, `pause`, `crash` and `restart`; `FakeStream.seal` and `move`;
`FakeCluster.take_over`. See ``docs/testing-your-code.md``.

It keeps the promises that clients rely on: order, deduplication, fencing of named producers, and positions that stay
valid over moves. It refuses with `InvalidArgument` the calls that plan Spark's reads, group consumers, streams with
several entries, changes of a schema and settings of retention. It has no shared memory. Test such code against a real
cluster, which the fixture ``kera_dev`` of `kera.pytest_plugin` starts.
"""

try:
    from kera.client.testing.broker import FakeBroker
    from kera.client.testing.cluster import FakeCluster
    from kera.client.testing.coordinator import FakeCoordinator
    from kera.client.testing.streams import FakeStream, FakeStreamlet, StoredChunk
except ModuleNotFoundError as error:
    message = f"{error.name} is missing; install it with: pip install 'kera[testing]'"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["FakeBroker", "FakeCluster", "FakeCoordinator", "FakeStream", "FakeStreamlet", "StoredChunk"]
