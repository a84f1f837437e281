"""Closing a client in an unlucky moment leaves no open connections."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kera.client.cluster.cluster import Cluster
from kera.client.settings import ClientSettings
from kera.core.base.closing import close_all
from kera.core.coordinators import Coordinators
from kera.core.errors import ClosedError
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.client.support import stream_info

BROKERS = (1, 2, 3)


class Served(Cluster):
    """A cluster whose brokers only listen."""

    def __init__(self, ports: dict[int, int]) -> None:
        super().__init__("127.0.0.1:1", ClientSettings(transport="tcp"))
        self._ports = ports

    async def ask(self, *_: Any, **__: Any) -> Any:
        brokers = [
            common_pb2.BrokerInfo(broker_id=broker_id, broker_epoch=1, frames_address=f"127.0.0.1:{port}")
            for broker_id, port in self._ports.items()
        ]
        return coordinator_pb2.DescribeStreamResponse(stream=stream_info(), brokers=brokers)

    async def connect(self, broker_id: int) -> Channel:
        return await self.channel(await self.stream("s"), broker_id)


@pytest.fixture
async def cluster() -> AsyncIterator[Served]:
    servers = {broker_id: FrameServer({}) for broker_id in BROKERS}
    yield Served({broker_id: await server.listen_tcp("127.0.0.1", 0) for broker_id, server in servers.items()})
    for server in servers.values():
        await server.close()


@pytest.mark.parametrize("turns", range(5))
async def test_cancelling_the_close_of_a_client_leaves_no_open_connection(cluster: Served, turns: int) -> None:
    channels = [await cluster.connect(broker_id) for broker_id in BROKERS]

    async def close() -> None:
        if not turns and (this := asyncio.current_task()) is not None:
            this.cancel()
        await cluster.close()

    closing = asyncio.create_task(close())
    for _ in range(turns):
        await asyncio.sleep(0)
    if turns:
        closing.cancel()
    await asyncio.wait([closing])

    assert [channel.closed for channel in channels] == [True, True, True]


async def test_a_connection_opened_during_the_close_is_closed_too(
    cluster: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, made, go_on = FrameChannel.connect_tcp, list[FrameChannel](), asyncio.Event()

    async def connect_slowly(*arguments: Any, **options: Any) -> FrameChannel:
        made.append(await connect(*arguments, **options))
        await go_on.wait()
        return made[-1]

    monkeypatch.setattr(FrameChannel, "connect_tcp", connect_slowly)
    connecting = asyncio.create_task(cluster.connect(1))
    while not made:
        await asyncio.sleep(0)
    await cluster.close()
    go_on.set()

    with pytest.raises(ClosedError, match="the client is closed"):
        await connecting
    assert made[0].closed
    with pytest.raises(ClosedError, match="the client is closed"):
        await cluster.connect(2)
    assert len(made) == 1


async def test_asking_a_coordinator_after_the_close_fails() -> None:
    coordinators = Coordinators("127.0.0.1:1")
    await coordinators.close()
    with pytest.raises(ClosedError):
        await coordinators.ask(api.DESCRIBE_STREAM, coordinator_pb2.DescribeStreamRequest(), timeout_s=1.0)


async def test_close_all_closes_the_rest_when_one_fails() -> None:
    closed: list[int] = []

    async def close(number: int) -> None:
        closed.append(number)
        if number == 1:
            raise OSError("cannot close it")

    with pytest.raises(OSError, match="cannot close it"):
        await close_all([lambda number=number: close(number) for number in range(3)])  # type: ignore[misc]
    assert closed == [0, 1, 2]
