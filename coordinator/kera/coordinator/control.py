"""The coordinator's own work: it notices lost members, and completes operations that were begun.

`Control.tick` is called every heartbeat interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence

from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.operations.loads import MeasuredLoads
from kera.coordinator.operations.restored import Restored
from kera.coordinator.recovery.carry_out import Recoveries
from kera.coordinator.recovery.decide import DEAD, REPORTED
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.rpc import api
from kera.v1 import coordinator_pb2

log = get_logger("kera.coordinator")

BEATS_MISSED_MIN = 1.25
"""Minimum silence, in heartbeat intervals, of a broker that is declared dead because its address refuses connections.

Something between it and the coordinator may refuse the connections while the broker runs well.
"""


class Control:
    """Runs the coordinator's own work at each tick: finds lost members and completes pending operations."""

    def __init__(
        self,
        state: State,
        recoveries: Recoveries,
        restored: Restored,
        loads: MeasuredLoads,
        advancing: Sequence[Callable[[], None]],
    ) -> None:
        """`advancing`: functions to call every heartbeat interval, once the metadata are up to date."""
        self._state = state
        self._recoveries = recoveries
        self._restored = restored
        self._loads = loads
        self._advancing = advancing
        self._work = Work()
        self._ticking: asyncio.Task[None] | None = None

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.REPORT_BROKER: self.report}

    def start(self) -> None:
        """Tick from now on, until `close`."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick_for_ever())

    async def close(self) -> None:
        """Cancel all work under way."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        await self._work.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._work.idle()

    async def _tick_for_ever(self) -> None:
        failing = Repeated(log)
        while not self._state.lost.done():
            try:
                self.tick()
                failing.over("the coordinator's periodic check goes on")
            except Exception as error:  # noqa: BLE001 - it is logged
                event = "unexpected exception in the coordinator's periodic check"
                failing.goes_on(event, level="error", exc_info=error)
            await asyncio.sleep(self._state.settings.heartbeat_interval_ms / 1000)

    def tick(self) -> None:
        """Look for lost members and pending operations, and start what is missing."""
        state = self._state
        if state.lost.done():
            return
        state.brokers.tick()
        state.backups.tick()
        self._loads.forget_earlier_launches()
        self._restored.advance()
        if state.catching_up:
            return
        wanted = set[Hashable]()
        for broker_id in state.brokers.ids():
            if self._is_lost(broker_id) and self._recoveries.records.has_lost(broker_id, 1 << 63, DEAD):
                wanted.add(broker_id)
                self._work.start(broker_id, lambda broker_id=broker_id: self._recover(broker_id, DEAD))  # type: ignore[misc]
        self._recoveries.advance()
        for advance in self._advancing:
            advance()
        for stream_id in state.untold():
            wanted.add((stream_id, "tell"))
            self._work.start((stream_id, "tell"), lambda stream_id=stream_id: state.tell_again(stream_id))  # type: ignore[misc]
        self._work.forget_failures(wanted.__contains__)

    # --- lost brokers ------------------------------------------------------------------------------------------

    def _is_lost(self, broker_id: int) -> bool:
        brokers = self._state.brokers
        there = brokers.is_alive(broker_id) or brokers.is_fenced(broker_id) or brokers.is_expected(broker_id)
        return not (there or self._state.catching_up)

    async def _recover(self, broker_id: int, cause: str) -> None:
        await self._recoveries.begin(broker_id, cause, is_needed=lambda: self._is_lost(broker_id))

    def report(self, request: coordinator_pb2.ReportBrokerRequest) -> coordinator_pb2.ReportBrokerResponse:
        """Handle a client's report that it cannot reach a broker: probe the broker in the background.

        A report about a launch that is not current, or that the probe does not confirm, has no effect.
        """
        brokers, broker_id = self._state.brokers, request.broker_id
        current = brokers.is_alive(broker_id) and request.broker_epoch in {0, brokers.epoch(broker_id)}
        if current and not self._state.catching_up:
            self._work.start((broker_id, "probe"), lambda: self._probe(broker_id, request.reason))
        return coordinator_pb2.ReportBrokerResponse()

    async def _probe(self, broker_id: int, reason: str) -> None:
        state, brokers = self._state, self._state.brokers
        broker, heard_s = brokers.describe(broker_id), brokers.heard_s(broker_id)
        if not await state.broker_calls.refuses(broker):
            return
        due_s = heard_s + BEATS_MISSED_MIN * state.settings.heartbeat_interval_ms / 1000
        await asyncio.sleep(max(state.settings.report_grace_ms / 1000, due_s - state.clock.monotonic_s()))
        if not await state.broker_calls.refuses(broker):
            return
        if brokers.epoch(broker_id) != broker.broker_epoch or brokers.heard_s(broker_id) != heard_s:
            return  # it has sent a heartbeat since, another launch of it has registered, or it was forgotten
        log.warning("broker is gone: its address refuses connections", broker_id=broker_id, reason=reason)
        brokers.declare_dead(broker_id)
        await self._recover(broker_id, REPORTED)
