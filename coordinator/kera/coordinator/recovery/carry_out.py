"""Carries out crash recovery: calls brokers and backups as ``decide`` says, and stores the results.

Guarantees:

1. The recovery is in the store before any call for it; no broker serves a streamlet before its ownership is written.
2. Everything can be interrupted: `Recoveries.advance` looks at what is stored and begins what is missing. The next
   coordinator does the same.
3. A broker's findings count only if nothing has changed meanwhile: same assignment, same launch.

`advance` is called every heartbeat interval, which is how often a failure is tried again, and whenever a recovery may
continue: a member registers, a heartbeat reports progress, an operation has succeeded. It looks at all that was lost.
So events that come close together are handled by one look (`Recoveries.advance_soon`), and one write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from kera.coordinator.cluster.catalog import with_assignments
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.intervals import broker_ids_of
from kera.coordinator.cluster.keys import last_epoch, member_key
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch, StreamletId
from kera.coordinator.recovery.batches import in_batches
from kera.coordinator.recovery.decide import (
    DRAINED,
    Action,
    EnterPhase,
    FenceAtBackup,
    FreeReplicas,
    OpenStream,
    ReleaseSource,
    TakeOver,
    begun,
    decide,
    enter,
    is_taken_over,
    key_of,
    plan_owners,
    released,
    word,
)
from kera.coordinator.recovery.progress import Unneeded
from kera.coordinator.recovery.records import KEPT, RecoveryRecords, Run, WorkKey, deletions_of, records_of
from kera.coordinator.recovery.take_over import CursorsOf, TakeOvers
from kera.coordinator.store.ledger import number
from kera.core.base.telemetry import get_logger
from kera.core.errors import StaleEpoch, Unavailable
from kera.core.rpc import api
from kera.v1 import common_pb2, coordinator_pb2
from kera.v1.coordinator_pb2 import RECOVERY_PHASE_CANCELLED

log = get_logger("kera.coordinator")

ORDERS_IN_FLIGHT_MAX = 32
"""Maximum of orders to brokers about streams at a time, of all recoveries together."""
ADVANCE_REST = 10
"""After a look at everything, the next one rests this many times as long, unless a caller needs it at once."""
ADVANCE_REST_S_MAX = 1.0

ObservePhase = Callable[[str, float], None]
"""Called when a phase has ended: its name in lower case, and how many seconds it took."""


class Recoveries:
    """Carries out all recoveries."""

    def __init__(
        self,
        state: State,
        cursors_of: CursorsOf,
        *,
        observe_phase: ObservePhase = lambda *_: None,
        kept: int = KEPT,
    ) -> None:
        """`kept`: the number of ended recoveries to remember."""
        self._state = state
        self._observe_phase = observe_phase
        self.records = RecoveryRecords(state, kept=kept)
        self.unneeded = Unneeded()
        """The backups of which brokers report that they need nothing there."""
        self._take_overs = TakeOvers(state, self.records, self.unneeded, cursors_of, self._shown)
        self._work = Work(self.advance_soon)
        self._soon: asyncio.TimerHandle | None = None
        """The pending call of `advance`, if there is one."""
        self._rest_s = 0.0
        self._closed = False
        self._orders = asyncio.Semaphore(ORDERS_IN_FLIGHT_MAX)

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.LIST_RECOVERIES: self._answer_list}

    def _answer_list(self, _: coordinator_pb2.ListRecoveriesRequest) -> coordinator_pb2.ListRecoveriesResponse:
        return coordinator_pb2.ListRecoveriesResponse(recoveries=self.describe_all())

    def load(self) -> None:
        """Load the recoveries from the ledger."""
        self.records.load()

    async def close(self) -> None:
        """Cancel the work under way; the next coordinator continues it."""
        self._closed = True
        if self._soon is not None:
            self._soon.cancel()
        await self._work.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._work.idle()
        while self._soon is not None and not self._closed:
            await asyncio.sleep(self._rest_s)  # sleep: until `advance` has looked at the latest events
            await self._work.idle()

    def describe_all(self) -> list[coordinator_pb2.RecoveryInfo]:
        """Describe all recoveries, the last one first, each with its present progress."""
        shown = map(self._shown, self.records.runs())
        return sorted(shown, key=lambda info: (info.detected_us, info.before_epoch), reverse=True)

    def _shown(self, run: Run) -> coordinator_pb2.RecoveryInfo:
        failures = [f"{_name_of(key)}: {reason}" for key in run.keys if (reason := self._work.failure(key))]
        return self.records.shown(run, failures)

    # --- beginning ---------------------------------------------------------------------------------------------

    async def begin(self, broker_id: int, cause: str, *, is_needed: Callable[[], bool]) -> None:
        """Declare a broker's launches lost, as of now, if there is anything to recover and a broker to take over.

        The check and the write are one change: `is_needed` is called while nothing else can change. With cause
        `DRAINED` the broker lives on, and only loses older groups of streamlets. Raises `Unavailable` if no broker can
        take over.
        """
        if info := await self._state.change(self._begin(broker_id, cause, is_needed)):
            log.warning("recovery begins", broker_id=broker_id, before_epoch=info.before_epoch, cause=cause)
            self.advance_soon()

    async def _begin(
        self, broker_id: int, cause: str, is_needed: Callable[[], bool]
    ) -> coordinator_pb2.RecoveryInfo | None:
        state = self._state
        epoch = state.next_epoch("broker")
        if not is_needed() or not self.records.has_lost(broker_id, epoch, cause):
            return None
        info = begun(broker_id, epoch, cause, state.clock.now_us())
        plan, waits_for = plan_owners(info, self.records.view(Run(info)))
        if not plan:
            raise Unavailable(
                f"broker {broker_id} is lost, and no other broker can take over; the recovery waits for"
                f" {'; '.join(waits_for)}",
                broker_id=broker_id,
            )
        changes: dict[str, bytes | None] = {last_epoch("broker"): number(epoch), **records_of([info])}
        known = state.brokers.record(broker_id)
        fenced = None if cause == DRAINED or known is None else state.brokers.kind.fenced(known, epoch)
        if fenced is not None:
            changes[member_key("broker", broker_id)] = fenced.SerializeToString()
        await state.write(changes)
        if fenced is not None:
            state.brokers.replace(fenced)
        self.records.put(info)
        return info

    def admitted(self, changed: Iterable[coordinator_pb2.RecoveryInfo]) -> None:
        """Continue the recoveries of `RecoveryRecords.at_registration`, which are stored now."""
        for info in changed:
            self.records.put(info)
            log.info(
                "recovery enters phase",
                broker_id=info.broker_id,
                before_epoch=info.before_epoch,
                phase=word(info.phase),
            )
        self.advance_soon()

    def report(self, launch: Launch, progress: Sequence[coordinator_pb2.RecoveryProgress]) -> None:
        """Note the progress in a broker's heartbeat."""
        if self.records.report(launch, progress):
            self.advance_soon()

    # --- continuing --------------------------------------------------------------------------------------------

    def advance_soon(self) -> None:
        """Schedule `advance` after a rest, in which more events may come together."""
        if self._soon is None and not self._closed:
            self._soon = asyncio.get_running_loop().call_later(self._rest_s, self.advance)

    def advance(self) -> None:
        """Begin whatever can be done now, for all recoveries."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._state.lost.done() or self._closed or self._state.catching_up:
            return
        now_s = asyncio.get_running_loop().time
        begun_s = now_s()
        self._advance()
        self._rest_s = min(ADVANCE_REST * (now_s() - begun_s), ADVANCE_REST_S_MAX)

    def _advance(self) -> None:
        self.records.forget_earlier_launches()
        for run in self.records.runs():
            if run.info.phase == RECOVERY_PHASE_CANCELLED:
                continue
            for owner in {launch for launch in run.planned.values() if not self._state.brokers.is_current(launch)}:
                self._work.cancel((key_of(run.info), TakeOver, owner))
            decision = decide(run.info, self.records.view(run))
            run.waits_for = decision.waits_for
            run.keys = tuple(self._start(run, action) for action in decision.actions)
        self._work.forget_failures({key for run in self.records.runs() for key in run.keys}.__contains__)

    def _start(self, run: Run, action: Action) -> WorkKey:
        """Start the work for an action, unless it is under way; return its key."""
        key: WorkKey = (key_of(run.info), type(action))
        match action:
            case FenceAtBackup(backup):
                key = (*key, backup)
                self._work.start(key, lambda: self._fence(run, backup))
            case TakeOver(owner, streamlets):
                key = (*key, owner)
                run.planned.update(dict.fromkeys(streamlets, owner))
                self._work.start(key, lambda: self._take_overs.carry_out(run, owner, streamlets, self.advance_soon))
            case OpenStream(owner, stream_id):
                key = (*key, owner, stream_id)
                self._work.start(key, lambda: self._open(run, owner, stream_id))
            case ReleaseSource(stream_ids):
                self._work.start(key, lambda: self._release(run, stream_ids))
            case FreeReplicas(backup):
                key = (*key, backup)
                self._work.start(key, lambda: self._free(run, backup))
            case EnterPhase(phase):
                key = (*key, phase)
                self._work.start(key, lambda: self._enter(run, phase))
        return key

    async def _fence(self, run: Run, backup: Launch) -> None:
        info = self._state.backups.describe(backup.member_id)
        with contextlib.suppress(StaleEpoch):  # it knows a later launch, and so refuses all earlier ones
            await self._state.backup_calls.fence(info, *key_of(run.info))
        run.fenced.add(backup)

    async def _free(self, run: Run, backup: Launch) -> None:
        # The highest epoch that the backup may know of the broker; a lower one would be refused.
        epoch = max(run.info.before_epoch, self._state.brokers.epoch(run.info.broker_id))
        info = self._state.backups.describe(backup.member_id)
        await self._state.backup_calls.free(info, run.info.broker_id, epoch, before_epoch=run.info.before_epoch)
        run.freed.add(backup)

    async def _open(self, run: Run, owner: Launch, stream_id: int) -> None:
        state = self._state
        async with self._orders, state.gate(stream_id):
            stream = self._state.catalog.find(stream_id)
            if stream is None or not self._state.brokers.is_current(owner):
                return
            await state.open(owner.member_id, stream)
        for one in stream.assignments:
            # Others that it owns may yet get something from this recovery, which this order did not contain.
            if Launch(one.broker_id, one.broker_epoch) == owner and is_taken_over(run.info, one):
                run.opened.add((StreamletId(stream_id, one.streamlet_id), owner))

    async def _release(self, run: Run, stream_ids: Sequence[int]) -> None:
        streams = [stream for stream_id in stream_ids if (stream := self._state.catalog.find(stream_id)) is not None]
        for batch in in_batches(streams):
            for stream in await self._state.change(self._write_released(run, [one.stream_id for one in batch])):
                key = (key_of(run.info), "tell", stream.stream_id)
                self._work.start(key, lambda stream=stream: self._tell_released(run, stream))  # type: ignore[misc]

    async def _write_released(self, run: Run, stream_ids: Iterable[int]) -> list[common_pb2.StreamInfo]:
        streams = []
        for stream in map(self._state.catalog.find, stream_ids):
            taken = [one for one in stream.assignments if is_taken_over(run.info, one)] if stream is not None else []
            if stream is not None and taken:
                given_up = [released(run.info, one) for one in taken]
                streams.append(with_assignments(stream, given_up, self._state.coordinator_epoch))
        info = self._shown(run)  # owners stop reporting released sources, so their last reports are written
        await self._state.write(records_of([info]), streams)
        self.records.put(info)
        return streams

    async def _tell_released(self, run: Run, stream: common_pb2.StreamInfo) -> None:
        # The lost broker may be back, or was never gone: it has kept its data until now.
        others = {run.info.broker_id} - {one for held in stream.assignments for one in broker_ids_of(held)}
        async with self._orders:
            await self._state.tell(
                stream,
                also=[one for one in others if self._state.brokers.is_alive(one)],
                otherwise="broker does not know yet that a stream is restored",
            )

    async def _enter(self, run: Run, phase: coordinator_pb2.RecoveryPhase.ValueType) -> None:
        before = run.info
        if not await self._state.change(self._write_entered(run, phase)):
            return
        began_us = max(before.detected_us, before.fenced_us, before.opened_us, before.readable_us)
        self._observe_phase(word(before.phase), max(0.0, (self._state.clock.now_us() - began_us) / 1e6))
        log.info(
            "recovery enters phase", broker_id=before.broker_id, before_epoch=before.before_epoch, phase=word(phase)
        )

    async def _write_entered(self, run: Run, phase: coordinator_pb2.RecoveryPhase.ValueType) -> bool:
        if EnterPhase(phase) not in decide(run.info, self.records.view(run)).actions:
            return False  # something has changed since
        info = enter(self._shown(run), phase, self._state.clock.now_us())
        superseded = self.records.superseded(info)
        await self._state.write({**records_of([info]), **deletions_of(superseded)})
        self.records.put(info)
        self.records.remove(superseded)
        return True


def _name_of(key: WorkKey) -> str:
    """Return the member to which a key's work belongs, in words."""
    match key:
        case (_, kind, Launch(member_id, _), *_):
            return f"{'backup' if kind in {FenceAtBackup, FreeReplicas} else 'broker'} {member_id}"
    return "the coordinator"
