"""Brokers' reports on streams that this coordinator does not know, or knows differently. In memory only."""

from __future__ import annotations

from collections.abc import Iterable

from kera.coordinator.cluster.catalog import broker_ids_of
from kera.coordinator.cluster.state import State
from kera.coordinator.ids import Launch
from kera.coordinator.operations.drops import is_to_be_dropped
from kera.core.base.telemetry import get_logger
from kera.core.errors import Unavailable
from kera.server.lineage import comes_from
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")


class UnknownReports:
    """The latest report of each broker about streams that the metadata lack or contradict."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._told: dict[int, dict[Launch, coordinator_pb2.UnknownStream]] = {}
        """Reports of launches, by stream."""
        self._named: dict[Launch, set[int]] = {}
        """The streams with news so far, of launches that have yet to name all that they hold."""
        self._awaited: dict[Launch, set[int]] = {}
        """The streams that launches have yet to report, for launches that have named all that they hold."""

    def note(self, launch: Launch, told: Iterable[coordinator_pb2.UnknownStream]) -> None:
        """Take a broker's reports on streams that this coordinator does not know."""
        for one in told:
            stream_id = one.stream.stream_id
            self._awaited.get(launch, set()).discard(stream_id)
            if not self._is_news(stream_id, one.stream.assignments_version, one.stream.config_version):
                continue
            if stream_id not in self._told and stream_id not in self._state.catalog:
                log.warning(
                    "a broker holds a stream that is not in the metadata, which may have been restored from an older"
                    " copy; kera cluster adopt takes it up again",
                    stream=one.stream.name,
                    stream_id=stream_id,
                    broker_id=launch.member_id,
                    bytes=one.bytes,
                )
            self._told.setdefault(stream_id, {})[launch] = one

    async def of(self, launch: Launch, request: coordinator_pb2.HeartbeatRequest) -> list[int]:
        """Return the held streams of which the broker may know a later version than this coordinator.

        If the broker has no part of a stream any more, and may not know that, it will get the stream's current version.
        """
        state, news = self._state, []
        pace = state.pace()
        for one in request.held_streams:
            await pace.step()
            if self._is_news(one.stream_id, one.assignments_version, one.config_version):
                news.append(one.stream_id)
            elif (known := state.catalog.find(one.stream_id)) and launch.member_id not in state.catalog.holders(known):
                state.tell_later(one.stream_id, launch.member_id)
        if news or request.held_streams_told:
            self._named.setdefault(launch, set()).update(news)
        if request.held_streams_told:
            self._awaited[launch] = self._named.pop(launch)
        return news

    def has_told(self, launch: Launch) -> bool:
        """Whether a launch has named all that it holds, and has reported all that is news."""
        return self._awaited.get(launch) == set()

    def versions(self) -> list[tuple[int, int]]:
        """Return the ids of streams of which launches know later versions, each with a version of its assignments."""
        return [
            (stream_id, one.stream.assignments_version)
            for stream_id, told in self._told.items()
            for one in told.values()
        ]

    def streams(self) -> list[int]:
        """Return the ids of the streams of which launches know later versions."""
        self._forget()
        return list(self._told)

    def told_of(self, stream_id: int) -> dict[Launch, coordinator_pb2.UnknownStream]:
        """Return the reports of launches on a stream; none if it is known by now."""
        self._forget()
        return self._told.get(stream_id, {})

    def discard(self, stream_id: int) -> None:
        """Drop the reports on a stream that was taken up."""
        self._told.pop(stream_id, None)  # an earlier query may have dropped them, since the stream is known by now

    def check_told(self, *versions: common_pb2.StreamInfo) -> None:
        """Raise `Unavailable` while a broker with a part, that lives or is restarting, may yet report more."""
        brokers, stream = self._state.brokers, versions[0]
        for broker_id in {broker_id for one in versions for broker_id in broker_ids_of(one)}:
            awaited = self._awaited.get(Launch(broker_id, brokers.epoch(broker_id)))
            comes = brokers.is_alive(broker_id) or brokers.is_expected(broker_id)
            if comes and (awaited is None or stream.stream_id in awaited):
                raise Unavailable(f"broker {broker_id} has yet to report its part of stream {stream.name!r}")

    def _is_news(self, stream_id: int, assignments_version: int, config_version: int) -> bool:
        """Whether these versions of a stream, which a broker knows, are not in the metadata."""
        state = self._state
        if stream_id not in state.catalog:
            return not is_to_be_dropped(state, stream_id)
        known = state.catalog.with_id(stream_id)
        return config_version > known.config_version or not comes_from(known, assignments_version)

    def _forget(self) -> None:
        """Drop the reports of launches that are not current any more, and reports that are known by now."""
        brokers = self._state.brokers
        for stream_id in list(self._told):
            told = {
                launch: one
                for launch, one in self._told[stream_id].items()
                if brokers.epoch(launch.member_id) == launch.epoch
                and self._is_news(stream_id, one.stream.assignments_version, one.stream.config_version)
            }
            if told:
                self._told[stream_id] = told
            else:
                del self._told[stream_id]
        for awaited in (self._named, self._awaited):
            for launch in [one for one in awaited if brokers.epoch(one.member_id) != one.epoch]:
                del awaited[launch]
