"""Computes the activity of brokers from their counters: bytes and records per second, memory, and load.

`activity_of` is pure; `Activities` asks the brokers, and remembers the last answer of each, because a rate needs two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from kera.client import BrokerDescription
from kera.client.admin.daemons import DaemonFigures, read_figures
from kera.core.errors import KeraError, NotAllowed
from kera.core.rpc import Channel

ASKED_AT_ONCE = 16
ANSWER_TIMEOUT_S = 2.0
_OUT = ("kera_broker_bytes_read_total", "kera_broker_push_bytes_total")
"""The counters of bytes that consumers read: as copies, and in place."""


class Activity(NamedTuple):
    """The activity of a broker; None: the broker has not reported it, or not twice."""

    bytes_in_per_s: float | None
    bytes_out_per_s: float | None
    records_in_per_s: float | None
    busy: float | None
    """Share of the time for which the broker's event loop is busy."""
    memory_bytes: int | None
    """Used part of the broker's memory for segments."""
    lag_ms: int | None
    """Time by which the broker's backups lag behind."""


def activity_of(before: DaemonFigures | None, now: DaemonFigures) -> Activity:
    """Compute the activity of a broker from its last two answers. Pure."""
    seconds = 0.0
    if before is not None and before.launch_id == now.launch_id:
        seconds = (now.uptime_us - before.uptime_us) / 1e6

    def rate(*names: str) -> float | None:
        if before is None or seconds <= 0:
            return None
        return sum(max(0.0, _total(now, name) - _total(before, name)) for name in names) / seconds

    slots, free = now.value("kera_broker_arena_slots"), now.value("kera_broker_arena_slots_free")
    slot_bytes, lag_ms = now.value("kera_broker_arena_slot_bytes"), now.value("kera_broker_replication_lag_ms")
    busy, was_busy = (
        None if each is None else each.value("kera_processor_seconds_total", "of", "loop") for each in (now, before)
    )
    return Activity(
        bytes_in_per_s=rate("kera_broker_bytes_appended_total"),
        bytes_out_per_s=rate(*_OUT),
        records_in_per_s=rate("kera_broker_records_appended_total"),
        busy=None if busy is None or was_busy is None or seconds <= 0 else max(0.0, busy - was_busy) / seconds,
        memory_bytes=None if slots is None or free is None else round((slots - free) * (slot_bytes or 0)),
        lag_ms=None if lag_ms is None else round(lag_ms),
    )


def _total(figures: DaemonFigures, name: str) -> float:
    return sum(figures.figures.get(name, {}).values())


class Activities:
    """The activities of all brokers that are alive."""

    def __init__(self, channel: Callable[[str], Channel]) -> None:
        """`channel`: makes a connection to an address."""
        self._channel = channel
        self._channels: dict[str, Channel] = {}
        """The connections by address."""
        self._told: dict[int, DaemonFigures] = {}
        """The last answer of each broker."""
        self._room = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(self, brokers: list[BrokerDescription]) -> dict[int, Activity]:
        """Return the activity of each broker that answers. Raises `NotAllowed` if all brokers refuse."""
        alive = [each for each in brokers if each.alive]
        for address in self._channels.keys() - {each.grpc_address for each in alive}:
            await self._channels.pop(address).close()
        found = await asyncio.gather(*map(self._ask, alive), return_exceptions=True)
        refused = [each for each in found if isinstance(each, NotAllowed)]
        if refused and len(refused) == len(found):
            raise refused[0]
        return {
            broker.broker_id: each
            for broker, each in zip(alive, found, strict=True)
            if not isinstance(each, BaseException)
        }

    async def _ask(self, broker: BrokerDescription) -> Activity:
        channel = self._channels.get(broker.grpc_address)
        if channel is None:
            channel = self._channels[broker.grpc_address] = self._channel(broker.grpc_address)
        async with self._room:
            now = await read_figures(channel, streams_max=0, timeout_s=ANSWER_TIMEOUT_S)
        before, self._told[broker.broker_id] = self._told.get(broker.broker_id), now
        return activity_of(before, now)

    async def close(self) -> None:
        """Close all connections."""
        while self._channels:
            _, channel = self._channels.popitem()
            with contextlib.suppress(KeraError):
                await channel.close()
