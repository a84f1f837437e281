"""Support for tests of moves: brokers side by side, and a coordinator that only keeps the map of streamlets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kera.broker.ownership.orders import StreamletRecovery
from kera.broker.serving.limits import ServingLimits
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import KeraError
from kera.core.format.chunk import iterate_chunks
from kera.core.rpc import Reply, api
from kera.core.rpc.wire import error_from_message
from kera.v1 import common_pb2
from tests.unit.broker.support import STREAM_ID, Broker, Engine, chunk, next_of, read_range, stream_info

WAIT_MS = 5000


def assign(
    info: common_pb2.StreamInfo, owner: int, intervals: Sequence[tuple[int, int, Sequence[int]]] = (), **fields: Any
) -> common_pb2.StreamInfo:
    """Assign the first streamlet to `owner`, with intervals given by first group, broker and first records."""
    changed = common_pb2.StreamInfo()
    changed.CopyFrom(info)
    changed.assignments_version += 1
    assignment = changed.assignments[0]
    assignment.broker_id = owner
    for name, value in fields.items():
        setattr(assignment, name, value)
    del assignment.intervals[:]
    for first_group_id, broker_id, first_records in intervals:
        assignment.intervals.add(first_group_id=first_group_id, broker_id=broker_id, first_records=first_records)
    return changed


def moved(info: common_pb2.StreamInfo, state: common_pb2.StreamletState, to: int) -> common_pb2.StreamInfo:
    """The map after a sealed streamlet has moved to another broker. Intervals without groups are dropped."""
    assignment = info.assignments[0]
    intervals = [(each.first_group_id, each.broker_id, list(each.first_records)) for each in assignment.intervals]
    intervals = intervals or [(1, assignment.broker_id, [])]
    if intervals[-1][0] == state.next_group_id:
        del intervals[-1]
    if not intervals or intervals[-1][1] != to:
        intervals.append((state.next_group_id, to, list(state.next_records)))
    return assign(info, to, intervals)


class Cluster:
    """Brokers with one stream of one streamlet, and clients that follow the map."""

    def __init__(
        self,
        *engines: Engine,
        limits: ServingLimits | None = None,
        takeovers: StreamletRecovery | None = None,
        **config: Any,
    ) -> None:
        self.brokers = {
            number: Broker(engine, limits=limits, takeovers=takeovers) for number, engine in enumerate(engines, start=1)
        }
        self.info: common_pb2.StreamInfo = stream_info(owners=(1,), **config)
        self.info.assignments[0].broker_epoch = 0
        for number, broker in self.brokers.items():
            broker.broker.registered(number, [self.info] if number == 1 else [])
        self.sequences: Counter[int] = Counter()
        self.sent: list[tuple[int, int]] = []
        """Producer and sequence of all acknowledged chunks, in order."""

    @property
    def owner(self) -> Broker:
        return self.brokers[self.info.assignments[0].broker_id]

    # -- the coordinator -------------------------------------------------------------------------------------------

    async def seal(
        self, number: int, wait_ms: int = WAIT_MS, epoch: int = 0, version: int = 0
    ) -> common_pb2.StreamletState:
        request = api.SEAL_STREAMLETS.request(
            stream_id=STREAM_ID,
            streamlet_ids=[0],
            wait_ms=wait_ms,
            coordinator_epoch=epoch,
            assignments_version=version,
        )
        answer = await self.brokers[number].ask(api.SEAL_STREAMLETS, request)
        (state,) = answer.states
        return state  # type: ignore[no-any-return]

    async def where_ended(self, number: int) -> common_pb2.StreamletState:
        request = api.SEAL_STREAMLETS.request(stream_id=STREAM_ID, streamlet_ids=[0], ended=True)
        (state,) = (await self.brokers[number].ask(api.SEAL_STREAMLETS, request)).states
        return state  # type: ignore[no-any-return]

    async def open(
        self, number: int, *states: common_pb2.StreamletState, info: Any = None, epoch: int = 0
    ) -> list[int]:
        """Return the streamlets that the broker lacks."""
        request = api.OPEN_STREAMLETS.request(stream=info or self.info, handed_over=states, coordinator_epoch=epoch)
        return list((await self.brokers[number].ask(api.OPEN_STREAMLETS, request)).lacking)

    async def move(self, to: int) -> common_pb2.StreamletState:
        """Move the streamlet to another broker."""
        old = self.info.assignments[0].broker_id
        state = await self.seal(old)
        self.info = moved(self.info, state, to)
        await self.open(to, state)
        for number in self.brokers:
            if number != to:
                await self.open(number)
        return state

    # -- clients ---------------------------------------------------------------------------------------------------

    def send(self, count: int = 1, producer: int = 1) -> None:
        """Send chunks, which the owner stores at once."""
        for _ in range(count):
            sequence = self.sequences[producer]
            (status,) = self.owner.append(chunk(producer, sequence))
            assert not status.error.code, status.error
            self.sequences[producer] += 1
            self.sent.append((producer, sequence))

    def where(self, position: Position) -> int:
        """The broker that has a position."""
        assignment = self.info.assignments[0]
        intervals = list(assignment.intervals)
        if not intervals:
            return int(assignment.broker_id)
        found = intervals[0]
        for interval in intervals:
            if interval.first_group_id <= position.group_id:
                found = interval
        return int(found.broker_id)

    async def read_once(
        self, position: Position, *, entry: int = 0, wait_ms: int = 0, at: int | None = None
    ) -> tuple[list[tuple[int, int]], Position]:
        """Read once: producers and sequences of the chunks, and the next position. Raises the error of the answer."""
        broker = self.brokers[self.where(position) if at is None else at]
        result = broker.read(read_range(position, entry=entry), wait_ms=wait_ms)
        reply = result if isinstance(result, Reply) else await result
        (answer,) = reply.message.results
        if answer.error.code:
            raise error_from_message(answer.error)
        found = [(header.producer_id, header.sequence) for piece in reply.bulk for header, _ in iterate_chunks(piece)]
        return found, next_of(answer)

    async def read_all(self, position: Position = EARLIEST, *, entry: int = 0) -> list[tuple[int, int]]:
        """Read all chunks from a position on."""
        found: list[tuple[int, int]] = []
        while True:
            try:
                some, following = await self.read_once(position, entry=entry)
            except KeraError as error:
                if not error.retriable:
                    raise
                continue
            found += some
            if not some and following == position:
                return found
            position = following
