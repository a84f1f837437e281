"""A broker that replicates its streams on failing backups, and the invariants after each event.

All of the broker but its event loop and its transports is real. The backups keep bytes; a connection breaks after
any part of its requests was carried out; the broker is killed and comes back.

The required number of copies of a chunk starts at R, falls with each failure of a backup that has a copy, and is R
again once R connected backups have the chunk: so the check is that the *broker* never removes a needed copy.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kera.broker.latency.held_back import HeldBack
from kera.broker.latency.holding import Hold, Holds
from kera.broker.log.arena import Arena
from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.ownership.stream import Stream
from kera.broker.replication import virtual_log
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.virtual_index import virtual_segments
from kera.broker.replication.virtual_logs import REPAIR_LOG_ID
from kera.broker.replication.virtual_segment import Extent
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.ids import Position
from kera.core.errors import ArenaFull, KeraError, TooFewBackups
from kera.core.format.chunk import verify_header
from kera.core.latency.limits import HELD_REQUESTS_MAX
from kera.v1 import common_pb2
from tests.unit.broker.replication_support import Key, ModelBackup, Repairer, Replica, Wire, checksum_of
from tests.unit.broker.support import BROKER_ID, SLOT_BYTES, Engine, FailingDisk, chunk, stream_info

SLOTS = 24
BACKUPS = 5
SIZES = (256, 512, 1024, 2048)
GROUPS_PER_LAUNCH = 1 << 24
CONFIGS: tuple[dict[str, Any], ...] = (
    {"replication": 2, "durability": 2, "entries": 2, "virtual_logs": 1},
    {"replication": 1, "durability": 3, "entries": 2, "virtual_logs": 2},
    {"replication": 2, "durability": 1, "entries": 1, "virtual_logs": 1},
    {"replication": 3, "durability": 2, "entries": 2, "virtual_logs": 3},
    {"replication": 0, "durability": 1, "entries": 1, "virtual_logs": 1},
)
ROUNDS_MAX = 400


@dataclass
class Known:
    """The test's knowledge of a chunk."""

    segment: Segment
    end: int
    data: bytes
    replication: int
    watched: bool
    """Readers see it only after it is replicated."""
    promised: bool = False
    """It was acknowledged as replicated, or readers have seen it."""
    copies: int = 0
    """The required number of copies."""

    def is_in(self, extent: Extent) -> bool:
        """Whether an extent of a virtual segment has the chunk."""
        start = self.end - len(self.data)
        return extent.address == self.segment.address and extent.start <= start and self.end <= extent.end


class Waiter:
    """A request that waits for a chunk."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.calls: list[KeraError | None] = []

    def __call__(self, error: KeraError | None) -> None:
        self.calls.append(error)
        assert len(self.calls) == 1, "somebody is told twice"


class World:
    """See the head of this module."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kera-world-", dir="/dev/shm"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        """Also at the end of the process without a `close`: failed worlds must not fill the memory."""
        self.infos: dict[int, common_pb2.StreamInfo] = {}
        self.next_stream_id = 1
        self.launch = self.recover_before_epoch = 0
        self.chunks: dict[Key, Known] = {}
        self.waiters: list[Waiter] = []
        self.sequences: dict[tuple[int, int], int] = {}
        self.heads: dict[Segment, int] = {}
        self.backups = [ModelBackup(number + 1, segment_bytes=SLOT_BYTES) for number in range(BACKUPS)]
        self.happened: dict[str, int] = {}
        for _ in CONFIGS:
            self.infos.update(self._new_info())
        self._start()
        self.wire.connect()

    def close(self) -> None:
        try:
            self.engine.close()
            self.engine.arena.close()
        finally:
            self._remove()

    # -- launches --------------------------------------------------------------------------------------------------

    def _new_info(self) -> dict[int, common_pb2.StreamInfo]:
        id_ = self.next_stream_id
        self.next_stream_id += 1
        return {id_: stream_info(id_, **CONFIGS[(id_ - 1) % len(CONFIGS)])}

    def _start(self) -> None:
        self.launch += 1
        index = SegmentIndex.open(self.root / "index", durable=False)
        arena = Arena.attach(self.root, self.root)
        restart = Restart(arena, index, SegmentStore(self.root, FailingDisk(self.root), index))
        restart.look(index_whole=True, slot_bytes=SLOT_BYTES)
        arena = arena or Arena.create(
            self.root, arena_bytes=SLOTS * SLOT_BYTES, slot_bytes=SLOT_BYTES, data_dir=self.root, ephemeral=False
        )
        limits = ReplicationLimits(
            SLOT_BYTES,
            request_bytes_max=2048,  # some batches are pipelined, and span several virtual segments
            pipelined_bytes_min=512,
            in_flight_bytes_max=8192,
            lag_bytes_max=12 << 10,
            wait_ms_max=3000,
            idle_close_ms=4000,
            repair_delay_ms=2000,
        )
        self.engine = Engine(arena, self.root, restart, limits=limits, random=Random(self.launch))
        self.replication, self.streams = self.engine.replication, self.engine.streams
        logs = self.replication.logs
        self.holds = Holds(lambda: logs.now_ms / 1000, lambda: 5)  # chunks are created at 5
        self.held = HeldBack(logs, self.holds, lambda _: None)
        logs.plug_in(self.held)
        if restart.found.lost_memory:
            self.recover_before_epoch = self.launch
        self.replication.begin(
            self.launch, list(virtual_segments(index)), recover_before_epoch=self.recover_before_epoch
        )
        restart.drop_leftovers(lambda stream_id, _: stream_id not in self.infos)
        self.replication.coverage.keep_streams(set(self.infos))
        self.wire = Wire(self.replication, self.backups)
        for info in self.infos.values():
            for assignment in info.assignments:
                assignment.broker_epoch = self.launch
                assignment.first_group_id = 1 + (self.launch - 1) * GROUPS_PER_LAUNCH
            self.streams.open(info, BROKER_ID)
        self.repairer = Repairer(self.engine, self.streams.entry, self.wire)
        for key, known in list(self.chunks.items()):
            found = self._entry(key).find(known.segment.key)
            assert found is not None or restart.found.lost_memory, "a launch does not know a segment"
            if isinstance(found, Segment):
                known.segment = found
        self.heads.clear()

    def kill(self, *, memory: bool = False) -> None:
        """The process dies and comes back; its memory stays unless `memory` is set."""
        connected = [backup for backup in self.backups if backup.connected]
        for number, backup in enumerate(connected):
            for _ in range(min(number, len(backup.requests))):
                backup.carry_out()
        for backup in self.backups:
            backup.requests.clear()
            backup.answers.clear()
            backup.connected = False
        self.waiters.clear()
        self.engine.index.close()
        self.engine.arena.close(keep=True)
        if memory:
            self.engine.arena.path.unlink()
        self._start()
        self.wire.connect(*(backup.backup_id for backup in connected))

    # -- events ----------------------------------------------------------------------------------------------------

    def stream(self, number: int) -> Stream:
        ids = sorted(self.infos)
        return self.streams.get(ids[number % len(ids)])

    def append(self, number: int, producer: int, size: int, level: int) -> None:
        """Append a chunk as ``kera.broker.serving.write`` does."""
        stream = self.stream(number)
        streamlet = stream.streamlets[0]
        log = None
        level = level if stream.logs is not None else 1
        if stream.logs is not None:
            log = stream.logs.of(0, producer % len(streamlet.entries))
            try:
                if level > 1:
                    self.replication.backups.check(stream.replication, stream.name)
            except TooFewBackups:
                return
            if log.lags and (level > 1 or not self.replication.backlog.shed(stream.logs)):
                return
        sequence = self.sequences.get((stream.stream_id, producer), 0)
        data = chunk(producer, sequence, size=size, stream_id=stream.stream_id, fill=bytes([65 + sequence % 26]))
        try:
            appended = streamlet.append(memoryview(data), verify_header(data))
        except ArenaFull:
            self.replication.backlog.make_room()
            self.engine.run()
            return
        self.sequences[stream.stream_id, producer] = sequence + 1
        segment = appended.segment
        assert segment is not None
        if stream.durability == 1:
            streamlet.publish(appended)
        if log is None:
            return
        batch = self.replication.logs.append(log, segment, appended.position, appended.end, persist=level == 3)
        placed = bytes(segment.slot.view[appended.position : appended.end])
        known = Known(segment, appended.end, placed, stream.replication, watched=stream.by_replicas)
        self.chunks[stream.stream_id, 0, appended.entry, appended.first_record] = known
        if level > 1:
            self.waiters.append(Waiter(known))
            batch.waiters.append(self.waiters[-1])
            self.replication.logs.wait(batch, segment, appended.position, 1)
            note = batch.noted
            assert note is None or max(note.requests.values(), default=0) <= HELD_REQUESTS_MAX or not note.due_s
        self.wire.pump()

    def lose(self, number: int, carried_out: int, *, memory: bool) -> None:
        """A backup fails."""
        backup = self.backups[number % BACKUPS]
        if backup.connected or memory:
            for known in self.chunks.values():
                known.copies -= known.promised and backup.backup_id in known_holders(self, known)
        self.wire.lose(backup.backup_id, carried_out=carried_out, memory=memory)

    def retain(self, number: int, segments: int) -> None:
        """Retention moves the starts of a stream."""
        for entry in self.stream(number).streamlets[0].entries:
            found = [segment for _, segment in entry.segments()]
            keys = [key for key, _ in entry.segments()]
            if len(keys) > segments + 1:
                key, following = keys[segments + 1], found[segments + 1]
                entry.start, entry.start_record = Position(*key, 0), following.first_record
                self.engine.memory.removals.collect(entry)

    def drop(self, number: int) -> None:
        """Drop a stream, and create another one with the same configuration."""
        ids = sorted(self.infos)
        id_ = ids[number % len(ids)]
        info = self.infos.pop(id_)
        self.next_stream_id += (info.stream_id - self.next_stream_id) % len(CONFIGS)
        new = self._new_info()
        for assignment in next(iter(new.values())).assignments:
            assignment.broker_epoch = self.launch
            assignment.first_group_id = 1 + (self.launch - 1) * GROUPS_PER_LAUNCH
        self.streams.drop(id_)
        self.wire.pump()
        self.infos.update(new)
        self.streams.open(next(iter(new.values())), BROKER_ID)

    def set_virtual_logs(self, number: int, virtual_logs: int) -> None:
        info = self.infos[self.stream(number).stream_id]
        info.config_version += 1
        info.config.virtual_logs = 1 + virtual_logs % info.config.entries
        self.streams.open(info, BROKER_ID)
        self.wire.pump()

    def set_level(self, number: int, level: int) -> None:
        info = self.infos[self.stream(number).stream_id]
        info.config_version += 1
        info.config.durability = level  # type: ignore[assignment]
        if level == 1:  # readers see at once chunks that are not replicated
            for key, known in self.chunks.items():
                known.watched = known.watched and (key[0] != info.stream_id or known.promised)
        self.streams.open(info, BROKER_ID)
        self.wire.pump()

    def constrain(self, number: int, wait_ms: int) -> None:
        """From now on, chunks of a stream may wait for others before replication."""
        wait_us = wait_ms * 1000
        self.holds.set(self.stream(number).stream_id, Hold(wait_us, wait_us))

    def answer(self, number: int, which: int) -> None:
        """A backup carries out its requests, and one answer comes back; answers about the disk may be late."""
        backup = self.backups[number % BACKUPS]
        while backup.requests:
            backup.carry_out()
        if backup.answers:
            late = 0
            while late < len(backup.answers) - 1 and _may_be_late(backup.answers[late][0]):
                late += 1
            self.wire.answer(backup.backup_id, which % (late + 1))

    # -- invariants ------------------------------------------------------------------------------------------------

    def _entry(self, key: Key) -> Entry:
        return self.streams.get(key[0]).streamlets[key[1]].entries[key[2]]

    def _alive(self, key: Key, known: Known) -> bool:
        return key[0] in self.infos and self._entry(key).exists(known.segment.key)

    def check(self) -> None:
        """Check the invariants after each event."""
        self._check_replicas()
        assert self.held.next_in_s > 0, "something is held beyond its deadline"
        self.chunks = {key: known for key, known in self.chunks.items() if self._alive(key, known)}
        holders: dict[Key, set[int]] = {key: set() for key in self.chunks}
        for backup in self.backups:
            for replica in backup.replicas.values():
                for key in replica.chunks:
                    if key in holders:
                        holders[key].add(backup.backup_id)
        self.holders = holders
        owned = self._owned()
        told = {id(waiter.known) for waiter in self.waiters if waiter.calls == [None]}
        for key, known in self.chunks.items():
            segment = known.segment
            up = {id_ for id_ in owned.get(key, ()) if self.wire.backups[id_].connected} & holders[key]
            if not known.promised and (id(known) in told or (known.watched and segment.durable_head >= known.end)):
                known.promised = True
                assert len(up) >= known.replication, f"{key} is promised, and only on {up}"
            if len(up) >= known.replication:
                known.copies = known.replication
            if known.promised:
                assert len(holders[key]) >= known.copies, f"{key} should be on {known.copies}, and is on {holders[key]}"
        self.waiters = [waiter for waiter in self.waiters if not waiter.calls]
        self._check_heads()

    def _check_replicas(self) -> None:
        changed: set[int] = set()
        for backup in self.backups:
            assert all(send.place.stream_id not in self.infos for send in backup.corrupt), "chunks change on their way"
            for id_, replica in backup.replicas.items():
                if replica.checked != (len(replica.data), replica.closed):
                    replica.checked = (len(replica.data), replica.closed)
                    changed.add(id_)
                    self._check_replica(backup, id_, replica)
        for id_ in changed:
            replicas = [backup.replicas[id_].data for backup in self.backups if id_ in backup.replicas]
            longest = max(replicas, key=len)
            assert all(longest.startswith(data) for data in replicas), "replicas of a virtual segment differ"

    def _check_replica(self, backup: ModelBackup, id_: int, replica: Replica) -> None:
        for key, (start, end) in replica.chunks.items():
            known = self.chunks.get(key)
            assert known is None or replica.data[start:end] == known.data, f"{key} is other bytes on {backup}"
        segment = self.replication.coverage.segments.get(id_)
        if replica.closed and segment is not None and backup.backup_id in segment.backups:
            assert (len(replica.data), checksum_of(replica.data)) == (segment.head, segment.checksum)

    def _owned(self) -> dict[Key, set[int]]:
        """The known places of chunks: all backups of a virtual segment have acknowledged them."""
        found: dict[Key, set[int]] = {}
        for place in (*self.replication.logs.opened.values(), *self.replication.coverage.segments.values()):
            assert len(set(place.backups)) == len(place.backups), "two replicas on one backup"
            for backup_id in place.backups:
                replica = self.wire.backups[backup_id].replicas.get(place.virtual_segment_id)
                for key in replica.chunks if replica is not None else ():
                    known = self.chunks.get(key)
                    if known is not None and any(known.is_in(extent) for extent in place.extents):
                        found.setdefault(key, set()).add(backup_id)
        return found

    def _segments(self) -> Iterator[Segment]:
        for stream in self.streams:
            for entry in stream.streamlets[0].entries:
                yield from entry.resident.values()

    def _check_heads(self) -> None:
        heads: dict[Segment, int] = {}
        for segment in self._segments():
            heads[segment] = segment.durable_head
            assert self.heads.get(segment, 0) <= segment.durable_head <= segment.head
            assert segment.is_boundary(segment.durable_head)
        self.heads = heads
        for key, known in self.chunks.items():
            if known.watched and known.segment.durable_head >= known.end:
                assert known.promised, f"the durable head is behind {key}, which is not replicated"
        for slot in self.engine.arena.slots():
            assert slot.pins >= 0

    # -- the end ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything recover and complete, and check that it did."""
        for backup in self.backups:
            backup.full = False
        waiting, replication = self.waiters, self.replication
        for _ in range(ROUNDS_MAX):
            self.wire.connect()
            self.wire.tick(1100)
            self.wire.run()
            self.engine.run()
            busy = self.repairer.step()
            self.wire.run()
            self.engine.run()
            logs = [log for stream in replication.logs.streams.values() for log in stream.all()]
            if not (
                busy or replication.coverage.deficient or any(log.busy or log.log_id == REPAIR_LOG_ID for log in logs)
            ):
                break
        else:
            raise AssertionError("it is never quiet")
        self.check()
        assert not replication.backlog.extents
        assert not replication.coverage.replacing
        assert all(len(waiter.calls) == 1 for waiter in waiting), "somebody is never told"
        for key, known in self.chunks.items():
            assert len(self.holders[key]) >= known.replication, f"{key} is on {self.holders[key]}"
            assert known.segment.durable_head >= known.end or known.segment.in_index
        for backup in self.backups:
            ours = {
                id_
                for id_, place in (replication.logs.opened | replication.coverage.segments).items()
                if backup.backup_id in place.backups
            }
            assert set(backup.replicas) <= ours, f"{backup} keeps replicas that are not needed"
        assert not any(slot.pins for slot in self.engine.arena.slots())
        resident = sum(1 for _ in self._segments())
        assert self.engine.arena.free_slots == SLOTS - resident, "slots are lost"


def known_holders(world: World, known: Known) -> set[int]:
    """The backups that have a chunk."""
    return {
        backup.backup_id
        for backup in world.backups
        if any(known.data in replica.data for replica in backup.replicas.values())
    }


def _may_be_late(request: Any) -> bool:
    return isinstance(request.effect, virtual_log.Send) and request.effect.batch.persist
