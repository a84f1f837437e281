"""The coordinator's orders about streamlets: seal them, open them, take over those of a lost broker.

A streamlet moves in three steps; the coordinator repeats each until it is answered:

    seal   at the old owner: takes no more chunks; answers with the streamlet's end when all its data is durable
    open   at the new owner: makes the handed over state durable, then takes chunks
    open   at the old owner, with the same assignments: it learns where its readers go on

Assignments in a new version that still name the old owner undo the seal: the streamlet does not move.

Orders about one stream are carried out one after the other, except seals, which end when they are overtaken. Orders of
a replaced coordinator are refused, so that its late decisions do not undo those of its successor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from kera.broker.log.intervals import holding
from kera.broker.log.waiting import until_done
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.receiving import Receiving
from kera.broker.ownership.sealing import Sealing
from kera.broker.ownership.streams import Streams, is_of_another_launch
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.base.turns import Turns
from kera.core.errors import KeraError, Unavailable
from kera.v1 import broker_pb2, common_pb2

log = get_logger("kera.orders")

RETRY_INTERVAL_S = 1.0
"""Pause before a failed opening of streamlets that have to be recovered is tried again."""


class StreamletRecovery(Protocol):
    """Recovers a lost broker's streamlets from backups: see ``kera.broker.recovery.takeover``."""

    async def take_over(self, request: broker_pb2.TakeOverRequest) -> broker_pb2.TakeOverResponse:
        """Find out where streamlets end."""
        ...

    def prepared(self, stream_id: int, streamlet_id: int, sources: Iterable[common_pb2.RecoverySource]) -> bool:
        """Whether the state needed to open a streamlet with these sources is known."""
        ...

    async def prepare(self, info: common_pb2.StreamInfo, /, streamlet_ids: Sequence[int]) -> None:
        """Find out the state needed to open streamlets."""
        ...

    async def commit(self, info: common_pb2.StreamInfo, /, streamlet_ids: Sequence[int]) -> None:
        """Record the state in the index, so that the streamlets open as if they had always been here."""
        ...

    def opened(self, info: common_pb2.StreamInfo) -> None:
        """Get the missing data of streamlets, which are open now."""
        ...


class Orders:
    """Carries out the coordinator's orders about streamlets, one after the other for each stream.

    Belongs to one event loop.
    """

    def __init__(
        self,
        streams: Streams,
        memory: PersistenceManager,
        takeovers: StreamletRecovery | None = None,
        *,
        coordinator: CoordinatorEpoch,
        turns: Turns | None = None,
        retry_interval_s: float = RETRY_INTERVAL_S,
    ) -> None:
        """`takeovers`: None for a broker without backups; `coordinator`: the epoch whose orders are carried out.

        `turns`: lets other work go on between the streamlets of an order, which may be thousands.
        """
        self._streams = streams
        self._takeovers = takeovers
        self._coordinator = coordinator
        self._broker_id = self._broker_epoch = 0
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """Locks of streams whose streamlets are being opened."""
        self._late: set[asyncio.Task[None]] = set()
        self._turns = turns or Turns()
        self._retry_interval_s = retry_interval_s
        self._sealing = Sealing(streams, memory, self._turns)
        self._receiving = Receiving(streams, memory, self._is_ours)

    async def close(self) -> None:
        """End the orders that are under way."""
        for task in self._late:
            task.cancel()
        if self._late:
            await asyncio.wait(self._late)

    # -- seal ------------------------------------------------------------------------------------------------------

    async def seal(self, request: broker_pb2.SealStreamletsRequest) -> list[common_pb2.StreamletState]:
        """See `Sealing.seal`."""
        await self._coordinator.confirm(request.coordinator_epoch)
        return await self._sealing.seal(request)

    def seal_all(self) -> None:
        """Take no more chunks for any streamlet, because this launch ends."""
        self._sealing.seal_all()

    # -- open and drop ---------------------------------------------------------------------------------------------

    def registered(self, broker_id: int, broker_epoch: int, owned: Iterable[common_pb2.StreamInfo]) -> None:
        """Open the streams of this launch, which is registered now.

        Streamlets that have to be recovered, and whose state is not known yet, are opened later, all others now.
        """
        self._broker_id, self._broker_epoch = broker_id, broker_epoch
        for info in owned:
            unknown = self._unprepared(info, list(self._recovered(info)))
            if unknown:
                self._late.add(task := asyncio.get_running_loop().create_task(self._open_later(info)))
                task.add_done_callback(self._late.discard)
            now = _without(info, unknown)
            self._streams.open(now, broker_id, broker_epoch)
            if self._takeovers is not None:
                self._takeovers.opened(now)

    async def _open_later(self, info: common_pb2.StreamInfo) -> None:
        failing = Repeated(log)
        while True:
            try:
                async with self._lock(info.stream_id):
                    if info.stream_id in self._streams:  # it may have been dropped meanwhile
                        await self._open(info, ())
            except KeraError as error:
                failing.goes_on("cannot recover streamlets yet", stream=info.name, error=error.message)
            except Exception as error:  # noqa: BLE001 - a defect must not leave them closed for ever
                failing.goes_on("opening streamlets failed; retrying", level="error", stream=info.name, exc_info=error)
            else:
                failing.over("streamlets are open", stream=info.name)
                return
            await asyncio.sleep(self._retry_interval_s)

    async def open(self, request: broker_pb2.OpenStreamletsRequest) -> list[int]:
        """Open the streamlets of a stream that are assigned to this broker; makes handed over states durable before.

        Returns the streamlets that this broker would own, but whose handed over state it lacks.
        """
        await self._coordinator.confirm(request.coordinator_epoch)
        async with self._lock(request.stream.stream_id):
            self._coordinator.refuse_stale(request.coordinator_epoch)  # the order may have waited
            await self._open(request.stream, request.handed_over, created=request.created)
            return [] if self._is_old(request.stream) else await self._lacking(request.stream)

    async def _lacking(self, info: common_pb2.StreamInfo) -> list[int]:
        stream = self._streams.by_id.get(info.stream_id)
        here = stream.streamlets if stream is not None else {}
        found, pace = [], self._turns.pace(self)
        for one in info.assignments:
            await pace.step()
            streamlet = here.get(one.streamlet_id)
            if self._is_ours(one) and not (streamlet is not None and streamlet.owned):
                found.append(one.streamlet_id)
        return found

    async def _open(
        self, info: common_pb2.StreamInfo, handed_over: Iterable[common_pb2.StreamletState], *, created: bool = False
    ) -> None:
        self._streams.check_known(info)
        states = list(handed_over)
        if not self._is_old(info):
            await self._receiving.receive(info, states)
            if self._takeovers is not None:
                await self._take_over(self._takeovers, info)
        opening = self._streams.opening(info, self._broker_id, self._broker_epoch, states, created=created)
        await self._in_slices(opening)
        if self._streams.has_replicas_of_earlier_launches and not self._is_old(info):
            await self._let_go(info)
        if self._takeovers is not None:
            self._takeovers.opened(info)

    async def _let_go(self, info: common_pb2.StreamInfo) -> None:
        """Free replicas from which others have recovered, if a stream has nothing here, and nothing to recover.

        A broker that was restarted while it was being emptied has no other knowledge of these replicas.
        """
        pace = self._turns.pace(self)
        for one in info.assignments:
            await pace.step()
            if holding(one, self._broker_id).intervals or any(
                source.broker_id == self._broker_id for source in one.sources
            ):
                return
        self._streams.release(info.stream_id)

    async def _in_slices(self, steps: Generator[None, None, None]) -> None:
        """Do all steps, with other work in between. All are done before this ends, even if the caller is cancelled."""

        async def drive() -> None:
            pace = self._turns.pace(self)
            for _ in steps:
                await pace.step()

        self._late.add(task := asyncio.create_task(drive()))
        task.add_done_callback(self._late.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])  # the steps must not stay half done, and no other order may begin meanwhile
            raise

    async def _take_over(self, takeovers: StreamletRecovery, info: common_pb2.StreamInfo) -> None:
        recovered: list[common_pb2.StreamletAssignment] = []
        pace = self._turns.pace(self)
        for each in info.assignments:
            await pace.step()
            if each.sources and self._is_ours(each):
                recovered.append(each)
        unknown = self._unprepared(info, recovered)
        if unknown:
            await takeovers.prepare(info, unknown)
        if recovered:
            await takeovers.commit(info, [each.streamlet_id for each in recovered])

    def _unprepared(
        self, info: common_pb2.StreamInfo, recovered: Iterable[common_pb2.StreamletAssignment]
    ) -> list[int]:
        """Return the recovered streamlets whose state is not known yet."""
        takeovers = self._takeovers
        return [
            each.streamlet_id
            for each in recovered
            if takeovers is not None and not takeovers.prepared(info.stream_id, each.streamlet_id, each.sources)
        ]

    def _recovered(self, info: common_pb2.StreamInfo) -> Iterable[common_pb2.StreamletAssignment]:
        """Return the assignments of streamlets that this launch has to recover."""
        return (each for each in info.assignments if each.sources and self._is_ours(each))

    def _is_ours(self, assignment: common_pb2.StreamletAssignment) -> bool:
        return assignment.broker_id == self._broker_id and not is_of_another_launch(
            assignment, self._broker_id, self._broker_epoch
        )

    def _is_old(self, info: common_pb2.StreamInfo) -> bool:
        return (
            info.stream_id in self._streams
            and info.assignments_version < self._streams.get(info.stream_id).assignments_version
        )

    async def drop(self, request: broker_pb2.DropStreamRequest) -> None:
        """Forget a stream, and free its memory and its disk."""
        await self._coordinator.confirm(request.coordinator_epoch)
        async with self._lock(request.stream_id):
            await self._in_slices(self._streams.dropping(request.stream_id))
            await until_done(lambda done: self._streams.drop(request.stream_id, done))

    def _lock(self, stream_id: int) -> asyncio.Lock:
        lock = self._locks.get(stream_id)
        if lock is None:
            lock = self._locks[stream_id] = asyncio.Lock()
        return lock

    # -- take over -------------------------------------------------------------------------------------------------

    async def take_over(self, request: broker_pb2.TakeOverRequest) -> broker_pb2.TakeOverResponse:
        """Find out from backups where streamlets of a lost broker end."""
        await self._coordinator.confirm(request.coordinator_epoch)
        if self._takeovers is None:
            raise Unavailable("this broker knows no backups to recover from")
        return await self._takeovers.take_over(request)


def _without(info: common_pb2.StreamInfo, streamlet_ids: list[int]) -> common_pb2.StreamInfo:
    if not streamlet_ids:
        return info
    rest = common_pb2.StreamInfo()
    rest.CopyFrom(info)
    del rest.assignments[:]
    rest.assignments.extend(each for each in info.assignments if each.streamlet_id not in streamlet_ids)
    return rest
