"""The recoveries under way, and the last ones that have ended. No I/O, no waiting.

A recovery's record is written before the change is made here, see `records_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kera.coordinator.cluster.keys import RECOVERIES
from kera.coordinator.cluster.state import State
from kera.coordinator.ids import Launch, StreamletId
from kera.coordinator.recovery.decide import (
    DRAINED,
    ENDED,
    LOST_MEMORY,
    PENDING,
    Owner,
    View,
    begun,
    enter,
    is_lost,
    is_taken_over,
    key_of,
)
from kera.coordinator.recovery.progress import gather, with_progress
from kera.v1 import common_pb2, coordinator_pb2
from kera.v1.coordinator_pb2 import RECOVERY_PHASE_CANCELLED

KEPT = 16
"""The number of ended recoveries to keep, to show what happened."""

WorkKey = tuple[object, ...]
"""Key of a piece of work: the recovery, the action, and its object."""


@dataclass(slots=True)
class Run:
    """A recovery, and the facts about it that need no record, because the next coordinator finds them out again."""

    info: coordinator_pb2.RecoveryInfo
    fenced: set[Launch] = field(default_factory=set)
    freed: set[Launch] = field(default_factory=set)
    planned: dict[StreamletId, Launch] = field(default_factory=dict)
    opened: set[tuple[StreamletId, Launch]] = field(default_factory=set)
    waits_for: tuple[str, ...] = ()
    keys: tuple[WorkKey, ...] = ()
    """Keys of the work to do now."""

    def found(self, bytes_total: int, records_lost: int) -> None:
        """Add the findings of a broker that has taken something over."""
        info = coordinator_pb2.RecoveryInfo()
        info.CopyFrom(self.info)
        info.bytes_total += bytes_total
        info.records_lost += records_lost
        self.info = info


class RecoveryRecords:
    """The recoveries under way and the last finished ones, as they are stored."""

    def __init__(self, state: State, *, kept: int = KEPT) -> None:
        self._state = state
        self._kept = kept
        self._runs: dict[tuple[int, int], Run] = {}
        self._progress: dict[Launch, list[coordinator_pb2.RecoveryProgress]] = {}

    def load(self) -> None:
        """Load the recoveries from the ledger."""
        for value in self._state.ledger.values(RECOVERIES):
            self.put(coordinator_pb2.RecoveryInfo.FromString(value))

    def put(self, info: coordinator_pb2.RecoveryInfo) -> None:
        """Add or update a recovery whose record is stored."""
        self._runs.setdefault(key_of(info), Run(info)).info = info

    def remove(self, infos: Iterable[coordinator_pb2.RecoveryInfo]) -> None:
        """Forget recoveries whose records are no longer stored."""
        for info in infos:
            del self._runs[key_of(info)]

    def runs(self) -> list[Run]:
        """Return all recoveries."""
        return list(self._runs.values())

    def report(self, launch: Launch, progress: Sequence[coordinator_pb2.RecoveryProgress]) -> bool:
        """Note the progress in a broker's heartbeat; return whether it may be news."""
        news = bool(progress) or launch in self._progress
        if news:
            self._progress[launch] = list(progress)
        return news

    def forget_earlier_launches(self) -> None:
        """Drop the reports of launches that are not current any more."""
        is_current = self._state.brokers.is_current
        self._progress = {launch: told for launch, told in self._progress.items() if told and is_current(launch)}

    def pending_of(self, broker_id: int) -> list[coordinator_pb2.RecoveryInfo]:
        """Return the recoveries from launches of a broker in which parts may still lack new owners."""
        return [
            run.info for (lost_id, _), run in self._runs.items() if lost_id == broker_id and run.info.phase in PENDING
        ]

    def active_of(self, broker_id: int) -> list[coordinator_pb2.RecoveryInfo]:
        """Return the recoveries from launches of a broker that have not ended."""
        return [
            run.info for (lost_id, _), run in self._runs.items() if lost_id == broker_id and run.info.phase not in ENDED
        ]

    def shown(self, run: Run, failures: Iterable[str]) -> coordinator_pb2.RecoveryInfo:
        """Return a recovery with its present progress. `failures`: the errors of its work so far."""
        if run.info.phase in ENDED:
            return run.info  # a look at all streams would change nothing
        streams = self.streams(run)
        reports = gather(run.info, streams, self._progress)
        return with_progress(run.info, streams, reports, (*run.waits_for, *failures))

    def streams(self, run: Run) -> list[common_pb2.StreamInfo]:
        """Return the replicated streams that a recovery may concern."""
        concerned = self._state.catalog.concerning(run.info.broker_id)
        return [stream for stream in concerned if stream.config.replication]

    def has_lost(self, broker_id: int, before_epoch: int, cause: str) -> bool:
        """Whether launches of a broker before an epoch had anything that has to be recovered."""
        probe = coordinator_pb2.RecoveryInfo(broker_id=broker_id, before_epoch=before_epoch, cause=cause)
        return any(
            is_lost(probe, stream, one)
            for stream in self._state.catalog.concerning(broker_id)
            for one in stream.assignments
        )

    def at_registration(
        self, broker_id: int, epoch: int, *, lost_memory: bool
    ) -> tuple[
        list[coordinator_pb2.RecoveryInfo], Callable[[common_pb2.StreamInfo, common_pb2.StreamletAssignment], bool]
    ]:
        """Return the effects of a new launch of a broker: changed or new recoveries, and a test for its lost
        assignments.

        Nothing changes before `put`. A launch that has its memory cancels each recovery without new owners so far,
        unless that is for lost memory. A launch that has lost its memory gets replicated streamlets back only by
        recovery.
        """
        now_us = self._state.clock.now_us()
        changed, lost = [], []
        streams = self._state.catalog.concerning(broker_id)
        for info in self.pending_of(broker_id):
            untouched = not any(is_taken_over(info, one) for stream in streams for one in stream.assignments)
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
        """Return the additional recoveries for a stream that was at brokers which have lost their memory.

        For a stream that became known after these brokers had registered. Nothing changes before `put`.
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

    def has_holes(self, broker_id: int) -> bool:
        """Whether data that a broker's launches had in memory were lost, and have yet to be taken over."""
        return any(info.cause == LOST_MEMORY for info in self.pending_of(broker_id))

    def recovered_before_epoch(self, broker_id: int) -> int:
        """Return the epoch below which other brokers read, or have read, replicas of a broker's launches; 0: none.

        A broker that was emptied frees its replicas itself, but not before its recovery is done.
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

    def view(self, run: Run) -> View:
        """Return all that decides what a recovery does next."""
        state, info = self._state, run.info
        backups = frozenset(Launch(one, state.backups.epoch(one)) for one in state.backups.live_ids())
        if info.phase in ENDED:  # only backups that come late are left to order
            return View((), {}, backups, fenced=frozenset(run.fenced), freed=frozenset(run.freed))
        counts = state.catalog.streamlet_counts()
        streams = self.streams(run)
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

    def superseded(self, info: coordinator_pb2.RecoveryInfo) -> list[coordinator_pb2.RecoveryInfo]:
        """The ended recoveries to delete when `info` is written, so that at most `kept` remain."""
        if info.phase not in ENDED:
            return []
        ended = [run.info for key, run in self._runs.items() if run.info.phase in ENDED and key != key_of(info)]
        return sorted(ended, key=lambda one: (one.detected_us, one.before_epoch), reverse=True)[self._kept - 1 :]


def records_of(infos: Iterable[coordinator_pb2.RecoveryInfo]) -> dict[str, bytes | None]:
    """Return the records to write for recoveries that begin, or have progressed."""
    return {_key(info): info.SerializeToString() for info in infos}


def deletions_of(infos: Iterable[coordinator_pb2.RecoveryInfo]) -> dict[str, bytes | None]:
    """Return the changes that delete the records."""
    return {_key(info): None for info in infos}


def _key(info: coordinator_pb2.RecoveryInfo) -> str:
    return f"{RECOVERIES}{info.broker_id:08x}/{info.before_epoch:016x}"
