"""A silent network: producers and consumers continue when it is back. The short forms of the chaos programs `network`
and `silence`.

Real cuts need hosts of their own, and so special rights. A proxy that stops in the middle of a connection runs
anywhere: the kernels at both ends notice nothing, and only requests without an answer show the problem.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client, ClientSettings
from kera.core.base.address import split_address
from kera.core.rpc.frame_client import FrameChannel
from kera.local.cluster import RunningCluster
from tests.chaos.partitions import (
    BACKUP,
    BROKER,
    CLIENT,
    COORDINATOR,
    CUT,
    DELAY,
    FROM,
    HALF_OPEN,
    LOSS,
    NETWORK,
    SILENCE,
    Break,
    some_rounds,
)
from tests.integration.support import Follower, load, until
from tests.namespaces import why_not

CUT_S = 7.0
"""Left alone, TCP would next try 12.6 s after the beginning of the cut."""
BREAK_S = 2.0
PIECE_BYTES = 1 << 16
REQUEST_TIMEOUT_MS = 1_500
GOES_ON_S = 30.0


@pytest.mark.slow
async def test_clients_continue_after_their_host_was_cut_off(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    # Raises `Wrong` if the clients do not continue within `SILENT_S`.
    run = await SILENCE.short(tmp_path, seed=1, cuts=CUT_S, store_cut=0, transports="tcp", vanish=0)
    assert run.seen["acknowledged"] > 0


@pytest.mark.slow
async def test_clients_continue_when_broken_links_between_roles_are_healed(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    work, brokers, backups = "clients", ("broker-1", "broker-2"), ("backup-1", "backup-2")
    rounds = [
        Break((CLIENT, BROKER), FROM, (work,), brokers[:1], BREAK_S),
        Break((BROKER, COORDINATOR), HALF_OPEN, brokers, ("coordinator",), BREAK_S),
        Break((BROKER, BACKUP), CUT, brokers, backups[:1], BREAK_S),
        Break((CLIENT, BROKER), LOSS, (work,), brokers, BREAK_S, loss=0.1),
        Break((BROKER, BACKUP), DELAY, brokers, backups, BREAK_S),
    ]
    run = NETWORK.run_of(tmp_path, "--seed", "1")
    done = await some_rounds(run, rounds, 1)
    assert len(done) == len(rounds)
    assert run.seen["acknowledged"] > 0
    assert done[1].restarted == ("coordinator",)


class Proxy:
    """Forwards connections until they are frozen: then they stay open, and let nothing through."""

    def __init__(self, server: str) -> None:
        self._to = split_address(server)
        self._tasks: set[asyncio.Task[None]] = set()
        self._frozen: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""
        self.connections = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        onward_reader, onward_writer = await asyncio.open_connection(*self._to)
        for from_, to in ((reader, onward_writer), (onward_reader, writer)):
            self._tasks.add(asyncio.create_task(self._forward(from_, to)))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(PIECE_BYTES):
                    if asyncio.current_task() in self._frozen:
                        await asyncio.Event().wait()
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.transport.abort()

    def freeze(self) -> None:
        """Let nothing through any more on the existing connections."""
        self._frozen |= self._tasks

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted connections are gone in the loop's next round


async def test_a_silent_open_connection_is_replaced_by_a_new_one(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies: dict[str, Proxy] = {}
    connect = FrameChannel.connect_tcp

    async def through_proxy(address: str, **options: Any) -> FrameChannel:
        if address not in proxies:
            proxies[address] = Proxy(address)
            await proxies[address].start()
        return await connect(proxies[address].address, **options)

    monkeypatch.setattr(FrameChannel, "connect_tcp", through_proxy)
    settings = ClientSettings(transport="tcp", request_timeout_ms=REQUEST_TIMEOUT_MS)
    async with await Client.connect(cluster.bootstrap, settings) as client:
        await client.admin.create_stream("proxied", streamlets=2)
        async with client.producer() as producer, client.consumer("proxied", start="earliest") as consumer:
            await producer.prepare("proxied")
            follower = Follower(consumer)
            async with load(producer, "proxied") as running, asyncio.TaskGroup() as tasks:
                following = tasks.create_task(follower.run())

                def beyond(count: int) -> bool:
                    return len(running.deliveries) > count and all(
                        len(numbers) > count // 2 for numbers in follower.seen.values()
                    )

                await until(lambda: beyond(100))
                for proxy in proxies.values():
                    proxy.freeze()
                sent = running.sent
                await until(lambda: beyond(sent), GOES_ON_S)
                running.stopping = True
                await until(lambda: sum(map(len, follower.seen.values())) == running.sent)
                following.cancel()
    for streamlet, numbers in follower.seen.items():
        assert numbers == list(range(streamlet, running.sent, 2)), "each once, and in order"
    assert all(proxy.connections > 1 for proxy in proxies.values())
    for proxy in proxies.values():
        await proxy.close()
