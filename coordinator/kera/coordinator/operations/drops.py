"""Streams that brokers may have and should not: deleted ones, and ones whose creation failed.

The very write that makes a broker's data superfluous stores which brokers these are: the deletion of a stream, or the
write before brokers are asked to open a new one. So such a stream is dropped everywhere in the end, whichever
coordinator leads by then, and also by a broker that did not answer at first. Until then it takes memory and disk there.

A broker keeps its data until it gets the order, whatever its registration answers: metadata that were restored from an
older copy must destroy nothing. So all brokers of the cluster get the order to drop a deleted stream: even one without
an assignment may have files from an earlier time. The coordinator waits for a broker that is away or was declared lost
until it is back or forgotten (``forgetting``).
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
"""``drops/<stream id, 16 hexadecimal digits>`` → JSON: `stream_id`, and `broker_ids` of the brokers that may
have it.
"""


class Drops:
    """Has every broker drop deleted and half-created streams, and remembers the brokers that have yet to answer."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._due: dict[int, set[int]] = {}
        """The brokers that have yet to drop a stream, by its id; without streams whose creation is under way."""
        self.work = Work()

    def load(self) -> None:
        """Load the pending drops from the ledger."""
        for value in self._state.ledger.values(DROPS):
            self._due[json.loads(value)["stream_id"]] = _brokers_in(value)

    def needed(self, stream: common_pb2.StreamInfo, opening: Iterable[int] | None = None) -> Changes:
        """Return the changes to write together with the change after which brokers may have data of `stream`
        and should not.

        `opening`: for a stream that is being created, the brokers that will open it. Of other streams all may have
        something.
        """
        known = self._state.brokers.ids() if opening is None else self._due.get(stream.stream_id, ())
        record = {"stream_id": stream.stream_id, "broker_ids": sorted({*known, *(opening or ())})}
        return {_key(stream.stream_id): json.dumps(record).encode()}

    def not_needed(self, stream: common_pb2.StreamInfo) -> Changes:
        """Return the changes to write together with the change that makes its data wanted."""
        return {_key(stream.stream_id): None}

    async def carry_out(self, stream: common_pb2.StreamInfo) -> None:
        """Have brokers drop a stream, once `needed` is written; brokers that cannot be reached now follow later."""
        self._due[stream.stream_id] = _brokers_in(self._state.ledger.get(_key(stream.stream_id)) or b"")
        self._begin(stream.stream_id)
        await self.work.ended(_what(stream.stream_id))

    def advance(self) -> None:
        """Have the reachable brokers drop the streams that they have yet to drop."""
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
        if self._due.get(stream_id) is due:  # else a new drop of the stream has been stored meanwhile
            await self._state.write({_key(stream_id): None})
            del self._due[stream_id]

    def _told_now(self, due: set[int]) -> list[int]:
        return [broker_id for broker_id in sorted(due) if self._state.brokers.is_alive(broker_id)]

    def _waited_for(self, due: set[int]) -> bool:
        return not due.isdisjoint(self._state.brokers.ids())


def is_to_be_dropped(state: State, stream_id: int) -> bool:
    """Whether brokers may have a stream and should not, or its creation is under way."""
    return state.ledger.get(_key(stream_id)) is not None


def _brokers_in(record: bytes) -> set[int]:
    return set(json.loads(record)["broker_ids"])


def _key(stream_id: int) -> str:
    return f"{DROPS}{stream_id:016x}"


def _what(stream_id: int) -> str:
    return f"drop stream {stream_id}"
