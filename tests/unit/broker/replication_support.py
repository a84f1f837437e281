"""Support for tests of replication: model backups that keep bytes, and a wire that carries requests to them.

The model follows only the messages' contract (proto/kera/v1/backup.proto), not the broker's code: where a backup would
have to refuse a request because of a defect in the broker, the model has an assertion.
"""

from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kera.broker.log.entry import Entry
from kera.broker.log.events import Events
from kera.broker.log.segment import Segment
from kera.broker.ownership.stream import Stream
from kera.broker.replication.manager import Replication
from kera.broker.replication.virtual_index import virtual_segments
from kera.broker.replication.virtual_log import Close, Effect, Send
from kera.broker.replication.virtual_segment import Extent, Free, VirtualSegment
from kera.core.base.ids import EntryId
from kera.core.errors import CorruptChunk
from kera.core.format.chunk import chained_checksum, iterate_chunks, verify_chunk, verify_header
from kera.v1 import backup_pb2, common_pb2
from tests.unit.broker.support import BROKER_ID, SLOT_BYTES, STREAM_ID, Engine, Outcome, chunk, stream_info

EPOCH = 9
FIRST_ID = (EPOCH << 32) + 1
"""The id of the first virtual segment."""
Key = tuple[int, int, int, int]
"""A chunk: stream, streamlet, entry, ordinal of its first record."""
ROUNDS_MAX = 2000
DELAY_MS = 2000
"""How long a backup may be away before its replicas are made anew."""


def checksum_of(data: bytes | bytearray | memoryview) -> int:
    """The right checksum of a virtual segment with these bytes."""
    checksum = 0
    for _, at in iterate_chunks(data):
        checksum = chained_checksum(data, at, checksum)
    return checksum


@dataclass
class Replica:
    """A backup's replica of a virtual segment."""

    stream_id: int
    data: bytearray = field(default_factory=bytearray)
    closed: bool = False
    chunks: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """Start and end of each chunk."""
    checked: tuple[int, bool] | None = None
    """Its length and whether it was closed, when a test last checked all of it."""

    def append(self, data: bytes) -> None:
        at = len(self.data)
        self.data += data
        for header, offset in iterate_chunks(data):
            key = (header.stream_id, header.streamlet_id, header.entry, header.first_record)
            self.chunks[key] = (at + offset, at + offset + header.chunk_bytes)

    def cut(self, length: int) -> None:
        assert length <= len(self.data), "a replica is closed behind its end"
        del self.data[length:]
        self.chunks = {key: place for key, place in self.chunks.items() if place[1] <= length}


@dataclass
class Request:
    """A request on its way to a backup: a copy of the numbers, and views of the chunks."""

    effect: Effect | None
    """None: the request lists the replicas."""
    offset: int = 0
    checksum: int = 0
    views: Sequence[memoryview] = ()
    listed: list[backup_pb2.ReplicaInfo] = field(default_factory=list)
    """The replicas at the time of the list request."""


class ModelBackup:
    """A backup that carries requests out in order, and answers when a test says so."""

    def __init__(self, backup_id: int, *, node_id: str = "", rack: str = "", segment_bytes: int = SLOT_BYTES) -> None:
        self.backup_id = backup_id
        self.info = common_pb2.BackupInfo(
            backup_id=backup_id,
            node_id=node_id or f"node-{backup_id}",
            rack=rack,
            segment_bytes=segment_bytes,
            free_memory_bytes=1 << 20,
            alive=True,
        )
        self.replicas: dict[int, Replica] = {}
        self.connected = False
        self.full = False
        """Takes no new replica."""
        self.requests: deque[Request] = deque()
        self.answers: deque[tuple[Request, str]] = deque()
        """Each with its error: empty, "full", or another one."""
        self.log: list[Effect] = []
        """All effects that were carried out."""
        self.refused: set[int] = set()
        """Virtual segments whose later appends are refused, because an earlier one failed."""
        self.corrupt: list[Send] = []
        """Sends whose chunks did not match their checksum: their memory had been reused meanwhile."""

    def __repr__(self) -> str:
        return f"backup {self.backup_id}"

    def carry_out(self) -> None:
        """Carry out the next request; its answer waits for delivery."""
        request = self.requests.popleft()
        effect = request.effect
        self.log += [effect] if effect is not None else []
        match effect:
            case Send():
                self.answers.append((request, self._append(effect, request)))
            case Close():
                self.answers.append((request, self._close(effect, request)))
            case Free():
                for id_ in effect.virtual_segment_ids:
                    self.replicas.pop(id_, None)
            case None:
                request.listed = self.list()
                self.answers.append((request, ""))

    def _append(self, send: Send, request: Request) -> str:
        id_ = send.place.virtual_segment_id
        if id_ in self.refused:
            return "unknown"  # sent before the broker knew of the refusal
        if request.offset == 0:
            if self.full:
                self.refused.add(id_)
                return "full"
            self.replicas[id_] = Replica(send.place.stream_id)
        replica = self.replicas[id_]
        assert not replica.closed, "an append to a closed replica"
        assert len(replica.data) == request.offset, "an append elsewhere than at the end"
        data = b"".join(request.views)
        assert request.offset + len(data) <= self.info.segment_bytes, "a replica larger than the backup takes"
        try:
            for _, at in iterate_chunks(data):
                verify_chunk(data, at)
            right = checksum_of(replica.data + data) == request.checksum
        except CorruptChunk:
            right = False
        if not right:
            self.corrupt.append(send)
            self.refused.add(id_)
            return "corrupt"
        replica.append(data)
        return ""

    def _close(self, close: Close, request: Request) -> str:
        replica = self.replicas.get(close.place.virtual_segment_id)
        if close.log is None and (replica is None or replica.closed or len(replica.data) < request.offset):
            return "unknown"  # the backup was away meanwhile
        assert replica is not None, "what is closed was never opened"
        assert not replica.closed or len(replica.data) == request.offset, "a closed replica ends elsewhere"
        replica.cut(request.offset)
        replica.closed = True
        assert checksum_of(replica.data) == request.checksum, "a replica is closed with another checksum"
        return ""

    def list(self) -> list[backup_pb2.ReplicaInfo]:
        """The replicas of this backup."""
        return [
            backup_pb2.ReplicaInfo(
                virtual_segment_id=id_,
                stream_id=replica.stream_id,
                length=len(replica.data),
                checksum=checksum_of(replica.data),
                closed=replica.closed,
            )
            for id_, replica in sorted(self.replicas.items())
        ]


class Wire:
    """The wire between a replication and its backups; a test moves every request and answer."""

    def __init__(self, replication: Replication, backups: Iterable[ModelBackup]) -> None:
        self.replication = replication
        self.backups = {backup.backup_id: backup for backup in backups}
        self.sent: list[Effect] = []
        """All effects that were sent, in order."""
        replication.backups.update([backup.info for backup in self.backups.values()])

    def connect(self, *backup_ids: int) -> None:
        """Bring backups up, and ask them for their replicas."""
        for backup_id in backup_ids or self.backups:
            backup = self.backups[backup_id]
            if not backup.connected:
                backup.connected = True
                self.replication.backup_up(backup_id)
                backup.requests.append(Request(None))
        self.pump()

    def lose(self, backup_id: int, *, carried_out: int = 0, memory: bool = False) -> None:
        """Break a connection after `carried_out` more requests; with `memory`, the replicas are gone, too."""
        backup = self.backups[backup_id]
        for _ in range(min(carried_out, len(backup.requests))):
            backup.carry_out()
        backup.requests.clear()
        backup.answers.clear()
        if memory:
            backup.replicas.clear()
        if backup.connected:
            backup.connected = False
            self.replication.backup_down(backup_id)
            self.pump()

    def pump(self) -> None:
        """Send all requests that are due."""
        while effects := self.replication.logs.pump():
            self.sent += effects
            for effect in effects:
                self._send(effect)

    def _send(self, effect: Effect) -> None:
        backup = self.backups[effect.backup_id]
        if not backup.connected:
            if not isinstance(effect, Free):
                self.replication.logs.refused(effect, full=False)
            return
        match effect:
            case Send(batch=batch):
                backup.requests.append(Request(effect, batch.offset, batch.checksum_after, batch.views()))
            case Close(place=place):
                backup.requests.append(Request(effect, place.head, place.checksum))
            case Free():
                backup.requests.append(Request(effect))

    def answer(self, backup_id: int, number: int = 0) -> None:
        """Deliver one answer: the next one, or the one at `number`."""
        backup = self.backups[backup_id]
        request, error = backup.answers[number]
        del backup.answers[number]
        effect = request.effect
        if error:
            assert isinstance(effect, Send | Close)
            self.replication.logs.refused(effect, full=error == "full")
        elif isinstance(effect, Send):
            self.replication.logs.acknowledged(effect)
        elif isinstance(effect, Close):
            self.replication.closed_replica(effect)
        else:
            self.replication.listed(backup_id, request.listed)
        self.pump()

    def step(self, backup_id: int) -> bool:
        """Carry out a request and deliver all answers; False when there are none."""
        backup = self.backups[backup_id]
        if backup.requests:
            backup.carry_out()
        elif not backup.answers:
            return False
        while backup.answers:
            self.answer(backup_id)
        return True

    def run(self, *backup_ids: int) -> None:
        """Carry out all requests and deliver all answers, of some backups or all."""
        self.pump()
        for _ in range(ROUNDS_MAX):
            moved = [self.step(backup_id) for backup_id in backup_ids or self.backups]
            if not any(moved):
                return
        raise AssertionError("requests never end")

    def tick(self, by_ms: int) -> None:
        """Let time pass."""
        self.replication.tick(self.replication.logs.now_ms + by_ms)
        self.pump()

    def holders(self, key: Key) -> set[int]:
        """The backups that have a chunk."""
        return {
            backup.backup_id
            for backup in self.backups.values()
            if any(key in replica.chunks for replica in backup.replicas.values())
        }


def extents_of(place: VirtualSegment) -> list[Extent]:
    """The extents of a virtual segment."""
    found: Any = place.extents
    return list(found.values()) if isinstance(found, dict) else list(found)


class Repairer:
    """The work of ``kera.broker.replication.repair``, a step at a time."""

    def __init__(self, engine: Engine, find: Callable[[EntryId], Entry | None], wire: Wire) -> None:
        self._engine = engine
        self._find = find
        self._wire = wire
        self._work: Generator[None, None, bool] | None = None

    def step(self) -> bool:
        """Go on; False when there is nothing to do."""
        if self._work is None:
            self._work = self._one()
        try:
            next(self._work)
        except StopIteration as stop:
            self._work = None
            return bool(stop.value)
        return True

    def _one(self) -> Generator[None, None, bool]:
        replication = self._wire.replication
        old = replication.backlog.next_deficient()
        if old is None and not (replication.backlog.extents and replication.backups.up_count):
            replication.backlog.rest()
            self._wire.pump()
            return False
        extents = [replication.backlog.extents[0]] if old is None else extents_of(old)
        places: set[VirtualSegment] = set()
        for extent in extents:
            segment = self._in_memory(EntryId(*extent.address[:3]), extent.address[3:])
            if segment is None:
                continue
            for start, end in segment.intact(extent.start, min(extent.end, segment.head)):
                outcome = Outcome()
                batch = replication.backlog.cover(segment, start, end, outcome)
                self._wire.pump()
                while batch is not None and not outcome.calls:
                    yield
                if batch is None or outcome.calls[0] is not None:
                    return True
                assert batch.place is not None
                places.add(batch.place)
        if old is not None:
            replication.coverage.replaced(old, places)
        elif replication.backlog.extents and replication.backlog.extents[0] is extents[0]:
            replication.backlog.extents.popleft()
        self._wire.pump()
        return True

    def _in_memory(self, entry_id: EntryId, key: tuple[int, int]) -> Segment | None:
        entry = self._find(entry_id)
        found = entry.find(key) if entry is not None else None
        if entry is None or found is None:
            return None
        if not isinstance(found, Segment) or found.loading:
            self._engine.memory.loads.load(entry, key, Outcome())
            self._engine.run()
            found = entry.find(key)
        return found if isinstance(found, Segment) and not found.loading else None


class Replicated:
    """Streams of a broker, replicated on model backups."""

    def __init__(self, engine: Engine, *, backups: int = 3, up: bool = True, **changes: int) -> None:
        """`changes`: changes of the limits."""
        self.engine = engine
        self.replication = engine.replication
        for name, value in changes.items():
            setattr(self.replication.limits, name, value)
        self.replication.begin(EPOCH, virtual_segments(engine.index))
        self.wire = Wire(self.replication, [ModelBackup(number + 1) for number in range(backups)])
        self.repairer = Repairer(engine, engine.streams.entry, self.wire)
        self.sequences: Counter[tuple[int, int]] = Counter()
        if up:
            self.wire.connect()
            self.wire.run()

    def open(self, stream_id: int = STREAM_ID, **config: Any) -> Stream:
        """Open a stream with one streamlet, on two backups unless `config` has another number."""
        settings = {"replication": 2, "durability": common_pb2.DURABILITY_REPLICATED} | config
        self.engine.streams.open(stream_info(stream_id, **settings), BROKER_ID)
        return self.engine.streams.get(stream_id)

    def append(self, stream: Stream, count: int = 1, *, producer: int = 0, requests: int = 0) -> Outcome:
        """Append chunks and send them; return the outcome of the last one, for which `requests` requests wait."""
        streamlet, logs = stream.streamlets[0], stream.logs
        assert logs is not None
        outcome = Outcome()
        for number in range(count):
            id_ = stream.stream_id, producer
            data = chunk(producer, self.sequences[id_], stream_id=stream.stream_id)
            appended = streamlet.append(memoryview(data), verify_header(data))
            self.sequences[id_] += 1
            assert appended.segment is not None
            if stream.durability == common_pb2.DURABILITY_LEADER:
                streamlet.publish(appended)
            batch = self.replication.logs.append(
                logs.of(0, appended.entry), appended.segment, appended.position, appended.end
            )
            if number == count - 1:
                batch.waiters.append(outcome)
                self.replication.logs.wait(batch, appended.segment, appended.position, requests)
        self.wire.pump()
        return outcome

    def finish(self) -> None:
        """Do all work that needs no time to pass."""
        self.wire.run()
        self.engine.run()
        self.wire.run()

    def close_all(self) -> None:
        """Close all virtual segments, and write them to the index."""
        self.replication.logs.close_open()
        self.finish()

    def repair(self) -> None:
        """Repair everything."""
        for _ in range(ROUNDS_MAX):
            if not self.repairer.step():
                break
            self.finish()
        self.finish()

    def replicas(self) -> dict[int, list[int]]:
        """The replicas of each backup, counted from the first virtual segment."""
        return {id_: [each - FIRST_ID for each in sorted(b.replicas)] for id_, b in self.wire.backups.items()}

    def copies(self, stream: Stream) -> list[int]:
        """The number of backups that have each chunk of the first entry, in order."""
        entry = stream.streamlets[0].entries[0]
        return [
            len(self.wire.holders((*entry.log_id, record))) for record in range(entry.start_record, entry.next_record)
        ]


def durable(stream: Stream) -> int:
    """The bytes that readers may see."""
    return sum(entry.length_bytes for entry in stream.streamlets[0].entries)


def nothing_pinned(engine: Engine) -> bool:
    """Whether all slots are unpinned."""
    return not any(slot.pins for slot in engine.arena.slots())


def restarted(
    world: Replicated, *, epoch: int = EPOCH + 1, recover_before_epoch: int = 0, spared: Container[int] = ()
) -> Replication:
    """The replication of another launch, which finds the same log."""
    replication = Replication(
        world.replication.limits,
        lambda _changes, done: done(None),
        Events(),
        exists=world.engine.streams.exists,
        spared=lambda stream_id: stream_id in spared,
    )
    replication.begin(epoch, virtual_segments(world.engine.index), recover_before_epoch=recover_before_epoch)
    logs = replication.logs.open_stream(STREAM_ID, replication=2, entries=1, virtual_logs=1, by_replicas=True)
    replication.backlog.restore(logs, world.engine.streams.get(STREAM_ID).streamlets[0].entries[0])
    return replication
