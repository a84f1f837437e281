"""Carries out catching up with a cluster that is younger than the metadata; ``catching_up`` decides.

It begins with the record `RESTORED`, which `kera cluster restore` writes, or when a broker knows something that the
metadata lack; then the record is written, so that the next leader continues. Meanwhile `State.catching_up` says so, and
every part that would act on old metadata checks that.
"""

from __future__ import annotations

import json

from kera.coordinator.cluster.catalog import with_assignments
from kera.coordinator.cluster.keys import LAST_SCHEMA_ID, last_epoch
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch
from kera.coordinator.operations.catching_up import (
    CatchingUp,
    KnownNumbers,
    Phase,
    is_later_coordinator,
    is_later_launch,
    is_later_version,
)
from kera.coordinator.operations.unknown import UnknownStreams
from kera.coordinator.store.leadership import LEADER
from kera.coordinator.store.ledger import number
from kera.coordinator.store.metadata_copy import RESTORED
from kera.core.base.telemetry import get_logger
from kera.core.errors import Unavailable, UnknownLaunch
from kera.server.lineage import comes_from
from kera.v1 import coordinator_pb2

log = get_logger("kera.coordinator")


class Restored:
    """Catches up with a cluster that is newer than the metadata; until then no old decision is carried out."""

    def __init__(self, state: State, unknown: UnknownStreams) -> None:
        self._state = state
        self._unknown = unknown
        self._numbers = KnownNumbers(1 << 64, 1 << 64)
        self._catching_up: CatchingUp | None = None
        self._asked: dict[int, dict[int, int]] = {}
        """Brokers that want to register: the streams that they hold, each with the version of its assignments."""
        self._said = ""
        self.work = Work()

    def load(self) -> None:
        """Load the numbers that the metadata have, and begin to catch up if they were restored."""
        ledger = self._state.ledger
        if self._state.brokers.ids():  # else it is a new cluster, and no broker is younger
            leader = json.loads(ledger.get(LEADER) or b"{}")
            self._numbers = KnownNumbers(leader.get("previous_epoch", 0), ledger.last_number(last_epoch("broker")))
        if ledger.get(RESTORED) is not None:
            self._begin()

    # --- reports of brokers ------------------------------------------------------------------------------------

    async def registers(self, request: coordinator_pb2.RegisterBrokerRequest) -> None:
        """Check whether a broker may register. Raises `Unavailable` if it has to wait: it asks again soon."""
        launch = Launch(request.broker.broker_id, request.broker.broker_epoch)
        if self.is_later_launch(*launch):
            await self._notice()
            return  # it runs, and its heartbeats report what it has
        if 0 < launch.epoch == self._state.brokers.epoch(launch.member_id):
            return  # likewise; it repeats its registration
        held = {one.stream_id: one.assignments_version for one in request.held_streams}
        known = is_later_coordinator(self._numbers, request.known_coordinator_epoch, self._state.coordinator_epoch)
        if known or any(self._is_evidence(*one) for one in held.items()):
            await self._notice()
        if self._catching_up is None:
            return
        broker_id = 0 if request.chosen_id else launch.member_id
        if broker_id:
            self._asked[broker_id] = held
        self.advance()
        if self._state.catching_up and (self._catching_up.phase is Phase.ASKING or not broker_id):
            raise Unavailable(self._state.catching_up, catching_up=True)

    def going_on(self) -> set[int]:
        """Return the streams of which brokers know later versions: a registering broker gets nothing of them yet."""
        if not self._state.catching_up:
            return set()
        asked = (pair for held in self._asked.values() for pair in held.items())
        return {
            stream_id
            for stream_id, version in (*asked, *self._unknown.reports.versions())
            if self._is_later(stream_id, version)
        }

    async def beats(self, request: coordinator_pb2.HeartbeatRequest) -> None:
        """Check a broker's heartbeat for signs of old metadata. Raises `UnknownLaunch` if its launch is younger
        than these.
        """
        if self.is_later_launch(request.broker_id, request.broker_epoch):
            await self._notice()
            raise UnknownLaunch(
                f"launch {request.broker_epoch} of broker {request.broker_id} is younger than the metadata, which may"
                " have been restored from an older copy; it has to register again",
                broker_id=request.broker_id,
            )
        if any(self._is_evidence(one.stream_id, one.assignments_version) for one in request.held_streams):
            await self._notice()

    @property
    def takes_up(self) -> bool:
        """Whether streams may continue as brokers know them: all that may know later versions have been asked."""
        return self._catching_up is None or self._catching_up.phase is not Phase.ASKING

    def is_later_launch(self, broker_id: int, epoch: int) -> bool:
        """Whether a launch is younger than the metadata. See `catching_up.is_later_launch`."""
        state = self._state
        return is_later_launch(self._numbers, epoch, state.brokers.epoch(broker_id), state.next_epoch("broker"))

    def _is_later(self, stream_id: int, version: int) -> bool:
        catalog = self._state.catalog
        return stream_id in catalog and not comes_from(catalog.with_id(stream_id), version)

    def _is_evidence(self, stream_id: int, version: int) -> bool:
        news = self._is_later(stream_id, version) and not self._unknown.is_stuck(stream_id)
        return news and is_later_version(self._numbers, version, self._state.coordinator_epoch)

    # --- progress ----------------------------------------------------------------------------------------------

    async def _notice(self) -> None:
        """Begin to catch up, since a broker knows something that the metadata lack."""
        if self._catching_up is None:
            self._begin()
            await self._state.change(self._state.write({RESTORED: b"{}"}))

    def _begin(self) -> None:
        settings = self._state.settings
        self._catching_up = CatchingUp(
            self._state.clock.monotonic_s(),
            least_s=settings.lease_ms / 1000,
            grace_s=settings.restart_grace_ms / 1000,
        )
        self.advance()

    def advance(self) -> None:
        """Advance the phase; called every heartbeat interval, and after reports."""
        catching_up, now_s = self._catching_up, self._state.clock.monotonic_s()
        if catching_up is None:
            return
        if catching_up.phase is not Phase.OVER:
            before = catching_up.phase
            unsettled = [] if before is Phase.ASKING else self._unsettled()
            catching_up.advance(now_s, self._silent(), unsettled)
            if before is not catching_up.phase and catching_up.phase is Phase.TAKING_UP:
                catching_up.advance(now_s, (), self._unsettled())
            self._state.catching_up = catching_up.describe(now_s)
            self._tell(catching_up)
        if catching_up.phase is Phase.OVER:
            self.work.start(RESTORED, self._end)

    def _tell(self, catching_up: CatchingUp) -> None:
        """Log once each change of what the coordinator waits for."""
        said = f"{catching_up.phase.value}: {', '.join(catching_up.waits_for)}"
        if said != self._said:
            self._said = said
            log.warning(self._state.catching_up or "the metadata have caught up with the cluster")

    async def _end(self) -> None:
        await self._unknown.go_on_without()
        await self._unknown.recover_lost()
        await self._tell_anew()
        await self._state.change(self._over())
        self._catching_up = None
        self._asked.clear()

    async def _over(self) -> None:
        """Write the end, and the last id of schemas.

        Ids of schemas count from 1. The ids given since the copy are unknown, and lie below the new number.
        """
        state = self._state
        last_id = state.number_after(state.ledger.last_number(LAST_SCHEMA_ID))
        await state.write({RESTORED: None, LAST_SCHEMA_ID: number(last_id)})

    async def _tell_anew(self) -> None:
        """Send brokers a new version of every stream.

        A broker may have sealed streamlets for a move that the metadata do not know; until then it takes no chunks for
        them.
        """
        state = self._state
        for stream in state.catalog.streams():
            async with state.gate(stream.stream_id):
                await state.change(self._renew(stream.stream_id))
            await state.tell(stream, otherwise="broker has yet to hear of a stream after metadata were restored")

    async def _renew(self, stream_id: int) -> None:
        state = self._state
        if (stream := state.catalog.find(stream_id)) is not None:
            await state.write({}, [with_assignments(stream, [], state.coordinator_epoch)])

    def _silent(self) -> set[int]:
        """Return the brokers that have not reported what they hold."""
        brokers = self._state.brokers
        return {
            broker_id
            for broker_id in brokers.ids()
            if broker_id not in self._asked and not brokers.is_fenced(broker_id) and not self._has_told(broker_id)
        }

    def _unsettled(self) -> list[str]:
        """Return the brokers that have yet to report, and the streams that have to be taken up before anything else."""
        brokers = [f"broker {one}" for one in sorted(self._asked) if not self._has_told(one)]
        return brokers + [f"stream {name!r}" for name in self._unknown.unsettled()]

    def _has_told(self, broker_id: int) -> bool:
        brokers = self._state.brokers
        return brokers.is_alive(broker_id) and self._unknown.reports.has_told(
            Launch(broker_id, brokers.epoch(broker_id))
        )
