"""Receives a streamlet from another broker: makes the handed over state durable here before the streamlet is opened.

``kera.broker.ownership.handover`` describes the records, and their purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kera.broker.log.intervals import holding
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.waiting import until_done, woken
from kera.broker.ownership.handover import changes_for, producers_of
from kera.broker.ownership.streams import Streams
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.ids import EntryId
from kera.core.errors import Unavailable
from kera.v1 import common_pb2

WRITES_WAIT_S = 5.0
"""Maximum wait for older segments that are being written to disk when a streamlet comes back."""
WRITES_CHECK_S = 0.1
"""Pause between checks for the end of writes, because a failed write wakes no waiter."""


class Receiving:
    """Makes handed over states durable. Belongs to one event loop."""

    def __init__(
        self,
        streams: Streams,
        memory: PersistenceManager,
        is_ours: Callable[[common_pb2.StreamletAssignment], bool],
    ) -> None:
        """`is_ours`: whether an assignment makes this launch the owner of a streamlet."""
        self._streams = streams
        self._memory = memory
        self._is_ours = is_ours

    async def receive(self, info: common_pb2.StreamInfo, states: list[common_pb2.StreamletState]) -> None:
        """Make the handed over states of streamlets durable that are not owned yet."""
        wanted = {state.streamlet_id for state in states}
        assignments = {each.streamlet_id: each for each in info.assignments if each.streamlet_id in wanted}
        changes = []
        for state in states:
            assignment = assignments.get(state.streamlet_id)
            if assignment is None or not self._is_ours(assignment):
                continue
            held = holding(assignment, assignment.broker_id)
            await self._wait_for_removal(info.stream_id, state.streamlet_id)
            streamlet = self._streamlet(info.stream_id, state.streamlet_id)
            if not held.owned or (streamlet is not None and streamlet.owned):
                continue
            if streamlet is not None:
                await self._wait_for_writes(streamlet)
                streamlet.learn(producers_of(state))
            elif held.intervals[0].first_group_id == state.next_group_id:
                await self._remove_remains(info, state.streamlet_id)
            changes += changes_for(self._streams.index, info.stream_id, state, held, known=streamlet is not None)
        if changes:
            await until_done(lambda done: self._memory.index_writer.note(changes, done))

    def _streamlet(self, stream_id: int, streamlet_id: int) -> Streamlet | None:
        return self._streams.get(stream_id).streamlets.get(streamlet_id) if stream_id in self._streams else None

    async def _wait_for_removal(self, stream_id: int, streamlet_id: int) -> None:
        """Wait until the streamlet's earlier data at this broker is removed, if a removal is under way."""
        await until_done(lambda done: self._streams.removal.when_removed(stream_id, streamlet_id, lambda: done(None)))

    async def _remove_remains(self, info: common_pb2.StreamInfo, streamlet_id: int) -> None:
        """Remove the remains of an earlier launch that has lost the streamlet to others: they must not come back."""
        index = self._streams.index
        entries = (EntryId(info.stream_id, streamlet_id, number) for number in range(info.config.entries))
        if any(index.entry(entry) is not None for entry in entries):
            await until_done(lambda done: self._streams.removal.remove(info.stream_id, streamlet_id, done))

    @staticmethod
    async def _wait_for_writes(streamlet: Streamlet) -> None:
        """Wait until no segment of the streamlet is being written: the write would record older states of producers."""
        loop = asyncio.get_running_loop()
        until = loop.time() + WRITES_WAIT_S
        while busy := [entry for entry in streamlet.entries if any(segment.busy for segment in entry.tail)]:
            if loop.time() >= until:
                raise Unavailable(
                    f"older groups of streamlet {streamlet.streamlet_id} are still being written to disk; try again",
                    streamlet_id=streamlet.streamlet_id,
                )
            await woken(busy, min(until, loop.time() + WRITES_CHECK_S))
