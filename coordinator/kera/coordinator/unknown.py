"""Streams that brokers hold and this coordinator does not know, and how they are taken up again (``adopt``).

There are such streams when the metadata were restored from a copy that is older than they are. Nobody drops them (see
``drops``); an operator sees them in ``kera cluster describe``, and has them adopted: with their old id, and as the
brokers knew them last, since what a broker was told of a stream it has written down.

A stream is adopted only when each broker that has a part of it has told of it, and is alive: what the latest of them
knows is what counts. Nothing of this is stored before that; a new leader is told anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from kera.coordinator.catalog import GROUPS_PER_LAUNCH, broker_ids_of
from kera.coordinator.drops import is_to_be_dropped
from kera.coordinator.ledger import number
from kera.coordinator.recovery import Launch
from kera.coordinator.state import State
from kera.coordinator.streams import LAST_STREAM_ID
from kera.coordinator.validation import checked_name
from kera.core.errors import InvalidArgument, StreamExists, Unavailable, UnknownStream
from kera.core.telemetry import get_logger
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")


class UnknownStreams:
    """See the head of this module."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._told: dict[int, dict[Launch, coordinator_pb2.UnknownStream]] = {}
        """What launches told, by stream."""

    def note(self, launch: Launch, told: Iterable[coordinator_pb2.UnknownStream]) -> None:
        """A broker tells of streams that we do not know."""
        for one in told:
            stream_id = one.stream.stream_id
            if not self._is_unknown(stream_id):
                continue
            if stream_id not in self._told:
                log.warning(
                    "a broker holds a stream that is not in the metadata, which may have been restored from an older"
                    " copy; kera cluster adopt takes it up again",
                    stream=one.stream.name,
                    stream_id=stream_id,
                    broker_id=launch.member_id,
                    bytes=one.bytes,
                )
            self._told.setdefault(stream_id, {})[launch] = one

    async def of(self, stream_ids: Iterable[int]) -> list[int]:
        """Which of the streams that a broker holds we do not know."""
        found, pace = [], self._state.pace()
        for stream_id in stream_ids:
            await pace.step()
            if self._is_unknown(stream_id):
                found.append(stream_id)
        return found

    def describe_all(self) -> list[coordinator_pb2.UnknownStream]:
        """One description of each, by their ids: as the latest of the brokers knows it, with what all of them hold."""
        self._forget()
        return [self._described(stream_id) for stream_id in sorted(self._told)]

    async def adopt(self, which: str, name: str = "") -> common_pb2.StreamInfo:
        """Take up again a stream, called by its name or its id, under `name` or its own; returns when brokers serve it.

        Raises `UnknownStream`, `StreamExists`, `InvalidArgument`, and `Unavailable` while a broker that has a part of
        it has not told of it.
        """
        return await self._state.to_the_end(self._adopt(which, name))

    async def _adopt(self, which: str, name: str) -> common_pb2.StreamInfo:
        state = self._state
        async with state.changing:
            stream = self._version(self._find(which))
            stream.name = checked_name(name or stream.name)
            try:
                state.catalog.check_free(stream.name)
            except StreamExists as error:
                raise StreamExists(
                    f"{error.message}; choose another one for the stream that is adopted, with --name",
                    stream=stream.name,
                ) from error
            state.catalog.check_room(stream)
            last = max(stream.stream_id, state.ledger.next_number(LAST_STREAM_ID) - 1)
            await state.write({LAST_STREAM_ID: number(last)}, [stream])
            del self._told[stream.stream_id]
        log.warning("stream adopted", stream=stream.name, stream_id=stream.stream_id)
        await state.tell(stream, otherwise="broker does not serve an adopted stream until it can be told")
        return stream

    def _find(self, which: str) -> int:
        known = self.describe_all()
        found = [one.stream.stream_id for one in known if which == str(one.stream.stream_id)]
        found = found or [one.stream.stream_id for one in known if which and which == one.stream.name]
        if len(found) > 1:
            raise InvalidArgument(f"several streams that brokers hold are called {which!r}; name its id: {found}")
        if not found:
            raise UnknownStream(
                f"no broker has told of a stream {which!r} that is not in the metadata; see kera cluster describe",
                stream=which,
            )
        return found[0]

    def _version(self, stream_id: int) -> common_pb2.StreamInfo:
        """The stream as it is from now on."""
        stream = common_pb2.StreamInfo()
        stream.CopyFrom(self._described(stream_id).stream)
        if not stream.name:
            raise InvalidArgument(
                f"stream {stream_id} cannot be adopted: no broker has written down what it is", stream_id=stream_id
            )
        brokers = self._state.brokers
        told = {launch.member_id for launch in self._told[stream_id]}
        missing = [one for one in broker_ids_of(stream) if one not in told or not brokers.is_alive(one)]
        if missing:
            raise Unavailable(
                f"stream {stream.name!r} has a part at broker {missing[0]}, which has not told of it; start the broker,"
                " and ask again after its next heartbeats",
                stream=stream.name,
                broker_ids=missing,
            )
        if any(one.sources for one in stream.assignments):
            raise InvalidArgument(
                f"stream {stream.name!r} cannot be adopted: it was being recovered from a lost broker when its brokers"
                " last heard of it",
                stream=stream.name,
            )
        for one in stream.assignments:
            epoch = brokers.epoch(one.broker_id)
            if one.broker_epoch != epoch:
                one.broker_epoch = epoch
                one.first_group_id += GROUPS_PER_LAUNCH
        stream.assignments_version += 1
        stream.config_version += 1
        return stream

    def _described(self, stream_id: int) -> coordinator_pb2.UnknownStream:
        told = self._told[stream_id]
        latest = max(told.values(), key=lambda one: (one.stream.assignments_version, one.stream.config_version))
        return coordinator_pb2.UnknownStream(
            stream=latest.stream,
            bytes=sum(one.bytes for one in told.values()),
            records=sum(one.records for one in told.values()),
            broker_ids=sorted(launch.member_id for launch in told),
        )

    def _is_unknown(self, stream_id: int) -> bool:
        state = self._state
        return stream_id not in state.catalog and not is_to_be_dropped(state, stream_id)

    def _forget(self) -> None:
        """Drop what launches told that are not current any more, and what is known by now."""
        brokers = self._state.brokers
        for stream_id in list(self._told):
            told = {
                launch: one
                for launch, one in self._told[stream_id].items()
                if brokers.epoch(launch.member_id) == launch.epoch and self._is_unknown(stream_id)
            }
            if told:
                self._told[stream_id] = told
            else:
                del self._told[stream_id]
