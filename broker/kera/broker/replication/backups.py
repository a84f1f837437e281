"""The backups that a broker knows: which can be reached, and which have room. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from kera.broker.replication.placement import Candidate, place
from kera.core.base.telemetry import get_logger
from kera.core.errors import TooFewBackups
from kera.v1 import common_pb2

log = get_logger("kera.replication")

FULL_MS = 250
"""How long a backup that had no room is not asked again."""
FAILED_MS = 1_000
"""How long a backup that failed, or refused a request, is not used."""


class _Backup:
    __slots__ = ("full_until_ms", "info", "last_id", "up", "usable_ms")

    def __init__(self, info: common_pb2.BackupInfo) -> None:
        self.info = info
        self.up = False
        """Whether it is connected, and has fenced older launches of this broker."""
        self.last_id = 0
        """The newest virtual segment when it came up: about later ones, its list of replicas may be outdated."""
        self.full_until_ms = 0
        self.usable_ms = 0
        """When it may be used again."""

    @property
    def leaves(self) -> bool:
        """Whether it should get no more replicas."""
        return self.info.draining or self.info.restarting


class Backups:
    """The known backups with their state and room; chooses the backups of a new virtual segment."""

    def __init__(self, *, segment_bytes: int, node_id: str, random: Random) -> None:
        """`segment_bytes`: the room that a replica needs; `node_id`: the broker's node."""
        self.up_count = 0
        """Number of backups that can be reached, and have large enough segments."""
        self._segment_bytes = segment_bytes
        self._node_id = node_id
        self._random = random
        self._backups: dict[int, _Backup] = {}
        self._absent: dict[int, int] = {}
        """Backups with replicas of this broker that are away, each with the time since when."""
        self.unneeded: frozenset[int] = frozenset()
        """Backups that must not be used: this broker reports, or has reported, that it needs no replica there."""

    def update(self, infos: Iterable[common_pb2.BackupInfo]) -> None:
        """Take the coordinator's list. A backup that is not in it, and cannot be reached, is forgotten."""
        infos = list(infos)
        known_ids = {info.backup_id for info in infos}
        self._backups = {id_: each for id_, each in self._backups.items() if id_ in known_ids or each.up}
        for info in infos:
            known = self._backups.get(info.backup_id)
            if known is not None:
                known.info = info
            else:
                self._backups[info.backup_id] = _Backup(info)

    def away(self) -> set[int]:
        """Return the ids of backups that cannot be reached."""
        return {backup_id for backup_id, backup in self._backups.items() if not backup.up}

    def knows(self, backup_id: int) -> bool:
        """Whether a backup is known."""
        return backup_id in self._backups

    def is_up(self, backup_id: int) -> bool:
        """Whether a backup can be reached."""
        backup = self._backups.get(backup_id)
        return backup is not None and backup.up

    def up(self, backup_id: int, last_id: int) -> None:
        """Note that a backup is connected; `last_id`: the newest virtual segment.

        A backup with too small segments is not used.
        """
        backup = self._backups[backup_id]
        if backup.info.segment_bytes < self._segment_bytes:
            log.warning(
                "cannot use a backup: its segments are smaller than the broker's; start it with a larger"
                " --segment-bytes",
                backup_id=backup_id,
                segment_bytes=backup.info.segment_bytes,
                needed_bytes=self._segment_bytes,
            )
        elif not backup.up:
            backup.up, backup.last_id = True, last_id
            self.up_count += 1

    def down(self, backup_id: int, now_ms: int) -> bool:
        """Note that a backup has failed. Return whether it was up."""
        self.expect(backup_id, now_ms)
        backup = self._backups.get(backup_id)
        if backup is None:
            return False
        was_up, backup.up = backup.up, False
        self.up_count -= was_up
        backup.usable_ms = now_ms + FAILED_MS
        return was_up

    def set_unneeded(self, backup_ids: frozenset[int]) -> None:
        """Set `unneeded`."""
        self.unneeded = backup_ids

    def refused(self, backup_id: int, now_ms: int, *, full: bool) -> None:
        """Note that a backup refused a request, for lack of room or another reason: do not use it for a while."""
        backup = self._backups.get(backup_id)
        if backup is None:
            return
        if full:
            backup.full_until_ms = now_ms + FULL_MS
        else:
            backup.usable_ms = now_ms + FAILED_MS

    def choose(self, replication: int, now_ms: int) -> list[int] | None:
        """Choose the backups of a virtual segment; None if there are too few.

        Backups that are drained, or about to stop, are used only if there are too few others.
        """
        for leaving in (False, True):
            candidates = self._candidates(now_ms, leaving=leaving)
            chosen = place(replication, candidates, node_id=self._node_id, random=self._random)
            if chosen is not None:
                return chosen
        return None

    def check(self, replication: int, stream: str) -> None:
        """Raise `TooFewBackups` if fewer than `replication` backups are up."""
        up = self.up_count
        if up < replication:
            raise TooFewBackups(
                f"stream {stream!r} is replicated on {replication} backups, and {up} can be used;"
                " writing resumes when there are enough",
                stream=stream,
                replication=replication,
                backups=up,
            )

    def usable(self, now_ms: int) -> int:
        """Return how many backups can be chosen, without those that are drained or about to stop."""
        return sum(1 for _ in self._candidates(now_ms))

    def full(self, now_ms: int) -> list[int]:
        """Return the backups that can be reached and have no room."""
        return [backup_id for backup_id, each in self._backups.items() if each.up and each.full_until_ms > now_ms]

    @property
    def dead(self) -> set[int]:
        """The backups that neither the coordinator nor this broker can reach, and that are not expected back.

        A backup that was drained before it was stopped is not expected back.
        """
        return {
            backup_id
            for backup_id, each in self._backups.items()
            if not (each.up or each.info.alive or (each.info.restarting and not each.info.draining))
        }

    @property
    def draining(self) -> set[int]:
        """The backups that are being drained."""
        return {backup_id for backup_id, each in self._backups.items() if each.info.draining}

    @property
    def restarting(self) -> set[int]:
        """The backups that stop in order to start again: they keep their replicas, and get no more."""
        return {backup_id for backup_id, each in self._backups.items() if each.info.restarting}

    @property
    def lasting_count(self) -> int:
        """The number of backups that can be reached, and are neither being drained nor about to stop."""
        return sum(each.up and not each.leaves for each in self._backups.values())

    def _candidates(self, now_ms: int, *, leaving: bool = False) -> Iterable[Candidate]:
        for backup_id, each in self._backups.items():
            if backup_id in self.unneeded or (each.leaves and not leaving):
                continue
            usable = each.up and now_ms >= max(each.full_until_ms, each.usable_ms)
            if usable:
                yield Candidate(backup_id, each.info.node_id, each.info.rack, each.info.free_memory_bytes)

    # -- absent backups --------------------------------------------------------------------------------------------

    def expect(self, backup_id: int, now_ms: int) -> None:
        """Note that a backup with replicas of this broker is away."""
        self._absent.setdefault(backup_id, now_ms)

    def listed(self, backup_id: int) -> int:
        """Note that a backup has listed its replicas. Return the newest virtual segment that the list is about."""
        self._absent.pop(backup_id, None)
        return self._backups[backup_id].last_id

    def given_up(self, before_ms: int) -> list[int]:
        """Return the backups that are away since `before_ms` or earlier, and not expected back; each only once."""
        expected = self.restarting
        found = [
            backup_id
            for backup_id, since_ms in self._absent.items()
            if since_ms <= before_ms and backup_id not in expected
        ]
        for backup_id in found:
            del self._absent[backup_id]
        return found
