"""Moves streamlets so that brokers are about equally busy, and streams are on as many brokers as configured."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch, StreamletId
from kera.coordinator.operations.loads import MeasuredLoads
from kera.coordinator.operations.migration import Migration
from kera.coordinator.operations.rebalancing import (
    MOVES_MAX,
    BrokerShare,
    Placed,
    Plan,
    PlannedMove,
    rebalancing,
    spread,
)
from kera.core.errors import KeraError, Unavailable
from kera.core.rpc import api
from kera.core.rpc.wire import error_to_message
from kera.v1 import common_pb2, coordinator_pb2


class Balancing:
    """Moves streamlets from busy brokers to idle ones, and spreads streams over the brokers that they should use.

    ``rebalancing`` decides what should move.
    """

    def __init__(self, state: State, migration: Migration, loads: MeasuredLoads) -> None:
        self._state = state
        self._migration = migration
        self._loads = loads
        self.work = Work()
        self._rebalanced_s = state.clock.monotonic_s()

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.REBALANCE: self._answer_rebalance}

    def advance(self) -> None:
        """Rebalance if it is time; called every heartbeat interval."""
        interval_ms, now_s = self._state.settings.rebalance_interval_ms, self._state.clock.monotonic_s()
        if interval_ms and now_s - self._rebalanced_s >= interval_ms / 1000:
            self.work.start("rebalance", self._rebalance)

    async def _rebalance(self) -> None:
        await self.rebalance(dry_run=False)  # after a failure each call of `advance` tries again
        self._rebalanced_s = self._state.clock.monotonic_s()

    async def _answer_rebalance(self, request: coordinator_pb2.RebalanceRequest) -> coordinator_pb2.RebalanceResponse:
        return await self.rebalance(dry_run=request.dry_run)

    async def rebalance(self, *, dry_run: bool) -> coordinator_pb2.RebalanceResponse:
        """Move streamlets so that brokers have about the same load, or only report what would move, and why.

        Raises `Unavailable` while a broker has not reported its load: it would look idle.
        """
        self._state.check_caught_up()
        silent = [one for one in self._state.brokers.open_ids() if not self._loads.are_known(one)]
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
            loads=self._described_loads(plan),
        )
        if not dry_run:
            errors = await self._carry_out(plan.moves)
            for described, error in zip(response.moves, errors, strict=True):
                if error is not None:
                    described.error.CopyFrom(error_to_message(error))
        return response

    async def spread(self, name: str) -> common_pb2.StreamInfo:
        """Move streamlets until a stream is on as many brokers as its configuration says.

        Raises `Unavailable` if there are too few brokers, and the error of the first move that fails.
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

    async def _placed(self, streams: Iterable[common_pb2.StreamInfo]) -> dict[StreamletId, Placed]:
        """Return the load of each streamlet, as its owner reports it, and whether it may move.

        Other brokers with older groups of a streamlet report the reads of those.
        """
        placed, pace, parts = {}, self._state.pace(), self._loop_parts()
        for stream in streams:
            for one in stream.assignments:
                await pace.step()
                streamlet, launch = (
                    StreamletId(stream.stream_id, one.streamlet_id),
                    Launch(one.broker_id, one.broker_epoch),
                )
                bytes_per_s = self._loads.of_launch(launch).get(streamlet, 0)
                placed[streamlet] = Placed(
                    broker_id=one.broker_id,
                    bytes_per_s=bytes_per_s,
                    busy_ppm=round(bytes_per_s * parts.get(launch, 0.0)),
                    may_move=not (
                        one.sources or self._migration.rests(streamlet) or self._migration.is_moving(streamlet)
                    ),
                )
        return placed

    def _loop_parts(self) -> dict[Launch, float]:
        """Return how much of its loop's time a byte per second takes, by launch; empty unless all report their
        loops' time.
        """
        brokers, parts = self._state.brokers, dict[Launch, float]()
        for broker_id in brokers.open_ids():
            launch = Launch(broker_id, brokers.epoch(broker_id))
            busy_ppm = self._loads.busy_ppm(launch)
            if busy_ppm is None:
                return {}
            if total := sum(self._loads.of_launch(launch).values()):
                parts[launch] = busy_ppm / total
        return parts

    def _described_loads(self, plan: Plan) -> list[coordinator_pb2.BrokerLoad]:
        loads = []
        for broker_id in self._state.brokers.live_ids():
            now, then = plan.before.get(broker_id, BrokerShare(0, 0)), plan.after.get(broker_id, BrokerShare(0, 0))
            load = coordinator_pb2.BrokerLoad(
                broker_id=broker_id,
                bytes_per_s=now.bytes_per_s,
                streamlets=now.streamlets,
                bytes_per_s_after=then.bytes_per_s,
                streamlets_after=then.streamlets,
                busy_permille=now.busy_ppm // 1000,
                busy_permille_after=then.busy_ppm // 1000,
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
