"""Sealing: streamlets take no more chunks, and all their data becomes durable, so that another broker can go on.

Seals end when they are overtaken: a streamlet that was opened again meanwhile, or dropped, is not sealed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kera.broker.log.digests import digests_in, join, joined
from kera.broker.log.entry import Entry
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.waiting import EntriesWaiter
from kera.broker.ownership.stream import Stream
from kera.broker.ownership.streams import Streams
from kera.broker.records import DIGEST_BYTES, Digests
from kera.broker.slices import Slices
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.done import nothing
from kera.core.base.turns import TimeSlices, Turns
from kera.core.errors import InvalidArgument, Unavailable
from kera.core.format.punctuation import NO_TIME
from kera.v1 import broker_pb2, common_pb2

WAIT_MS_MAX = 60_000
STATE_BYTES = 800_000
"""Maximum size of a streamlet's state with digests: the coordinator stores the state as one value."""
DIGESTS_SHARE = 16
"""Digests that are handed over of each producer, at least; while they fit, and of the most recent producers first."""
_PRODUCER_BYTES = 32
"""Maximum size of a producer in a state without its digests."""


class Sealing:
    """Carries out orders to seal streamlets. Belongs to one event loop."""

    def __init__(self, streams: Streams, memory: PersistenceManager, turns: Turns) -> None:
        self._streams = streams
        self._memory = memory
        self._turns = turns
        self._seals: dict[Streamlet, object] = {}
        """The latest order to seal each streamlet, while it is being carried out."""

    async def seal(self, request: broker_pb2.SealStreamletsRequest) -> list[common_pb2.StreamletState]:
        """Take no more chunks for streamlets; return where they end, once all their data is durable.

        Raises `NotOwner`, or `Unavailable` if that takes too long: then they take chunks again. Also refuses an order
        with older assignments than the present ones, because the coordinator has given it up. With `ended`, returns
        again where streamlets ended that have moved away before.
        """
        stream = self._streams.get(request.stream_id)
        if request.assignments_version and request.assignments_version < stream.assignments_version:
            raise Unavailable(
                f"the order to seal streamlets of stream {stream.name!r} came late: the move that needed it is over",
                stream=stream.name,
            )
        if len(request.streamlet_ids) > stream.streamlet_count:
            raise InvalidArgument(
                f"stream {stream.name!r} has {stream.streamlet_count} streamlets, and {len(request.streamlet_ids)} are"
                " to be sealed",
                stream=stream.name,
                limit=stream.streamlet_count,
            )
        if request.ended:
            return await self._ended(stream, request.streamlet_ids)
        streamlets: list[Streamlet] = []
        order, pace = object(), self._turns.pace(self)
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
            await self._wait_until_durable(stream, streamlets, min(request.wait_ms, WAIT_MS_MAX), pace)
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

    async def _ended(self, stream: Stream, streamlet_ids: Iterable[int]) -> list[common_pb2.StreamletState]:
        """Return where streamlets that have moved away ended here."""
        states, pace = [], self._turns.pace(self)
        for streamlet_id in dict.fromkeys(streamlet_ids):
            streamlet = stream.streamlet(streamlet_id)
            if streamlet.owned:
                raise InvalidArgument(
                    f"streamlet {streamlet_id} of stream {stream.name!r} has not moved away: this broker owns it",
                    stream=stream.name,
                    streamlet_id=streamlet_id,
                )
            last = streamlet.intervals[-1]
            state = await _state_of(streamlet, pace)
            state.next_group_id = last.end_group_id
            state.next_records[:] = [last.end_record(index) for index in range(len(streamlet.entries))]
            states.append(state)
        return states

    def seal_all(self) -> None:
        """Take no more chunks for any streamlet, because this launch ends."""
        for stream in self._streams:
            for streamlet in stream.streamlets.values():
                if streamlet.owned:
                    streamlet.seal()

    async def _wait_until_durable(
        self, stream: Stream, streamlets: list[Streamlet], wait_ms: int, pace: TimeSlices
    ) -> None:
        until = asyncio.get_running_loop().time() + wait_ms / 1000
        to_disk = stream.by_disk and stream.durability > common_pb2.DURABILITY_LEADER
        lacking: list[Entry] = []
        for streamlet in streamlets:
            await pace.step()
            tails = [(segment, segment.head) for entry in streamlet.entries.made for segment in entry.tail]
            if to_disk and tails:
                self._memory.commits.persist(tails, nothing)
            lacking += filter(_lacks, streamlet.entries.made)
        waiter = EntriesWaiter(Slices(asyncio.get_running_loop()))
        try:
            while lacking := [entry for entry in lacking if _lacks(entry)]:  # sealed, so no more are added
                waiter.again()
                for entry in lacking:
                    waiter.add(entry)
                # Check only now: a streamlet that was opened again before `add` would never wake the waiter.
                await self._check_sealed(stream, streamlets, pace)
                if not await waiter.woken(until):
                    raise self._not_durable(stream, lacking, wait_ms)
        finally:
            waiter.close()

    @staticmethod
    async def _check_sealed(stream: Stream, streamlets: list[Streamlet], pace: TimeSlices) -> None:
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


def _lacks(entry: Entry) -> int:
    """Return the bytes that are not durable at the level that readers wait for; not 0 with an unsure tail."""
    unsure = 0 if entry.unsure is None else max(1, entry.stored_record - entry.unsure.record)
    return unsure + sum(segment.head - segment.durable_head for segment in entry.tail)


async def _state_of(streamlet: Streamlet, pace: TimeSlices) -> common_pb2.StreamletState:
    """Return the state of a streamlet: everything that another broker needs to continue it."""
    state = common_pb2.StreamletState(
        streamlet_id=streamlet.streamlet_id,
        next_group_id=streamlet.next_group_id,
        next_records=[entry.next_record for entry in streamlet.entries],
    )
    promised_us = streamlet.promised_us
    if promised_us != NO_TIME:
        state.promised_us = promised_us
    producers = list(streamlet.producers.items())
    in_memory: dict[int, Digests] = {}
    for entry in streamlet.entries.made:
        for segment in entry.tail:
            await pace.step()
            join(in_memory, digests_in(segment))
    room = max(0, STATE_BYTES - _PRODUCER_BYTES * len(producers)) // DIGEST_BYTES
    share = max(DIGESTS_SHARE, room // max(1, len(producers)))
    for producer_id, record in reversed(producers):  # the most recent one comes first
        await pace.step()
        added = state.producers.add(
            producer_id=producer_id, producer_epoch=record.producer_epoch, next_sequence=record.next_sequence
        )
        known = in_memory.get(producer_id)
        stored = streamlet.entries.digests(producer_id)
        known = joined(stored, known) if known is not None else stored
        if known is not None and known[:2] == record:  # otherwise an earlier version stored its last chunks
            added.digests = known.last(min(share, room)) if room else b""
            room -= len(added.digests) // DIGEST_BYTES
    state.producers.reverse()
    return state
