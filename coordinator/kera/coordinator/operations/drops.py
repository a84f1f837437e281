"""Streams that brokers may have and should not: what was deleted, and what was not created to its end.

Which brokers those are is stored by the very write that makes it so: with the deletion of a stream, and before anybody
is asked to open a new one. So such a stream is dropped everywhere in the end, whoever leads by then, and also by a
broker that did not answer at first. Until then what it has of it takes its memory and its disk.

A broker keeps what it has until it is told, whatever its registration answers: metadata that were restored from an
older copy must destroy nothing. So of a stream that is deleted each broker of the cluster is told: one that has nothing
assigned may have files of an earlier time. Who is away, or given up for lost, is waited for until it is back or
forgotten (``forgetting``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from kera.coordinator.cluster.state import State, all_of
from kera.coordinator.cluster.work import Work
from kera.coordinator.store.ledger import Changes
from kera.core.errors import Unavailable
from kera.v1 import common_pb2

DROPS = "drops/"
"""``drops/<stream id, 16 hexadecimal digits>`` → JSON: `stream_id`, and `broker_ids` of those that may have it."""


class Drops:
    """Has every broker drop deleted and half-created streams, and remembers the brokers that have yet to answer."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._due: dict[int, set[int]] = {}
        """The brokers that have yet to drop a stream, by its id; not of one that is just being created."""
        self.work = Work()

    def load(self) -> None:
        """Take up what the ledger has."""
        for value in self._state.ledger.values(DROPS):
            self._due[json.loads(value)["stream_id"]] = _brokers_in(value)

    def needed(self, stream: common_pb2.StreamInfo, opening: Iterable[int] | None = None) -> Changes:
        """The changes to write together with the change by which brokers may have data of `stream` and should not.

        `opening`: of one that is just being made, the brokers that are to open it. Of any other all may have something.
        """
        known = self._state.brokers.ids() if opening is None else self._due.get(stream.stream_id, ())
        record = {"stream_id": stream.stream_id, "broker_ids": sorted({*known, *(opening or ())})}
        return {_key(stream.stream_id): json.dumps(record).encode()}

    def not_needed(self, stream: common_pb2.StreamInfo) -> Changes:
        """The changes to write together with the change by which they should have its data."""
        return {_key(stream.stream_id): None}

    async def carry_out(self, stream: common_pb2.StreamInfo) -> None:
        """Have brokers drop a stream, once `needed` is written; those that cannot be told now follow later."""
        self._due[stream.stream_id] = _brokers_in(self._state.ledger.get(_key(stream.stream_id)) or b"")
        self._begin(stream.stream_id)
        await self.work.ended(_what(stream.stream_id))

    def advance(self) -> None:
        """Have brokers drop what they have yet to drop, as far as they can be told."""
        for stream_id, due in self._due.items():
            if self._told_now(due) or not self._waited_for(due):
                self._begin(stream_id)

    def _begin(self, stream_id: int) -> None:
        if not self._state.lost.done():
            self.work.start(_what(stream_id), lambda: self._drop(stream_id))

    async def _drop(self, stream_id: int) -> None:
        state, due = self._state, self._due[stream_id]
        told = self._told_now(due)
        errors = await all_of(
            state.broker_calls.drop_stream(
                state.brokers.describe(broker_id), stream_id, coordinator_epoch=state.coordinator_epoch
            )
            for broker_id in told
        )
        failed = {broker_id: error for broker_id, error in zip(told, errors, strict=True) if error is not None}
        due.difference_update(set(told) - failed.keys())
        if failed:
            broker_id, error = next(iter(failed.items()))
            raise Unavailable(f"broker {broker_id} keeps stream {stream_id}, which is gone: {error}")
        if not self._waited_for(due):
            await state.change(self._forget(stream_id, due))

    async def _forget(self, stream_id: int, due: set[int]) -> None:
        if self._due.get(stream_id) is due:  # else it has become due anew meanwhile
            await self._state.write({_key(stream_id): None})
            del self._due[stream_id]

    def _told_now(self, due: set[int]) -> list[int]:
        return [broker_id for broker_id in sorted(due) if self._state.brokers.is_alive(broker_id)]

    def _waited_for(self, due: set[int]) -> bool:
        return not due.isdisjoint(self._state.brokers.ids())


def is_to_be_dropped(state: State, stream_id: int) -> bool:
    """Whether brokers may have a stream and should not, or it is just being created."""
    return state.ledger.get(_key(stream_id)) is not None


def _brokers_in(record: bytes) -> set[int]:
    return set(json.loads(record)["broker_ids"])


def _key(stream_id: int) -> str:
    return f"{DROPS}{stream_id:016x}"


def _what(stream_id: int) -> str:
    return f"drop stream {stream_id}"
