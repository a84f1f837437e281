"""Crash recovery, carried out: what ``recovery`` decides is asked of brokers and backups, and written.

Promises:

1. Nothing is asked of anybody before the recovery is in the store; no broker serves what it was not written to own.
2. All that happens can be cut short: `Recoveries.advance` looks at what is stored and begins what is missing. The next
   coordinator does the same.
3. Of what a broker finds out, only that counts for which nothing has changed meanwhile: same assignment, same launch.

`advance` is called every heartbeat interval, which is how often a failure is tried again, and whenever something may go
on: a member registers, a heartbeat tells of progress, an operation has succeeded. It looks at all that was lost; what
happens close together is therefore looked at once (`Recoveries.advance_soon`), and written at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kera.coordinator.cluster.catalog import with_assignments
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.intervals import broker_ids_of
from kera.coordinator.cluster.starts import starts_at
from kera.coordinator.cluster.state import HANDOVERS, RECOVERIES, STARTS, State, last_epoch, member_key, streamlet_key
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch, Streamlet
from kera.coordinator.recovery.decide import (
    DRAINED,
    ENDED,
    LOST_MEMORY,
    PENDING,
    Action,
    Decision,
    Enter,
    Fence,
    Free,
    Open,
    Owner,
    Release,
    Reports,
    TakeOver,
    Unneeded,
    View,
    begun,
    decide,
    enter,
    gather,
    is_lost,
    is_taken_over,
    key_of,
    plan_owners,
    recovered,
    released,
    source_of,
    with_progress,
    word,
)
from kera.coordinator.store.ledger import number
from kera.core.errors import StaleEpoch, Unavailable
from kera.core.rpc import api
from kera.core.telemetry import get_logger
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2
from kera.v1.coordinator_pb2 import RECOVERY_PHASE_CANCELLED

log = get_logger("kera.coordinator")

KEPT = 16
"""So many recoveries that have ended are kept, for those who ask what happened."""
ORDERS_IN_FLIGHT_MAX = 32
"""Orders to brokers about streams, of all recoveries together."""
TAKE_OVER_BYTES_MAX = 16 << 20
"""Of the streams in one request to take over; the rest follow in the next one."""
WRITE_BYTES_MAX = 256 << 10
"""Of the streams in one write: less than a transaction of any store takes."""
ADVANCE_REST = 10
"""So many times as long as a look at everything took, the next one rests, if nobody waits for it."""
ADVANCE_REST_S_MAX = 1.0

T = TypeVar("T")
_Key = tuple[object, ...]
"""Of work: the recovery, what is to be done, and for whom or what."""

CursorsOf = Callable[[int], Sequence[common_pb2.Cursor]]
"""Up to where the consumer groups have read a stream."""
ObservePhase = Callable[[str, float], None]
"""Called when a phase has ended: its name in lower case, and how many seconds it took."""


@dataclass(slots=True)
class _Run:
    """A recovery, and what this coordinator knows of it that needs no memory: all of it is found out again."""

    info: coordinator_pb2.RecoveryInfo
    fenced: set[Launch] = field(default_factory=set)
    freed: set[Launch] = field(default_factory=set)
    planned: dict[Streamlet, Launch] = field(default_factory=dict)
    opened: set[tuple[Streamlet, Launch]] = field(default_factory=set)
    waits_for: tuple[str, ...] = ()
    keys: tuple[_Key, ...] = ()
    """Of the work that there is to do now."""

    def found(self, bytes_total: int, records_lost: int) -> None:
        """What a broker found that took something over."""
        info = coordinator_pb2.RecoveryInfo()
        info.CopyFrom(self.info)
        info.bytes_total += bytes_total
        info.records_lost += records_lost
        self.info = info


class Recoveries:
    """All recoveries, those that have ended lately included."""

    def __init__(
        self,
        state: State,
        cursors_of: CursorsOf,
        *,
        observe_phase: ObservePhase = lambda *_: None,
    ) -> None:
        self._state = state
        self._cursors_of = cursors_of
        self._observe_phase = observe_phase
        self._runs: dict[tuple[int, int], _Run] = {}
        self._progress: dict[Launch, list[coordinator_pb2.RecoveryProgress]] = {}
        self.unneeded = Unneeded()
        """Backups of which brokers say that they have nothing there."""
        self._work = Work(self.advance_soon)
        self._soon: asyncio.TimerHandle | None = None
        """When `advance` is called, if something has happened."""
        self._rest_s = 0.0
        self._closed = False
        self._orders = asyncio.Semaphore(ORDERS_IN_FLIGHT_MAX)

    def load(self) -> None:
        """Take up what the ledger has."""
        for value in self._state.ledger.values(RECOVERIES):
            self._put(coordinator_pb2.RecoveryInfo.FromString(value))

    async def close(self) -> None:
        """End what is under way; the next coordinator goes on with it."""
        self._closed = True
        if self._soon is not None:
            self._soon.cancel()
        await self._work.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._work.idle()
        while self._soon is not None and not self._closed:
            await asyncio.sleep(self._rest_s)  # sleep: until it is looked at what has happened
            await self._work.idle()

    def handlers(self) -> Handlers:
        """Requests in, responses out, by method."""
        return {api.LIST_RECOVERIES: self._answer_list}

    def _answer_list(self, _: coordinator_pb2.ListRecoveriesRequest) -> coordinator_pb2.ListRecoveriesResponse:
        return coordinator_pb2.ListRecoveriesResponse(recoveries=self.describe_all())

    # --- what there is -----------------------------------------------------------------------------------------

    def describe_all(self) -> list[coordinator_pb2.RecoveryInfo]:
        """All of them, the last one first, each with how far it is now. Metrics ask for it on a thread of their own."""
        shown = [self._shown(run) for run in list(self._runs.values())]
        return sorted(shown, key=lambda info: (info.detected_us, info.before_epoch), reverse=True)

    def pending_of(self, broker_id: int) -> list[coordinator_pb2.RecoveryInfo]:
        """The recoveries of what launches of a broker had that may still have to find new owners."""
        return [
            run.info for (lost_id, _), run in self._runs.items() if lost_id == broker_id and run.info.phase in PENDING
        ]

    def active_of(self, broker_id: int) -> list[coordinator_pb2.RecoveryInfo]:
        """The recoveries of what launches of a broker had that have not ended."""
        return [
            run.info for (lost_id, _), run in self._runs.items() if lost_id == broker_id and run.info.phase not in ENDED
        ]

    def _put(self, info: coordinator_pb2.RecoveryInfo) -> None:
        run = self._runs.setdefault(key_of(info), _Run(info))
        run.info = info

    def _shown(self, run: _Run) -> coordinator_pb2.RecoveryInfo:
        failures = [f"{_who(key)}: {reason}" for key in run.keys if (reason := self._work.failure(key))]
        return with_progress(run.info, self._streams(run), self._reports(run), (*run.waits_for, *failures))

    def _streams(self, run: _Run) -> list[common_pb2.StreamInfo]:
        concerned = self._state.catalog.concerning(run.info.broker_id)
        return [stream for stream in concerned if stream.config.replication]

    def _stream(self, stream_id: int) -> common_pb2.StreamInfo | None:
        """A stream, if it is still there."""
        catalog = self._state.catalog
        return catalog.with_id(stream_id) if stream_id in catalog else None

    def _reports(self, run: _Run) -> Reports:
        return gather(run.info, self._streams(run), dict(self._progress))

    # --- beginning and ending ----------------------------------------------------------------------------------

    def has_lost(self, broker_id: int, before_epoch: int, cause: str) -> bool:
        """Whether there is anything to recover of what launches of a broker before an epoch had."""
        probe = coordinator_pb2.RecoveryInfo(broker_id=broker_id, before_epoch=before_epoch, cause=cause)
        return any(
            is_lost(probe, stream, one)
            for stream in self._state.catalog.concerning(broker_id)
            for one in stream.assignments
        )

    async def begin(self, broker_id: int, cause: str, *, is_needed: Callable[[], bool]) -> None:
        """Give a broker's launches up for lost, as of now, if there is anything to recover and somebody to do it.

        Looked at, and written, in one: `is_needed` is asked when nothing else can change. With cause `DRAINED` the
        broker lives on, and only loses older groups of streamlets. Raises `Unavailable` when there is nobody.
        """
        if info := await self._state.change(self._begin(broker_id, cause, is_needed)):
            log.warning("recovery begins", broker_id=broker_id, before_epoch=info.before_epoch, cause=cause)
            self.advance_soon()

    async def _begin(
        self, broker_id: int, cause: str, is_needed: Callable[[], bool]
    ) -> coordinator_pb2.RecoveryInfo | None:
        state = self._state
        epoch = state.next_epoch("broker")
        if not is_needed() or not self.has_lost(broker_id, epoch, cause):
            return None
        info = begun(broker_id, epoch, cause, state.clock.now_us())
        plan, waits_for = plan_owners(info, self._view(_Run(info)))
        if not plan:
            raise Unavailable(
                f"broker {broker_id} is lost, and nobody can take over; that waits for {'; '.join(waits_for)}",
                broker_id=broker_id,
            )
        changes: dict[str, bytes | None] = {last_epoch("broker"): number(epoch), **_records([info])}
        fenced = None if cause == DRAINED else state.brokers.fenced(broker_id, epoch)
        if fenced is not None:
            changes[member_key("broker", broker_id)] = fenced.SerializeToString()
        await state.write(changes)
        if fenced is not None:
            state.brokers.replace(fenced)
        self._put(info)
        return info

    def at_registration(
        self, broker_id: int, epoch: int, *, lost_memory: bool
    ) -> tuple[
        list[coordinator_pb2.RecoveryInfo], Callable[[common_pb2.StreamInfo, common_pb2.StreamletAssignment], bool]
    ]:
        """What a new launch of a broker means: changed or new recoveries, and which of its assignments are lost.

        Nothing changes before `admitted`. A launch that has its memory takes everything back of which nothing has a new
        owner; a launch that has lost it gets no replicated streamlet back but by recovery.
        """
        now_us = self._state.clock.now_us()
        changed, lost = [], []
        for info in self.pending_of(broker_id):
            untouched = not any(
                is_taken_over(info, one) for stream in self._streams_of(broker_id) for one in stream.assignments
            )
            if untouched and not lost_memory and info.cause != LOST_MEMORY:
                changed.append(enter(info, RECOVERY_PHASE_CANCELLED, now_us))
            else:
                lost.append(info)
        if lost_memory and self.has_lost(broker_id, epoch, LOST_MEMORY):
            new = begun(broker_id, epoch, LOST_MEMORY, now_us)
            changed.append(new)
            lost.append(new)

        def stays(stream: common_pb2.StreamInfo, assignment: common_pb2.StreamletAssignment) -> bool:
            return any(is_lost(info, stream, assignment) for info in lost)

        return changed, stays

    def of_lost_memory(self, stream: common_pb2.StreamInfo) -> list[coordinator_pb2.RecoveryInfo]:
        """The recoveries that it takes, beside those there are, if a stream was at brokers that have lost their memory.

        It became known after they had registered. Nothing changes before `admitted`.
        """
        brokers, found = self._state.brokers, list[coordinator_pb2.RecoveryInfo]()
        for broker_id in sorted({one.broker_id for one in stream.assignments}):
            epoch = brokers.epoch(broker_id)
            info = begun(broker_id, epoch, LOST_MEMORY, self._state.clock.now_us())
            there = any(one.before_epoch == epoch for one in self.pending_of(broker_id))
            owned = [one for one in stream.assignments if one.broker_id == broker_id]
            if brokers.has_lost_memory(broker_id) and not (there or brokers.is_fenced(broker_id)):
                found += [info] * any(is_lost(info, stream, one) for one in owned)
        return found

    def _streams_of(self, broker_id: int) -> list[common_pb2.StreamInfo]:
        return self._state.catalog.concerning(broker_id)

    def recovered_before_epoch(self, broker_id: int) -> int:
        """Replicas of launches of a broker before this epoch are read, or were, by others; 0: none are.

        A broker that was emptied frees its replicas itself, but not before that is done.
        """
        return max(
            (
                info.before_epoch
                for info in (run.info for run in self._runs.values())
                if info.broker_id == broker_id
                and info.phase != RECOVERY_PHASE_CANCELLED
                and not (info.cause == DRAINED and info.phase in ENDED)
            ),
            default=0,
        )

    def records(self, infos: Iterable[coordinator_pb2.RecoveryInfo]) -> dict[str, bytes | None]:
        """What is to be written for what `at_registration` said."""
        return _records(infos)

    def admitted(self, changed: Iterable[coordinator_pb2.RecoveryInfo]) -> None:
        """What `at_registration` said is stored."""
        for info in changed:
            self._put(info)
            log.info("recovery", broker_id=info.broker_id, before_epoch=info.before_epoch, phase=word(info.phase))
        self.advance_soon()

    def report(self, launch: Launch, progress: Sequence[coordinator_pb2.RecoveryProgress]) -> None:
        """What a broker says in its heartbeat of how far it is."""
        if progress or launch in self._progress:
            self._progress[launch] = list(progress)
            self.advance_soon()

    # --- going on ----------------------------------------------------------------------------------------------

    def advance_soon(self) -> None:
        """Have `advance` called, after a rest in which more may come together."""
        if self._soon is None and not self._closed:
            self._soon = asyncio.get_running_loop().call_later(self._rest_s, self.advance)

    def advance(self) -> None:
        """Begin whatever can be done now, of all recoveries."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._state.lost.done() or self._closed or self._state.catching_up:
            return
        begun_s = time.perf_counter()
        self._advance()
        self._rest_s = min(ADVANCE_REST * (time.perf_counter() - begun_s), ADVANCE_REST_S_MAX)

    def _advance(self) -> None:
        is_current = self._state.brokers.is_current
        self._progress = {launch: told for launch, told in self._progress.items() if told and is_current(launch)}
        for run in list(self._runs.values()):
            if run.info.phase == RECOVERY_PHASE_CANCELLED:
                continue
            decision = self._decide(run)
            run.waits_for = decision.waits_for
            run.keys = tuple(self._start(run, action) for action in decision.actions)
        self._work.forget_failures({key for run in self._runs.values() for key in run.keys})

    def _decide(self, run: _Run) -> Decision:
        for owner in {launch for launch in run.planned.values() if not self._state.brokers.is_current(launch)}:
            self._work.cancel((key_of(run.info), TakeOver, owner))
        return decide(run.info, self._view(run))

    def _view(self, run: _Run) -> View:
        state, info = self._state, run.info
        backups = frozenset(map(state.backups.launch, state.backups.live_ids()))
        if info.phase in ENDED:  # all that is left to do is to tell backups that come late
            return View((), {}, backups, fenced=frozenset(run.fenced), freed=frozenset(run.freed))
        counts = state.catalog.streamlet_counts()
        streams = self._streams(run)
        reports = gather(info, streams, self._progress)
        return View(
            streams=streams,
            owners={
                broker.broker_id: Owner(
                    epoch=broker.broker_epoch,
                    segment_bytes=broker.segment_bytes,
                    streamlets=counts[broker.broker_id],
                    draining=broker.draining or broker.restarting,
                )
                for broker in map(state.brokers.describe, state.brokers.live_ids())
            },
            backups=backups,
            segment_bytes=state.brokers.describe(info.broker_id).segment_bytes,
            fenced=frozenset(run.fenced),
            freed=frozenset(run.freed),
            planned=run.planned,
            opened=frozenset(run.opened),
            readable=reports.readable,
            restored=reports.restored,
            older=tuple(
                one.before_epoch for one in self.active_of(info.broker_id) if one.before_epoch < info.before_epoch
            ),
        )

    def _start(self, run: _Run, action: Action) -> _Key:
        """Have an action carried out, unless that is under way; returns the key of that work."""
        recovery = key_of(run.info)
        match action:
            case Fence(backup):
                return self._work_on((recovery, Fence, backup), lambda: self._fence(run, backup))
            case TakeOver(owner, streamlets):
                run.planned.update(dict.fromkeys(streamlets, owner))
                return self._work_on((recovery, TakeOver, owner), lambda: self._take_over(run, owner, streamlets))
            case Open(owner, stream_id):
                return self._work_on((recovery, Open, owner, stream_id), lambda: self._open(run, owner, stream_id))
            case Release(stream_ids):
                return self._work_on((recovery, Release), lambda: self._release(run, stream_ids))
            case Free(backup):
                return self._work_on((recovery, Free, backup), lambda: self._free(run, backup))
            case Enter(phase):
                return self._work_on((recovery, Enter, phase), lambda: self._enter(run, phase))

    def _work_on(self, key: _Key, work: Callable[[], Coroutine[Any, Any, None]]) -> _Key:
        self._work.start(key, work)
        return key

    async def _fence(self, run: _Run, backup: Launch) -> None:
        info = self._state.backups.describe(backup.member_id)
        with contextlib.suppress(StaleEpoch):  # a later launch was seen there already, and with that all before refused
            await self._state.backup_calls.fence(info, *key_of(run.info))
        run.fenced.add(backup)

    async def _free(self, run: _Run, backup: Launch) -> None:
        # The highest epoch that the backup may know of the broker; a lower one would be refused.
        epoch = max(run.info.before_epoch, self._state.brokers.epoch(run.info.broker_id))
        info = self._state.backups.describe(backup.member_id)
        await self._state.backup_calls.free(info, run.info.broker_id, epoch, before_epoch=run.info.before_epoch)
        run.freed.add(backup)

    async def _take_over(self, run: _Run, owner: Launch, streamlets: Iterable[Streamlet]) -> None:
        state = self._state
        request = self._request(run, streamlets)
        answer = await state.broker_calls.take_over(state.brokers.describe(owner.member_id), request)
        found = {Streamlet(one.stream_id, one.state.streamlet_id): one.state for one in answer.streamlets}
        counted = False
        for batch in _batches(request.streams, lambda asked: asked.ByteSize()):
            if await state.change(self._write_taken(run, owner, batch, found, None if counted else answer)):
                counted = True
                self.advance_soon()  # so that the owner opens it, while others are written
        if answer.waits_for:
            raise Unavailable(f"it waits for {'; '.join(answer.waits_for)}", broker_id=owner.member_id)

    async def _write_taken(
        self,
        run: _Run,
        owner: Launch,
        asked: Iterable[broker_pb2.TakeOverStream],
        found: Mapping[Streamlet, common_pb2.StreamletState],
        totals: broker_pb2.TakeOverResponse | None,
    ) -> bool:
        """Write that `owner` has what it was asked for and has found; whether there was any.

        `totals`: what of it is not counted yet.
        """
        if self._state.catching_up or run.info.phase not in PENDING or not self._state.brokers.is_current(owner):
            return False  # it came back, or the owner-to-be went: what was found out is about something else
        streams = [stream for one in asked if (stream := self._taken(run, owner, one, found)) is not None]
        if streams:
            if totals is not None:
                run.found(totals.bytes_total, totals.records_lost)
            info = self._shown(run)
            await self._state.write(_records([info]), streams)
            self._put(info)
        return bool(streams)

    def _request(self, run: _Run, streamlets: Iterable[Streamlet]) -> broker_pb2.TakeOverRequest:
        state = self._state
        by_stream: dict[int, list[int]] = {}
        for streamlet in streamlets:
            by_stream.setdefault(streamlet.stream_id, []).append(streamlet.streamlet_id)
        request = broker_pb2.TakeOverRequest(
            coordinator_epoch=state.coordinator_epoch,
            source=source_of(run.info),
        )
        total_bytes = 0
        for stream_id, streamlet_ids in by_stream.items():
            stream = state.catalog.with_id(stream_id)
            total_bytes += stream.ByteSize()
            if request.streams and total_bytes > TAKE_OVER_BYTES_MAX:
                break
            request.streams.add(
                stream=stream,
                streamlet_ids=streamlet_ids,
                starts=[start for one in streamlet_ids for start in self._starts(run, stream, one)],
                cursors=[one for one in self._cursors_of(stream_id) if one.streamlet_id in streamlet_ids],
                handed_over=[state for one in streamlet_ids for state in self._handed_over(stream_id, one)],
            )
        request.backups.extend(self._backups_for(run, request))
        return request

    def _backups_for(self, run: _Run, request: broker_pb2.TakeOverRequest) -> list[common_pb2.BackupInfo]:
        """All backups; those that are dead and that nobody needs to wait for look like ones that are being emptied.

        Those that do not refuse the source yet look like dead ones: they may still get more of it.
        """
        sources = [request.source]
        for asked in request.streams:
            sources += [
                one for streamlet_id in asked.streamlet_ids for one in asked.stream.assignments[streamlet_id].sources
            ]
        found = self._state.backups.describe_all()
        for backup in found:
            if not backup.alive and self.unneeded.by_all(sources, backup.backup_id):
                backup.draining = True
            if run.info.cause != DRAINED and Launch(backup.backup_id, backup.backup_epoch) not in run.fenced:
                backup.alive = False
        return found

    def _starts(self, run: _Run, stream: common_pb2.StreamInfo, streamlet_id: int) -> list[common_pb2.EntryStart]:
        value = self._state.ledger.get(streamlet_key(STARTS, stream.stream_id, streamlet_id))
        known = broker_pb2.TakeOverStream.FromString(value or b"").starts
        return starts_at(stream.assignments[streamlet_id], run.info.broker_id, known)

    def _handed_over(self, stream_id: int, streamlet_id: int) -> list[common_pb2.StreamletState]:
        value = self._state.ledger.get(streamlet_key(HANDOVERS, stream_id, streamlet_id))
        return [] if value is None else [common_pb2.StreamletState.FromString(value)]

    def _taken(
        self,
        run: _Run,
        owner: Launch,
        asked: broker_pb2.TakeOverStream,
        found: Mapping[Streamlet, common_pb2.StreamletState],
    ) -> common_pb2.StreamInfo | None:
        """The stream with `owner` as the owner of what it has found; None: nothing of it is as it was asked for."""
        stream_id = asked.stream.stream_id
        stream = self._stream(stream_id)
        if stream is None:
            return None
        changed = [
            recovered(
                run.info, stream.assignments[one], owner, found[Streamlet(stream_id, one)], self._own_losses(run, owner)
            )
            for one in asked.streamlet_ids
            if stream.assignments[one] == asked.stream.assignments[one] and Streamlet(stream_id, one) in found
        ]
        return with_assignments(stream, changed, self._state.coordinator_epoch) if changed else None

    def _own_losses(self, run: _Run, owner: Launch) -> list[coordinator_pb2.RecoveryInfo]:
        """Recoveries of earlier launches of a broker that takes over what another one had, if any are pending."""
        own = self.pending_of(owner.member_id) if owner.member_id != run.info.broker_id else []
        return [info for info in own if info.cause != DRAINED]

    async def _open(self, run: _Run, owner: Launch, stream_id: int) -> None:
        state = self._state
        async with self._orders, state.gate(stream_id):
            stream = self._stream(stream_id)
            if stream is None or not self._state.brokers.is_current(owner):
                return
            await state.open(owner.member_id, stream)
        for one in stream.assignments:
            # Others that are its own may yet get something from this recovery: of that it was told nothing.
            if Launch(one.broker_id, one.broker_epoch) == owner and is_taken_over(run.info, one):
                run.opened.add((Streamlet(stream_id, one.streamlet_id), owner))

    async def _release(self, run: _Run, stream_ids: Sequence[int]) -> None:
        streams = [stream for stream_id in stream_ids if (stream := self._stream(stream_id)) is not None]
        for batch in _batches(streams, lambda stream: stream.ByteSize()):
            for stream in await self._state.change(self._write_released(run, [one.stream_id for one in batch])):
                key = (key_of(run.info), "tell", stream.stream_id)
                self._work.start(key, lambda stream=stream: self._tell_released(run, stream))  # type: ignore[misc]

    async def _write_released(self, run: _Run, stream_ids: Iterable[int]) -> list[common_pb2.StreamInfo]:
        streams = []
        for stream in map(self._stream, stream_ids):
            taken = [one for one in stream.assignments if is_taken_over(run.info, one)] if stream is not None else []
            if stream is not None and taken:
                given_up = [released(run.info, one) for one in taken]
                streams.append(with_assignments(stream, given_up, self._state.coordinator_epoch))
        info = self._shown(run)  # without the source the owners tell of it no more: what they said last is written
        await self._state.write(_records([info]), streams)
        self._put(info)
        return streams

    async def _tell_released(self, run: _Run, stream: common_pb2.StreamInfo) -> None:
        # The broker that was lost may be back, or never have gone: it has kept what it had until now.
        others = {run.info.broker_id} - {one for held in stream.assignments for one in broker_ids_of(held)}
        async with self._orders:
            await self._state.tell(
                stream,
                also=[one for one in others if self._state.brokers.is_alive(one)],
                otherwise="broker does not know yet that a stream is restored",
            )

    async def _enter(self, run: _Run, phase: coordinator_pb2.RecoveryPhase.ValueType) -> None:
        before = run.info
        if not await self._state.change(self._write_entered(run, phase)):
            return
        began_us = max(before.detected_us, before.fenced_us, before.opened_us, before.readable_us)
        self._observe_phase(word(before.phase), max(0.0, (self._state.clock.now_us() - began_us) / 1e6))
        log.info("recovery", broker_id=before.broker_id, before_epoch=before.before_epoch, phase=word(phase))

    async def _write_entered(self, run: _Run, phase: coordinator_pb2.RecoveryPhase.ValueType) -> bool:
        if Enter(phase) not in decide(run.info, self._view(run)).actions:
            return False  # something has changed since
        info = enter(self._shown(run), phase, self._state.clock.now_us())
        pruned = self._pruned(info)
        await self._state.write({**_records([info]), **_deletions(pruned)})
        self._put(info)
        for gone in pruned:
            del self._runs[key_of(gone)]
        return True

    def _pruned(self, info: coordinator_pb2.RecoveryInfo) -> list[coordinator_pb2.RecoveryInfo]:
        """What goes when `info` is written, so that at most `KEPT` that have ended are there."""
        if info.phase not in ENDED:
            return []
        ended = [run.info for key, run in self._runs.items() if run.info.phase in ENDED and key != key_of(info)]
        return sorted(ended, key=lambda one: (one.detected_us, one.before_epoch), reverse=True)[KEPT - 1 :]


def _who(key: _Key) -> str:
    """Who is to do what a key is of."""
    match key:
        case (_, kind, Launch(member_id, _), *_):
            return f"{'backup' if kind in {Fence, Free} else 'broker'} {member_id}"
    return "the coordinator"


def _batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """As many at a time as one write takes."""
    batch: list[T] = []
    total_bytes = 0
    for item in items:
        batch.append(item)
        total_bytes += size_of(item)
        if total_bytes >= WRITE_BYTES_MAX:
            yield batch
            batch, total_bytes = [], 0
    if batch:
        yield batch


def _records(infos: Iterable[coordinator_pb2.RecoveryInfo]) -> dict[str, bytes | None]:
    return {_key(info): info.SerializeToString() for info in infos}


def _deletions(infos: Iterable[coordinator_pb2.RecoveryInfo]) -> dict[str, bytes | None]:
    return {_key(info): None for info in infos}


def _key(info: coordinator_pb2.RecoveryInfo) -> str:
    return f"{RECOVERIES}{info.broker_id:08x}/{info.before_epoch:016x}"
