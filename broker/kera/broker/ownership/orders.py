"""What the coordinator tells a broker to do with streamlets: seal them, open them, take over those of a lost broker.

A streamlet moves in three steps, of which the coordinator drives each until it is answered:

    seal   at the old owner: no more chunks; answered when all that it has is durable, with where it ends
    open   at the new owner: what that was is made durable here, then chunks are taken
    open   at the old owner, with the same assignments: it learns where its readers go on

Assignments in a new version that still name the old owner undo the seal: the streamlet does not move.

Orders of one stream are carried out one after the other, except seals, which end when they are overtaken. Orders of a
coordinator that was replaced are refused, so that nothing it decided late undoes what its successor has decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from kera.broker.log.entry import Entry
from kera.broker.log.intervals import holding
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.waiting import until_done, woken
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.handover import changes_for, producers_of
from kera.broker.ownership.streams import Stream, Streams, is_of_another_launch
from kera.broker.storage.persistence import PersistenceManager
from kera.core.done import nothing
from kera.core.errors import InvalidArgument, KeraError, Unavailable
from kera.core.ids import EntryId
from kera.core.telemetry import get_logger
from kera.core.turns import Pace, Turns
from kera.v1 import broker_pb2, common_pb2

log = get_logger("kera.orders")

SEAL_WAIT_MS_MAX = 60_000
SETTLE_WAIT_S = 5.0
"""For segments of an earlier time that are just being written to disk, when a streamlet comes back."""
SETTLE_CHECK_S = 0.1
"""A write that fails wakes nobody."""
RETRY_INTERVAL_S = 1.0
"""Of what a registration has to find out from backups that are away."""


class Takeovers(Protocol):
    """Who finds out from backups what a lost broker had, and gets it: see ``kera.broker.recovery.takeover``."""

    async def take_over(self, request: broker_pb2.TakeOverRequest) -> broker_pb2.TakeOverResponse:
        """Find out where streamlets end."""
        ...

    def prepared(self, stream_id: int, streamlet_id: int, sources: Iterable[common_pb2.RecoverySource]) -> bool:
        """Whether all is known that is needed to open a streamlet with these sources."""
        ...

    async def prepare(self, info: common_pb2.StreamInfo, /, streamlet_ids: Sequence[int]) -> None:
        """Find it out."""
        ...

    async def commit(self, info: common_pb2.StreamInfo, /, streamlet_ids: Sequence[int]) -> None:
        """Write down what was found out, so that the streamlets open as if they had always been here."""
        ...

    def opened(self, info: common_pb2.StreamInfo) -> None:
        """The streamlets are open: get what is missing of them."""
        ...


class Orders:
    """See the head of this module. Belongs to one event loop."""

    def __init__(
        self,
        streams: Streams,
        memory: PersistenceManager,
        takeovers: Takeovers | None = None,
        *,
        coordinator: CoordinatorEpoch,
    ) -> None:
        """`takeovers`: None for a broker without backups; `coordinator`: whose orders are carried out."""
        self._streams = streams
        self._memory = memory
        self._takeovers = takeovers
        self._coordinator = coordinator
        self.broker_id = self.broker_epoch = 0
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """Of streams whose streamlets are being opened."""
        self._seals: dict[Streamlet, object] = {}
        """The latest order to seal each, of those that are waited for."""
        self._late: set[asyncio.Task[None]] = set()
        self._turns = Turns()
        """An order may be about thousands of streamlets: it gives way between them."""

    async def close(self) -> None:
        """End what is under way."""
        for task in self._late:
            task.cancel()
        if self._late:
            await asyncio.wait(self._late)

    # -- seal ------------------------------------------------------------------------------------------------------

    async def seal(self, request: broker_pb2.SealStreamletsRequest) -> list[common_pb2.StreamletState]:
        """Take no more chunks for streamlets; where they end, once all that they have is durable.

        Raises `NotOwner`, or `Unavailable` when that takes too long: then they take chunks again. An order that was
        overtaken by a later version of the assignments is refused: whoever gave it has given it up, and told that.
        """
        await self._coordinator.confirm(request.coordinator_epoch)
        stream = self._streams.get(request.stream_id)
        if request.assignments_version and request.assignments_version < stream.assignments_version:
            raise Unavailable(
                f"the order to seal streamlets of stream {stream.name!r} came late: what it was given for is over",
                stream=stream.name,
            )
        if len(request.streamlet_ids) > stream.streamlet_count:
            raise InvalidArgument(
                f"stream {stream.name!r} has {stream.streamlet_count} streamlets, and {len(request.streamlet_ids)} are"
                " to be sealed",
                stream=stream.name,
                limit=stream.streamlet_count,
            )
        streamlets: list[Streamlet] = []
        order, pace = object(), self._pace()
        for streamlet_id in dict.fromkeys(request.streamlet_ids):
            await pace.step()
            streamlet = stream.streamlet(streamlet_id)
            if not streamlet.owned:
                raise stream.not_owner(streamlet_id)
            streamlets.append(streamlet)
        try:
            for streamlet in streamlets:
                await pace.step()
                streamlet.seal()
                self._seals[streamlet] = order
            await self._durable(stream, streamlets, min(request.wait_ms, SEAL_WAIT_MS_MAX), pace)
        except BaseException:
            for streamlet in streamlets:
                if self._seals.get(streamlet) is order and streamlet.sealed:
                    streamlet.unseal()
            raise
        finally:
            for streamlet in streamlets:
                if self._seals.get(streamlet) is order:
                    del self._seals[streamlet]
        return [await _state_of(streamlet, pace) for streamlet in streamlets]

    def seal_all(self) -> None:
        """This launch ends: take no more chunks for any streamlet."""
        for stream in self._streams:
            for streamlet in stream.streamlets.values():
                if streamlet.owned:
                    streamlet.seal()

    async def _durable(self, stream: Stream, streamlets: list[Streamlet], wait_ms: int, pace: Pace) -> None:
        until = asyncio.get_running_loop().time() + wait_ms / 1000
        to_disk = stream.by_disk and stream.durability > common_pb2.DURABILITY_LEADER
        lacking: list[Entry] = []
        for streamlet in streamlets:
            await pace.step()
            tails = [(segment, segment.head) for entry in streamlet.entries.made for segment in entry.tail]
            if to_disk and tails:
                self._memory.persist(tails, nothing)
            lacking += filter(_lacks, streamlet.entries.made)
        while lacking := [entry for entry in lacking if _lacks(entry)]:  # no more come: they are sealed
            if not await woken(lacking, until):
                raise self._not_durable(stream, lacking, wait_ms)
            await self._check_sealed(stream, streamlets, pace)

    @staticmethod
    async def _check_sealed(stream: Stream, streamlets: list[Streamlet], pace: Pace) -> None:
        for streamlet in streamlets:
            await pace.step()
            if stream.streamlets.get(streamlet.streamlet_id) is not streamlet or not streamlet.sealed:
                raise Unavailable(
                    f"streamlet {streamlet.streamlet_id} of stream {stream.name!r} was opened again, or is gone,"
                    " while it was being sealed",
                    stream=stream.name,
                    streamlet_id=streamlet.streamlet_id,
                )

    @staticmethod
    def _not_durable(stream: Stream, lacking: list[Entry], wait_ms: int) -> Unavailable:
        place = "backups" if stream.by_replicas else "disk"
        what = ", ".join(
            f"{_lacks(entry)} bytes of entry {entry.index} of streamlet {entry.log_id.streamlet_id}"
            for entry in lacking[:8]
        )
        return Unavailable(
            f"stream {stream.name!r}: {what} did not get to {place} within {wait_ms} ms;"
            " it is not sealed, and takes chunks again",
            stream=stream.name,
            wait_ms=wait_ms,
            waits_for=place,
        )

    # -- open and drop ---------------------------------------------------------------------------------------------

    def registered(self, broker_id: int, broker_epoch: int, owned: Iterable[common_pb2.StreamInfo]) -> None:
        """This launch is known, and has these streams.

        Streamlets that are to be recovered, and of which nothing is known yet, are opened later, and the others now.
        """
        self.broker_id, self.broker_epoch = broker_id, broker_epoch
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
        told = ""
        while True:
            try:
                async with self._lock(info.stream_id):
                    if info.stream_id in self._streams:  # it may have been dropped meanwhile
                        await self._open(info, ())
            except KeraError as error:
                if error.message != told:
                    log.warning("cannot recover streamlets yet", stream=info.name, error=error.message)
                told = error.message
            except Exception as error:  # a defect must not leave them closed for ever
                log.error("opening streamlets failed; it is tried again", stream=info.name, exc_info=error)
            else:
                return
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def open(self, request: broker_pb2.OpenStreamletsRequest) -> None:
        """Have of a stream what is assigned to this broker; what was handed over is durable then."""
        await self._coordinator.confirm(request.coordinator_epoch)
        async with self._lock(request.stream.stream_id):
            self._coordinator.refuse_stale(request.coordinator_epoch)  # it may have waited
            await self._open(request.stream, request.handed_over)

    async def _open(self, info: common_pb2.StreamInfo, handed_over: Iterable[common_pb2.StreamletState]) -> None:
        self._streams.check_known(info)
        states = list(handed_over)
        if not self._is_old(info):
            await self._inherit(info, states)
            if self._takeovers is not None:
                await self._take_over(self._takeovers, info)
        await self._in_slices(self._streams.opening(info, self.broker_id, self.broker_epoch, states))
        if self._takeovers is not None:
            self._takeovers.opened(info)

    def _pace(self) -> Pace:
        return self._turns.pace(self)

    async def _in_slices(self, steps: Generator[None, None, None]) -> None:
        """Others are served between steps. All are done before this ends, also when the caller has given up."""

        async def drive() -> None:
            pace = self._pace()
            for _ in steps:
                await pace.step()

        self._late.add(task := asyncio.create_task(drive()))
        task.add_done_callback(self._late.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])  # half of it must not stay, and nobody else may begin meanwhile
            raise

    async def _take_over(self, takeovers: Takeovers, info: common_pb2.StreamInfo) -> None:
        recovered: list[common_pb2.StreamletAssignment] = []
        pace = self._pace()
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
        """Of the streamlets that are recovered here, those of which nothing is known yet."""
        takeovers = self._takeovers
        return [
            each.streamlet_id
            for each in recovered
            if takeovers is not None and not takeovers.prepared(info.stream_id, each.streamlet_id, each.sources)
        ]

    def _recovered(self, info: common_pb2.StreamInfo) -> Iterable[common_pb2.StreamletAssignment]:
        """Assignments of streamlets that are to be recovered here."""
        return (each for each in info.assignments if each.sources and self._is_ours(each))

    def _is_ours(self, assignment: common_pb2.StreamletAssignment) -> bool:
        return assignment.broker_id == self.broker_id and not is_of_another_launch(
            assignment, self.broker_id, self.broker_epoch
        )

    def _is_old(self, info: common_pb2.StreamInfo) -> bool:
        return (
            info.stream_id in self._streams
            and info.assignments_version < self._streams.get(info.stream_id).assignments_version
        )

    async def _inherit(self, info: common_pb2.StreamInfo, states: list[common_pb2.StreamletState]) -> None:
        """Make durable what was handed over, of streamlets that are not owned yet."""
        wanted = {state.streamlet_id for state in states}
        assignments = {each.streamlet_id: each for each in info.assignments if each.streamlet_id in wanted}
        changes = []
        for state in states:
            assignment = assignments.get(state.streamlet_id)
            if assignment is None or not self._is_ours(assignment):
                continue
            held = holding(assignment, self.broker_id)
            await self._detached(info.stream_id, state.streamlet_id)
            streamlet = self._streamlet(info.stream_id, state.streamlet_id)
            if not held.owned or (streamlet is not None and streamlet.owned):
                continue
            if streamlet is not None:
                await self._settled(streamlet)
                streamlet.learn(producers_of(state))
            elif held.intervals[0].first_group_id == state.next_group_id:
                await self._cleared(info, state.streamlet_id)
            changes += changes_for(self._streams.index, info.stream_id, state, held, known=streamlet is not None)
        if changes:
            await until_done(lambda done: self._memory.note(changes, done))

    def _streamlet(self, stream_id: int, streamlet_id: int) -> Streamlet | None:
        return self._streams.get(stream_id).streamlets.get(streamlet_id) if stream_id in self._streams else None

    async def _detached(self, stream_id: int, streamlet_id: int) -> None:
        """What this broker had of the streamlet at an earlier time goes first."""
        await until_done(lambda done: self._streams.when_detached(stream_id, streamlet_id, lambda: done(None)))

    async def _cleared(self, info: common_pb2.StreamInfo, streamlet_id: int) -> None:
        """Nothing of before is ours: what is left here of a launch that has lost it to others must not come to life."""
        index = self._streams.index
        entries = (EntryId(info.stream_id, streamlet_id, number) for number in range(info.config.entries))
        if any(index.entry(entry) is not None for entry in entries):
            await until_done(lambda done: self._streams.drop_remains(info.stream_id, streamlet_id, done))

    @staticmethod
    async def _settled(streamlet: Streamlet) -> None:
        """Wait until nothing of the streamlet is being written: with it, older states of producers would be written."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLE_WAIT_S
        while busy := [entry for entry in streamlet.entries if any(segment.busy for segment in entry.tail)]:
            if loop.time() >= until:
                raise Unavailable(
                    f"older groups of streamlet {streamlet.streamlet_id} are still being written to disk; try again",
                    streamlet_id=streamlet.streamlet_id,
                )
            await woken(busy, min(until, loop.time() + SETTLE_CHECK_S))

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
            raise Unavailable("this broker knows no backups to take anything over from")
        return await self._takeovers.take_over(request)


def _without(info: common_pb2.StreamInfo, streamlet_ids: list[int]) -> common_pb2.StreamInfo:
    if not streamlet_ids:
        return info
    rest = common_pb2.StreamInfo()
    rest.CopyFrom(info)
    del rest.assignments[:]
    rest.assignments.extend(each for each in info.assignments if each.streamlet_id not in streamlet_ids)
    return rest


def _lacks(entry: Entry) -> int:
    """Bytes that are not durable at the level that readers wait for."""
    return sum(segment.head - segment.durable_head for segment in entry.tail)


async def _state_of(streamlet: Streamlet, pace: Pace) -> common_pb2.StreamletState:
    """Where a streamlet ends: all that another broker needs to go on."""
    state = common_pb2.StreamletState(
        streamlet_id=streamlet.streamlet_id,
        next_group_id=streamlet.next_group_id,
        next_records=[entry.next_record for entry in streamlet.entries],
    )
    for producer_id, record in list(streamlet.producers.items()):
        await pace.step()
        state.producers.add(
            producer_id=producer_id, producer_epoch=record.producer_epoch, next_sequence=record.next_sequence
        )
    return state
