"""The progress of recoveries, and the backups that are not needed, as brokers report them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kera.coordinator.ids import Launch, StreamletId
from kera.coordinator.recovery.decide import is_lost, is_taken_over, source_of
from kera.v1 import common_pb2
from kera.v1.coordinator_pb2 import RecoveryInfo, RecoveryProgress

WAITS_MAX = 20
"""Maximum of reported reasons for which a recovery waits."""
LAUNCHES_MAX = 4
"""Launches of a broker whose reports on backups are remembered."""


class Reports(NamedTuple):
    """Owners' reports on one source."""

    readable: frozenset[StreamletId]
    restored: frozenset[StreamletId]
    bytes_total: int
    bytes_recovered: int
    bytes_restored: int
    records_lost: int
    waits_for: tuple[str, ...]


def gather(
    recovery: RecoveryInfo,
    streams: Iterable[common_pb2.StreamInfo],
    progress: Mapping[Launch, Iterable[RecoveryProgress]],
) -> Reports:
    """Return the present owners' reports on a recovery; those of former owners no longer count."""
    source = source_of(recovery)
    told = {owner: [one for one in reports if one.source == source] for owner, reports in progress.items()}
    owners = {
        StreamletId(stream.stream_id, one.streamlet_id): Launch(one.broker_id, one.broker_epoch)
        for stream in streams
        for one in stream.assignments
        if is_taken_over(recovery, one)
    }

    def of_owners(refs: Callable[[RecoveryProgress], Iterable[common_pb2.StreamletRef]]) -> frozenset[StreamletId]:
        return frozenset(
            streamlet
            for owner, reports in told.items()
            for one in reports
            for ref in refs(one)
            if owners.get(streamlet := StreamletId(ref.stream_id, ref.streamlet_id)) == owner
        )

    every = [one for reports in told.values() for one in reports]
    return Reports(
        readable=of_owners(lambda one: one.readable),
        restored=of_owners(lambda one: one.restored),
        bytes_total=sum(one.bytes_total for one in every),
        bytes_recovered=sum(one.bytes_recovered for one in every),
        bytes_restored=sum(one.bytes_restored for one in every),
        records_lost=sum(one.records_lost for one in every),
        waits_for=tuple(
            f"broker {owner.member_id}: {reason}"
            for owner, reports in told.items()
            for one in reports
            for reason in one.waits_for
        ),
    )


def with_progress(
    recovery: RecoveryInfo, streams: Iterable[common_pb2.StreamInfo], reports: Reports, waits_for: Iterable[str]
) -> RecoveryInfo:
    """Return `recovery`, which has not ended, with its known progress.

    Numbers do not go back: an owner may die with its results.
    """
    shown = RecoveryInfo()
    shown.CopyFrom(recovery)
    taken = [one for stream in streams for one in stream.assignments if is_taken_over(recovery, one)]
    lost = [one for stream in streams for one in stream.assignments if is_lost(recovery, stream, one)]
    shown.bytes_total = max(shown.bytes_total, reports.bytes_total)
    shown.bytes_recovered = max(shown.bytes_recovered, reports.bytes_recovered)
    shown.bytes_restored = max(shown.bytes_restored, reports.bytes_restored)
    shown.records_lost = max(shown.records_lost, reports.records_lost)
    shown.streamlets_total = max(shown.streamlets_total, len(taken) + len(lost))
    shown.streamlets_opened = max(shown.streamlets_opened, len(taken))
    shown.streamlets_readable = max(shown.streamlets_readable, len(reports.readable))
    shown.streamlets_restored = max(shown.streamlets_restored, len(reports.restored))
    shown.owner_ids[:] = sorted({*shown.owner_ids, *(one.broker_id for one in taken)})
    reasons = sorted({*waits_for, *reports.waits_for})
    left = len(reasons) - WAITS_MAX
    shown.waits_for[:] = [*reasons[:WAITS_MAX], f"and for {left} things more"] if left > 0 else reasons
    return shown


class Unneeded:
    """The backups in which brokers reported last that they need nothing: a takeover from these brokers does not
    wait for them.

    In memory only: a new coordinator waits until it has reports.
    """

    def __init__(self) -> None:
        self._told: dict[int, dict[int, frozenset[int]]] = {}
        """Ids of the backups, by broker and epoch, of its last launches."""

    def note(self, broker: Launch, backup_ids: Iterable[int]) -> None:
        """Note the report of a broker's launch."""
        told = self._told.setdefault(broker.member_id, {})
        told[broker.epoch] = frozenset(backup_ids)
        while len(told) > LAUNCHES_MAX:
            del told[min(told)]

    def by_all(self, sources: Iterable[common_pb2.RecoverySource], backup_id: int) -> bool:
        """Whether the last launch of each source has reported that it does not need a backup."""
        return all(backup_id in self._last(source) for source in sources)

    def of(self, broker_id: int, epoch: int, backup_id: int) -> bool:
        """Whether this launch of a broker has reported that it does not need a backup."""
        return backup_id in self._told.get(broker_id, {}).get(epoch, frozenset())

    def _last(self, source: common_pb2.RecoverySource) -> frozenset[int]:
        told = self._told.get(source.broker_id, {})
        return told.get(max((epoch for epoch in told if epoch < source.before_epoch), default=0), frozenset())
