"""A slow network that loses packets, as TCP shows it: a lost packet comes late, and all packets after it, too."""

from __future__ import annotations

import asyncio
import contextlib
import random
from types import TracebackType
from typing import Self

PACKET_BYTES = 1400
RETRANSMISSION_S_MIN = 0.2


class SlowNetwork:
    """Connections to `host`:`port` lead to a server elsewhere."""

    def __init__(self, server: tuple[str, int], *, delay_s: float, loss: float, seed: int) -> None:
        """`delay_s`: one way. `loss`: the fraction of packets that are lost."""
        self._server = server
        self._delay_s = delay_s
        self._loss = loss
        self._choices = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _lateness_s(self) -> float:
        """How much later a packet comes than without loss."""
        late_s, retransmission_s = 0.0, max(RETRANSMISSION_S_MIN, 3 * self._delay_s)
        while self._choices.random() < self._loss:
            late_s += retransmission_s
            retransmission_s *= 2
        return late_s

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(writer.transport.abort)
            handshake_s = 2 * self._delay_s + self._lateness_s() + self._lateness_s()
            await asyncio.sleep(handshake_s)  # sleep: the delay of this network
            with contextlib.suppress(OSError):
                there_reader, there_writer = await asyncio.open_connection(*self._server)
                stack.callback(there_writer.transport.abort)
                await asyncio.gather(self._one_way(reader, there_writer), self._one_way(there_reader, writer))

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def arrive() -> None:
            while (packet := await under_way.get())[1]:
                await asyncio.sleep(packet[0] - loop.time())
                writer.write(packet[1])
            writer.close()

        async with asyncio.TaskGroup() as both:
            both.create_task(arrive())
            arrives_s = 0.0
            while data := await reader.read(PACKET_BYTES):
                arrives_s = max(arrives_s, loop.time() + self._delay_s + self._lateness_s())
                under_way.put_nowait((arrives_s, data))
            under_way.put_nowait((0.0, b""))
