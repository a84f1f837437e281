"""Heartbeats of group members without a thread: their loop sends them, because no code blocks it here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kera.core.base.clock import Clock
from kera.core.coordinators import Coordinators
from kera.core.errors import KeraError
from kera.core.rpc import api
from kera.v1 import consumer_group_pb2
from tests.simulation.wiring.open_interface import FramedChannel

TIMEOUT_S_MAX = 5.0


class LoopHeartbeats:
    """See `kera.core.runtime.Heartbeats`."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        consumer_group: str,
        member_id: str,
        interval_s: float,
        busy_ms: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._coordinators = Coordinators(",".join(addresses), channel=FramedChannel)
        self._consumer_group = consumer_group
        self._member_id = member_id
        self._interval_s = interval_s
        self._busy_ms = busy_ms
        self._clock = clock
        self._heard_s = clock.boottime_s()
        self._task: asyncio.Task[None] | None = None

    @property
    def heard_s(self) -> float:
        """See `Heartbeats.heard_s`."""
        return self._heard_s

    def answered(self, sent_s: float) -> None:
        """See `Heartbeats.answered`."""
        self._heard_s = max(self._heard_s, sent_s)

    def start(self) -> None:
        """See `Heartbeats.start`."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """See `Heartbeats.stop`."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                due_s = self._heard_s + self._interval_s - self._clock.boottime_s()
                await asyncio.sleep(max(self._interval_s / 4, due_s))
                if self._clock.boottime_s() - self._heard_s >= self._interval_s:
                    await self._say()
        finally:
            await self._coordinators.close()

    async def _say(self) -> None:
        sent_s = self._clock.boottime_s()
        request = consumer_group_pb2.KeepAliveRequest(
            consumer_group=self._consumer_group, member_id=self._member_id, busy_ms=self._busy_ms()
        )
        try:
            answer = await self._coordinators.ask(
                api.KEEP_ALIVE, request, timeout_s=min(TIMEOUT_S_MAX, 4 * self._interval_s)
            )
        except KeraError:
            return
        if answer.member:
            self.answered(sent_s)
