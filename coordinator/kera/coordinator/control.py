"""What the coordinator does by itself: it notices who is lost, and sees to it that what was begun comes to its end.

`Control.tick` is called every heartbeat interval, and whenever that is too long to wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch, Streamlet
from kera.coordinator.operations.drains import Drains
from kera.coordinator.operations.drops import Drops
from kera.coordinator.operations.members import Members
from kera.coordinator.operations.migration import Migration
from kera.coordinator.operations.rebalancing import MOVES_MAX, Placed, Plan, PlannedMove, Share, rebalancing, spread
from kera.coordinator.operations.restarts import Restarts
from kera.coordinator.operations.restored import Restored
from kera.coordinator.recovery.carry_out import Recoveries
from kera.coordinator.recovery.decide import DEAD, REPORTED
from kera.core.errors import KeraError, Unavailable
from kera.core.rpc.wire import error_to_message
from kera.core.telemetry import get_logger
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")

BEATS_MISSED_MIN = 1.25
"""A broker whose address refuses connections has to have been silent for so many heartbeat intervals, too: what refuses
may be something between it and us, and then it is well."""


class Control:
    """See the head of this module."""

    def __init__(
        self,
        state: State,
        members: Members,
        recoveries: Recoveries,
        migration: Migration,
        drains: Drains,
        drops: Drops,
        restarts: Restarts,
        restored: Restored,
    ) -> None:
        self._state = state
        self._members = members
        self._recoveries = recoveries
        self._migration = migration
        self._drains = drains
        self._drops = drops
        self._restarts = restarts
        self._restored = restored
        self._work = Work()
        self._ticking: asyncio.Task[None] | None = None
        self._rebalanced_s = state.clock.monotonic_s()

    def start(self) -> None:
        """Tick from now on, until `close`."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick_for_ever())

    async def close(self) -> None:
        """End what is under way."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        await self._work.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._work.idle()

    async def _tick_for_ever(self) -> None:
        while not self._state.lost.done():
            try:
                self.tick()
            except Exception:
                log.exception("defect in the coordinator's tick")
            await asyncio.sleep(self._state.settings.heartbeat_interval_ms / 1000)

    def tick(self) -> None:
        """Look at everything, and begin what is missing."""
        state = self._state
        if state.lost.done():
            return
        state.brokers.tick()
        state.backups.tick()
        self._members.forget_loads()
        self._restored.advance()
        if state.catching_up:
            return
        for broker_id in state.brokers.ids():
            if self._is_lost(broker_id) and self._recoveries.has_lost(broker_id, 1 << 63, DEAD):
                self._work.start(broker_id, lambda broker_id=broker_id: self._recover(broker_id, DEAD))  # type: ignore[misc]
        self._recoveries.advance()
        self._migration.advance()
        self._drains.advance()
        self._restarts.advance()
        self._drops.advance()
        for stream_id in state.untold():
            self._work.start((stream_id, "tell"), lambda stream_id=stream_id: state.tell_again(stream_id))  # type: ignore[misc]
        self._rebalance_if_due()

    # --- brokers that are lost ---------------------------------------------------------------------------------

    def _is_lost(self, broker_id: int) -> bool:
        brokers = self._state.brokers
        there = brokers.is_alive(broker_id) or brokers.is_fenced(broker_id) or brokers.is_expected(broker_id)
        return not (there or self._state.catching_up)

    async def _recover(self, broker_id: int, cause: str) -> None:
        await self._recoveries.begin(broker_id, cause, is_needed=lambda: self._is_lost(broker_id))

    def report(self, request: coordinator_pb2.ReportBrokerRequest) -> None:
        """A client cannot reach a broker. It is looked at in the background; what is not so comes to nothing."""
        brokers, broker_id = self._state.brokers, request.broker_id
        if self._state.catching_up:
            return
        if not brokers.is_alive(broker_id) or request.broker_epoch not in {0, brokers.epoch(broker_id)}:
            return
        self._work.start((broker_id, "probe"), lambda: self._probe(broker_id, request.reason))

    async def _probe(self, broker_id: int, reason: str) -> None:
        state, brokers = self._state, self._state.brokers
        broker, heard_s = brokers.describe(broker_id), brokers.heard_s(broker_id)
        if not await state.broker_calls.refuses(broker):
            return
        due_s = heard_s + BEATS_MISSED_MIN * state.settings.heartbeat_interval_ms / 1000
        await asyncio.sleep(max(state.settings.report_grace_ms / 1000, due_s - state.clock.monotonic_s()))
        if not await state.broker_calls.refuses(broker):
            return
        if (brokers.epoch(broker_id), brokers.heard_s(broker_id)) != (broker.broker_epoch, heard_s):
            return  # it was heard of since, or is another launch
        log.warning("broker is gone: its address refuses connections", broker_id=broker_id, reason=reason)
        brokers.declare_dead(broker_id)
        await self._recover(broker_id, REPORTED)

    # --- where streamlets should be ----------------------------------------------------------------------------

    def _rebalance_if_due(self) -> None:
        interval_ms, now_s = self._state.settings.rebalance_interval_ms, self._state.clock.monotonic_s()
        if interval_ms and now_s - self._rebalanced_s >= interval_ms / 1000:
            self._work.start("rebalance", self._rebalance)

    async def _rebalance(self) -> None:
        await self.rebalance(dry_run=False)  # until then it is tried with each tick
        self._rebalanced_s = self._state.clock.monotonic_s()

    async def rebalance(self, *, dry_run: bool) -> coordinator_pb2.RebalanceResponse:
        """Move streamlets so that brokers have about the same load, or only say what would move, and why.

        Raises `Unavailable` while it is not known how busy a broker is: what is not known looks idle.
        """
        self._state.check_caught_up()
        silent = [one for one in self._state.brokers.open_ids() if self._launch(one) not in self._members.loads]
        if silent:
            raise Unavailable(
                f"broker {silent[0]} has not said yet how busy it is; ask again after its next heartbeat",
                broker_ids=silent,
            )
        placed = await self._placed(self._state.catalog.streams())
        plan = await self._state.in_slices(rebalancing(self._state.brokers.open_ids(), placed))
        names = {stream.stream_id: stream.name for stream in self._state.catalog.streams()} if plan.moves else {}
        response = coordinator_pb2.RebalanceResponse(
            moves=[_described(move, names.get(move.streamlet.stream_id, "")) for move in plan.moves],
            loads=self._loads(plan),
        )
        if not dry_run:
            errors = await self._carry_out(plan.moves)
            for described, error in zip(response.moves, errors, strict=True):
                if error is not None:
                    described.error.CopyFrom(error_to_message(error))
        return response

    async def spread(self, name: str) -> common_pb2.StreamInfo:
        """Move streamlets until a stream is on as many brokers as its configuration says.

        Raises `Unavailable` when there are not so many, and what the first move says that fails.
        """
        stream, brokers = self._state.catalog.named(name), self._state.brokers.open_ids()
        count = min(stream.config.brokers or len(brokers), stream.config.streamlets)
        if count > len(brokers) or not count:
            raise Unavailable(
                f"stream {name!r} is to be on {count} brokers, and {len(brokers)} can take streamlets; start more",
                stream=name,
                brokers=count,
                live_brokers=len(brokers),
            )
        counts = self._state.catalog.streamlet_counts()
        moves = spread(await self._placed([stream]), {broker_id: counts[broker_id] for broker_id in brokers}, count)
        for error in await self._carry_out(moves):
            if error is not None:
                raise error
        return self._state.catalog.named(name)

    async def _carry_out(self, moves: list[PlannedMove]) -> list[KeraError | None]:
        errors: list[KeraError | None] = []
        for begin in range(0, len(moves), MOVES_MAX):
            errors += await asyncio.gather(*map(self._move, moves[begin : begin + MOVES_MAX]))
        return errors

    async def _move(self, move: PlannedMove) -> KeraError | None:
        try:
            stream = self._state.catalog.with_id(move.streamlet.stream_id)
            await self._migration.move(stream.name, move.streamlet.streamlet_id, move.to_broker_id, move.reason)
        except KeraError as error:
            return error
        return None

    async def _placed(self, streams: Iterable[common_pb2.StreamInfo]) -> dict[Streamlet, Placed]:
        """What each owner says of its streamlets; others that have older groups tell what is read of those."""
        loads, placed, pace = self._members.loads, {}, self._state.pace()
        for stream in streams:
            for one in stream.assignments:
                await pace.step()
                streamlet = Streamlet(stream.stream_id, one.streamlet_id)
                placed[streamlet] = Placed(
                    broker_id=one.broker_id,
                    bytes_per_s=loads.get(Launch(one.broker_id, one.broker_epoch), {}).get(streamlet, 0),
                    may_move=not (
                        one.sources or self._migration.rests(streamlet) or self._migration.is_moving(streamlet)
                    ),
                )
        return placed

    def _launch(self, broker_id: int) -> Launch:
        return Launch(broker_id, self._state.brokers.epoch(broker_id))

    def _loads(self, plan: Plan) -> list[coordinator_pb2.BrokerLoad]:
        loads = []
        for broker_id in self._state.brokers.live_ids():
            now, then = plan.before.get(broker_id, Share(0, 0)), plan.after.get(broker_id, Share(0, 0))
            load = coordinator_pb2.BrokerLoad(
                broker_id=broker_id,
                bytes_per_s=now.bytes_per_s,
                streamlets=now.streamlets,
                bytes_per_s_after=then.bytes_per_s,
                streamlets_after=then.streamlets,
            )
            loads.append(load)
        return loads


def _described(move: PlannedMove, stream: str) -> coordinator_pb2.Move:
    return coordinator_pb2.Move(
        stream=stream,
        streamlet_id=move.streamlet.streamlet_id,
        from_broker_id=move.from_broker_id,
        to_broker_id=move.to_broker_id,
        reason=move.reason,
    )
