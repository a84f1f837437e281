"""Connections to backups for reading their replicas: made when they are needed, and not left open."""

import asyncio
import socket

import pytest

from kera.broker.backup_ways import BackupWays
from kera.broker.recovery.replica_fetcher import BackupLinks
from kera.broker.recovery.replica_reader import ReadLimits
from kera.core.errors import Unavailable, Uncertain
from kera.v1 import backup_pb2, common_pb2


async def test_the_connection_to_a_hung_backup_is_closed_and_replaced() -> None:
    ended: list[asyncio.Future[None]] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(one := asyncio.get_running_loop().create_future())
        await reader.read(-1)  # until the other side closes
        one.set_result(None)
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    info = common_pb2.BackupInfo(backup_id=1, frames_address=address, alive=True)
    links = BackupLinks(BackupWays(), ReadLimits(timeout_s=0.05))
    link = await links.get(info)
    assert await links.get(info) is link
    with pytest.raises(Uncertain):
        await link.read(backup_pb2.ReadReplicaRequest())

    another = await links.get(info)
    assert another is not link
    async with asyncio.timeout(10):
        await ended[0]
    assert not ended[1].done()
    await links.close()
    await ended[1]
    server.close()


async def test_an_unreachable_backup_is_unavailable_until_it_can_be_reached() -> None:
    links = BackupLinks(BackupWays(), ReadLimits(connect_timeout_s=30))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # until it listens, connections are refused
        address = "{}:{}".format(*server.getsockname())
        info = common_pb2.BackupInfo(backup_id=1, frames_address=address, alive=True)
        for _ in range(2):
            with pytest.raises(Unavailable):
                await links.get(info)
        server.listen()

        assert not (await links.get(info)).failed
        await links.close()
