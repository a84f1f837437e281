"""A streamlet: Q entries, each a log of segments in groups; appending with deduplication (thesis 6.2.1).

An append decides, in this order: whether the chunk is the next of its producer (sequence), whether it fits, and where
it goes. It changes nothing before all three are decided, so a refused chunk leaves no trace.

A streamlet of a stream with epochs (docs/epochs.md) can promise readers that no older data comes. A promise is in
memory. The streamlet writes it into the log, as a punctuation, before it appends an older chunk, and when a producer
punctuates.

``kera.broker.log.read_plan`` reads; ``kera.broker.storage.persistence`` decides what is in memory and what on disk.

A streamlet that has moved is partly at other brokers: ``kera.broker.log.intervals`` knows which groups are here.

Invariants: group ids grow by one over all entries of the streamlet, and are never reused; per producer and epoch,
stored sequences have no gap and no repeat; ordinals of records have no gap within an interval of an entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kera.broker.log.arena import Slot
from kera.broker.log.digests import digest_of
from kera.broker.log.entry import Entries, Entry, still_unsure
from kera.broker.log.epochs import NO_EPOCHS, EpochRules
from kera.broker.log.intervals import Holding
from kera.broker.log.progress import StreamletProgress
from kera.broker.log.segment import Segment
from kera.broker.log.watermarks import watermark_of
from kera.broker.records import DIGESTS_MAX, ProducerRecord, SegmentAddress
from kera.core.base.ids import EARLIEST, PRODUCER_IDS
from kera.core.errors import CorruptChunk, OutOfSequence, ProducerFenced, RecordTooLarge, TimestampAhead
from kera.core.format.chunk import ChunkHeader, read_header, verify_header
from kera.core.format.punctuation import NO_TIME, encode_punctuation
from kera.v1 import common_pb2

NO_FENCES: Mapping[int, int] = MappingProxyType({})


class ProducerLimits(NamedTuple):
    """Limits on the number of producers whose progress a streamlet remembers."""

    kept: int = 32_768
    """Maximum number of producers with ids of the coordinator; beyond it, those silent for longest are forgotten. A
    forgotten producer that comes back begins a new epoch, as after any loss of its progress. The limit is so high that
    a chunk is never sent again after that many other producers have come."""
    spare: int = 2048
    """How many more producers are remembered before any is forgotten, because that has to go through all of them."""
    in_order: int = 1024
    """With more producers than this, each append moves its producer to the end; with fewer, their order is not
    needed."""


PRODUCER_LIMITS = ProducerLimits()


class Appended(NamedTuple):
    """The place of an appended chunk."""

    entry: int
    group_id: int
    segment_id: int
    position: int
    first_record: int
    duplicate: bool
    segment: Segment | None
    """None for a repeat of a chunk that is no longer in memory."""
    end: int
    same: bool | None = None
    """For a repeat by a writer that chose its id: whether its payload equals the stored one; None: unknown."""


_as_appended = _as_record = tuple.__new__
"""Does the same as `Appended._make` in half the time, because each chunk needs one."""


class SlotSource(Protocol):
    """The source of slots: see ``kera.broker.storage.slots``."""

    @property
    def slot_bytes(self) -> int:
        """The size of a segment."""
        ...

    def allocate(self, domain: str) -> Slot:
        """Allocate a slot for a new segment, in the memory of a domain. Raises `ArenaFull` or `DiskFull`."""
        ...


class Memory(Protocol):
    """The owner of memory, which is notified of changes to it: see ``kera.broker.storage.persistence``."""

    @property
    def slots(self) -> SlotSource:
        """The source of memory for new segments."""
        ...

    def opened(self, segment: Segment) -> None:
        """Note a new segment that takes appends from now on."""
        ...

    def close(self, segment: Segment) -> None:
        """Close an open segment, so it takes no more appends."""
        ...

    def dropped(self, streamlet: Streamlet) -> None:
        """Free everything of a dropped streamlet."""
        ...

    @property
    def now_ms(self) -> int:
        """The monotonic time, with a coarse resolution."""
        ...

    @property
    def now_us(self) -> int:
        """The time of day, with the same resolution."""
        ...


class Streamlet(StreamletProgress):
    """One partition of a stream on this broker."""

    def __init__(  # noqa: PLR0913 - what a streamlet is made of
        self,
        stream_id: int,
        streamlet_id: int,
        *,
        entries: Entries,
        group_segments: int,
        next_group_id: int,
        producers: dict[int, ProducerRecord],
        memory: Memory,
        held: Holding,
        first_epochs: Mapping[int, int] = NO_FENCES,
        producer_limits: ProducerLimits = PRODUCER_LIMITS,
    ) -> None:
        """`first_epochs`: by producer, the first epoch whose chunks the broker takes."""
        self.stream_id = stream_id
        self.streamlet_id = streamlet_id
        self.entries = entries
        self.next_group_id = next_group_id
        self.producers = producers
        self._producer_limits = producer_limits
        self.producers_in_order = producer_limits.in_order
        """See `ProducerLimits.in_order`."""
        self._producers_max = producer_limits.kept + producer_limits.spare
        self.first_epochs = first_epochs
        self._group_segments = group_segments
        self._memory = memory
        self.epochs = NO_EPOCHS
        self.timestamp_ahead_us = 0
        self._owner_before_promised_us = NO_TIME
        """The latest promise that the former owner, or an earlier launch, may have made; `NO_TIME`: none."""
        self.sealed = False
        """Whether it is about to move: it takes no more chunks, though no other broker owns it yet."""
        self.takes_chunks = True
        self.owned = False
        self.bytes_appended = self.records_appended = self.bytes_read = 0
        """Counted since the last report to the coordinator."""
        self.broker_epoch = held.broker_epoch
        self.hold(held)

    # -- ownership -------------------------------------------------------------------------------------------------

    def hold(self, held: Holding) -> None:
        """Set the intervals that are here. An owner takes chunks from now on; another broker takes none."""
        self.intervals = held.intervals
        if held.owned and not self.owned:
            self._owner_before_promised_us = self._memory.now_us  # the former owner's promise is still unknown
        self.owned = held.owned
        self.sealed = False
        self.takes_chunks = held.owned
        last = held.intervals[-1]
        if held.owned:
            self.broker_epoch = held.broker_epoch
            self.next_group_id = max(self.next_group_id, last.first_group_id)
        goes_on = last.inherits or last.closed
        for entry in self.entries if goes_on else self.entries.made:
            if goes_on:
                self._go_on_from_others(entry)
                self._begin_with_the_first(entry)
            head = entry.head
            if head is not None and (last.closed or head.address.group_id < last.first_group_id):
                self._memory.close(head)
            entry.wake()

    def _go_on_from_others(self, entry: Entry) -> None:
        """Let ordinals continue where the last interval here begins, or where it has ended."""
        last = self.intervals[-1]
        here = last.following if last.closed else last.start
        record = last.end_record(entry.index) if last.closed else last.first_record(entry.index)
        first = self.intervals[0]
        if entry.start == EARLIEST:
            if first.inherits:  # otherwise the first segment will set the start
                entry.move_start(first.start, first.first_record(entry.index))
        elif entry.start >= here:
            entry.start_record = max(entry.start_record, record)
        entry.go_on_from(record)
        if not entry.tail and not entry.stored_segments:
            entry.stored_record = entry.next_record

    def _begin_with_the_first(self, entry: Entry) -> None:
        """Move the start of an entry from which nothing was removed to the start of the first interval.

        After a crash, an entry without data on disk does not know that start; it then starts at its first segment.
        """
        first = self.intervals[0]
        lost = entry.start < first.start or any(
            interval.lost_before(entry.index, entry.start, entry.start_record)
            for interval in self.intervals
            if interval.first_group_id <= entry.start.group_id
        )
        if not lost and (entry.tail or entry.stored_segments):
            entry.move_start(first.start, first.first_record(entry.index))

    def seal(self) -> None:
        """Take no more chunks, so that the present ones become durable and another broker can go on from there."""
        self.sealed, self.takes_chunks = True, False
        for entry in self.entries.made:
            head = entry.head
            if head is not None:
                self._memory.close(head)

    def unseal(self) -> None:
        """Take chunks again, in new groups."""
        self.sealed, self.takes_chunks = False, self.owned

    def set_epochs(self, rules: EpochRules) -> None:
        """Set the epoch rules."""
        self.epochs = rules
        self.timestamp_ahead_us = rules.timestamp_ahead_us
        if not self.owned:
            return
        if rules.by_clock:
            self.entries.promise(self._owner_before_promised_us)
        elif rules.clock_until_us:
            self.entries.promise(min(self._owner_before_promised_us, rules.clock_until_us))
        self._owner_before_promised_us = NO_TIME  # the entries have the promise now, whatever rules come later

    def go_on_from(self, handed_over: common_pb2.StreamletState | None) -> None:
        """Take over the promise of the former owner, as it was handed over; None: the promise is unknown."""
        if handed_over is not None:
            promised = handed_over.HasField("promised_us")
            self._owner_before_promised_us = handed_over.promised_us if promised else NO_TIME
            self.entries.promise(self._owner_before_promised_us)  # even if the stream has no promises any more

    # -- producers -------------------------------------------------------------------------------------------------

    def learn(self, producers: dict[int, ProducerRecord]) -> None:
        """Take over the progress of producers at the broker that the streamlet comes from.

        Segments of the tail get it, too: when the index stores their older progress, that must not undo the new one.
        """
        for producer_id, record in producers.items():
            self.producers[producer_id] = max(self.producers.get(producer_id, record), record)
        for entry in self.entries.made:
            for segment in entry.tail:
                for producer_id, record in segment.producers.items():
                    segment.producers[producer_id] = max(record, producers.get(producer_id, record))
        self.forget_producers()

    def forget_producers(self) -> list[int]:
        """If there are too many producers, forget the longest silent ones; return their ids.

        A writer that chose its id and counts its chunks itself is never forgotten, because it cannot begin a new epoch.
        """
        producers = self.producers
        if len(producers) <= self._producers_max:
            return []
        given = [producer_id for producer_id in producers if producer_id not in PRODUCER_IDS]
        forgotten = given[: max(0, len(given) - self._producer_limits.kept)]
        for producer_id in forgotten:
            del producers[producer_id]
        self._producers_max = len(producers) + self._producer_limits.spare
        return forgotten

    # -- appending -------------------------------------------------------------------------------------------------

    def append(self, chunk: memoryview, header: ChunkHeader) -> Appended:
        """Append a verified chunk of this streamlet; for a repeat, return the place of the stored chunk.

        Raises `OutOfSequence` (with `expected_sequence`), `ProducerFenced`, `RecordTooLarge`, `ArenaFull`, `DiskFull`;
        then nothing has changed.
        """
        producer_id, producer_epoch, sequence = header.producer_id, header.producer_epoch, header.sequence
        entries = self.entries
        entry = entries[producer_id % entries.count]
        state = self.producers.get(producer_id)
        known_epoch, expected = state if state is not None else (producer_epoch, 0)
        if producer_epoch > known_epoch:
            expected = 0
        elif producer_epoch < known_epoch:
            raise _fenced(producer_id, producer_epoch, known_epoch)
        if self.first_epochs and producer_epoch < self.first_epochs.get(producer_id, 0):
            raise _fenced(producer_id, producer_epoch, self.first_epochs[producer_id])
        if sequence < expected:
            return self._find_duplicate(entry, header)
        if sequence > expected:
            raise OutOfSequence(
                f"producer {producer_id} sent sequence {sequence} to streamlet {self.streamlet_id},"
                f" expected {expected}",
                producer_id=producer_id,
                streamlet_id=self.streamlet_id,
                sequence=sequence,
                expected_sequence=expected,
            )
        if self.timestamp_ahead_us:
            self.check_time(header.max_timestamp_us, "a chunk")
        appended = self._place(entry, chunk, header)
        producers = self.producers
        if len(producers) > self.producers_in_order:
            producers.pop(producer_id, None)
        producers[producer_id] = _as_record(ProducerRecord, (producer_epoch, sequence + 1))
        if state is None:
            self.forget_producers()
        return appended

    def check_time(self, timestamp_us: int, what: str) -> None:
        """Raise `TimestampAhead` if a time is too far ahead of the clock; `what` names what has it."""
        ahead_us = timestamp_us - self._memory.now_us
        if self.timestamp_ahead_us and ahead_us > self.timestamp_ahead_us:
            raise TimestampAhead(
                f"{what} for streamlet {self.streamlet_id} is {ahead_us // 1000} ms ahead of its broker's clock;"
                f" the stream has epochs and takes at most {self.timestamp_ahead_us // 1000} ms"
                " (timestamp_ahead_max_ms, 0 for no limit): it would close all epochs before",
                streamlet_id=self.streamlet_id,
                timestamp_us=timestamp_us,
                limit_ms=self.timestamp_ahead_us // 1000,
            )

    def _place(self, entry: Entry, chunk: memoryview, header: ChunkHeader, room: int = 0) -> Appended:
        """Copy a chunk to the end of an entry, if possible in a segment that also has `room` bytes for another one."""
        tail, chunk_bytes = entry.tail, len(chunk)
        if room:
            chunk_bytes = max(chunk_bytes, min(chunk_bytes + room, self._memory.slots.slot_bytes))
        segment = tail[-1] if tail and tail[-1].takes(chunk_bytes) else self._next_segment(entry, chunk_bytes)
        first_record = entry.next_record
        position = segment.append(chunk, header, self.broker_epoch, first_record)
        segment.touched_ms, segment.newest_us = self._memory.now_ms, self._memory.now_us
        entry.next_record = first_record + header.record_count
        _, _, _, group_id, segment_id = segment.address
        return _as_appended(
            Appended, (entry.index, group_id, segment_id, position, first_record, False, segment, segment.head, None)
        )

    def _is_next(self, header: ChunkHeader) -> bool:
        state = self.producers.get(header.producer_id)
        if state is None or header.producer_epoch > state.producer_epoch:
            return header.sequence == 0
        return (header.producer_epoch, header.sequence) == state

    def publish(self, appended: Appended) -> None:
        """Let readers see all chunks up to the end of `appended`, which has reached its level.

        The chunks of an entry are published in the order of their appends.
        """
        segment, end = appended.segment, appended.end
        if segment is not None and end > segment.durable_head:
            segment.advance_durable_head(end)
            segment.entry.wake()

    def _next_segment(self, entry: Entry, chunk_bytes: int) -> Segment:
        """Open a new segment for the next chunk of `entry`; the open one, if there is one, has no room for it."""
        slot_bytes = self._memory.slots.slot_bytes
        if chunk_bytes > slot_bytes:
            raise RecordTooLarge(
                f"chunk of {chunk_bytes} bytes is larger than a segment ({slot_bytes} bytes)",
                chunk_bytes=chunk_bytes,
                limit=slot_bytes,
            )
        slot = self._memory.slots.allocate(entry.memory_domain)  # before anything is closed: it may raise
        head = entry.head  # the allocation may have closed it to make room
        if head is not None and head.address.segment_id < self._group_segments:
            key = (head.address.group_id, head.address.segment_id + 1)
        else:
            key = (self.next_group_id, 1)
            self.next_group_id += 1
        if head is not None:
            self._memory.close(head)
        segment = Segment.open(entry, SegmentAddress(*entry.log_id, *key), slot, entry.next_record)
        entry.add(segment)
        self._memory.opened(segment)
        return segment

    def _find_duplicate(self, entry: Entry, header: ChunkHeader) -> Appended:
        """Find the stored chunk with this producer, epoch and sequence.

        Repeats are rare, so the places of chunks are not remembered but searched. But a producer may repeat thousands,
        so the search takes the first segment at whose end the producer was beyond the chunk, and bisects it.
        """
        wanted = (header.producer_epoch, header.sequence)
        if entry.unsure is not None:  # the chunk may be in the unsure tail
            raise still_unsure(entry)
        for _, segment in sorted(entry.resident.items()):
            state = segment.producers.get(header.producer_id)
            if segment.loading or (not segment.in_index and state is None):
                continue
            if state is not None and state <= wanted:
                continue
            index = segment.chunk_of(header.producer_id, wanted)
            if index is not None:
                offset = segment.chunk_ends[index - 1] if index else 0
                stored = segment.header_at(offset)
                return Appended(
                    entry.index,
                    *segment.key,
                    offset,
                    stored.first_record,
                    True,  # noqa: FBT003 - a field of a tuple
                    segment,
                    segment.chunk_ends[index],
                    self._check_repeat(header, _digest_at(segment, offset)),
                )
            if state is not None:
                break  # the chunk was before this segment
        # The chunk was acknowledged, and is only on disk or was removed: still a repeat, but without a place.
        same = self._check_repeat(header, None)
        return Appended(entry.index, 0, 0, 0, 0, True, None, 0, same)  # noqa: FBT003 - a field of a tuple

    def _check_repeat(self, header: ChunkHeader, stored: bytes | None) -> bool | None:
        """Return whether a chunk equals the one that is stored with its sequence; None: that is not known.

        `stored`: the digest of the stored chunk; None: the chunk is not in memory. For a producer with an id of the
        coordinator, raises `ProducerFenced` if its chunk differs or is too old to compare: accepting it as a repeat
        would acknowledge records that are stored nowhere. Writers that choose their ids send other records with the
        same sequence on purpose, and look at the stored ones: see ``kera.client.producing.appender``.
        """
        producer_id, epoch, sequence = header.producer_id, header.producer_epoch, header.sequence
        if stored is None:
            known = self.entries.digests(producer_id)
            if known is None or not known.covers(epoch, sequence):
                return None  # an earlier version, which kept no digests, stored it
            stored = known.of(epoch, sequence)
        same = None if stored is None else stored == digest_of(header)
        if same or producer_id in PRODUCER_IDS:
            return same
        raise _other_chunk(header) if same is False else _too_old(header)

    # -- promises --------------------------------------------------------------------------------------------------

    @property
    def promised_us(self) -> int:
        """The latest promise to readers that the log does not have yet, over all entries; `NO_TIME`: none."""
        return max(self.entries.first_promise_us, *(entry.promised_us for entry in self.entries.made), NO_TIME)

    def promise(self, entry: Entry) -> int | None:
        """Promise that an entry gets no older data without a punctuation before it; return the time, or None.

        Returns None if the streamlet makes no promises, or takes no chunks.
        """
        if not (self.epochs.by_clock and self.takes_chunks):
            return None
        promised_us = self._memory.now_us - self.epochs.grace_us
        if promised_us > entry.promised_us and promised_us > watermark_of(entry):
            entry.promised_us = promised_us
        return max(promised_us, entry.promised_us)

    def keep_promise(self, header: ChunkHeader, chunk_bytes: int) -> Appended | None:
        """Append a punctuation if the next chunk is older than the promise to readers.

        Raises as `append` if there is no memory; then nothing has changed.
        """
        entry = self.entries[header.producer_id % self.entries.count]
        if header.max_timestamp_us >= entry.promised_us or not self._is_next(header):
            return None
        return self._write_down(entry, entry.promised_us, room=chunk_bytes)

    def punctuate(self, entry: Entry, timestamp_us: int) -> Appended | None:
        """Append a punctuation with this time, or a later promised one; None if the entry's watermark is as late.

        Raises as `keep_promise`.
        """
        return self._write_down(entry, max(timestamp_us, entry.promised_us))

    def _write_down(self, entry: Entry, timestamp_us: int, room: int = 0) -> Appended | None:
        appended = None
        if watermark_of(entry) < timestamp_us:  # otherwise the log's times imply it
            chunk = memoryview(encode_punctuation(self.stream_id, self.streamlet_id, timestamp_us, self._memory.now_us))
            appended = self._place(entry, chunk, read_header(chunk), room=room)
        entry.promised_us = NO_TIME
        return appended

    # -- what is there ---------------------------------------------------------------------------------------------

    def is_active(self, group_id: int, entry: Entry) -> bool:
        """Whether a group may get more segments."""
        head = entry.head
        return head is not None and head.address.group_id == group_id

    @property
    def length_bytes(self) -> int:
        """The size of the part that readers can see, over all entries."""
        return sum(entry.length_bytes for entry in self.entries.made)

    def entry_of(self, group_id: int) -> Entry | None:
        """Return the entry of a group, if the group has data left."""
        return next((entry for entry in self.entries.made if entry.next_group(group_id - 1) == group_id), None)

    def available_groups(self) -> tuple[int, int]:
        """Return the first and last group id; (0, 0) if there are no groups."""
        first = [group_id for entry in self.entries.made if (group_id := entry.next_group(0)) is not None]
        return (min(first), self.next_group_id - 1) if first else (0, 0)

    def drop(self) -> None:
        """Free all memory and wake all readers; the streamlet must not be used any more."""
        self.entries.drop()
        self._memory.dropped(self)
        for entry in self.entries.made:
            entry.wake()


def _digest_at(segment: Segment, offset: int) -> bytes | None:
    """Return the digest of the chunk at `offset`; None if its header is damaged."""
    try:
        return digest_of(verify_header(segment.slot.view, offset))
    except CorruptChunk:
        return None


def _other_chunk(header: ChunkHeader) -> ProducerFenced:
    return ProducerFenced(
        f"another writer uses producer id {header.producer_id}: streamlet {header.streamlet_id} has other records with"
        f" sequence {header.sequence}; each producer needs an id of its own (InitProducer), also after a fork or in a"
        " copied machine",
        producer_id=header.producer_id,
        streamlet_id=header.streamlet_id,
        sequence=header.sequence,
    )


def _too_old(header: ChunkHeader) -> ProducerFenced:
    return ProducerFenced(
        f"producer {header.producer_id} repeats sequence {header.sequence} of streamlet {header.streamlet_id}, which is"
        f" not among its last {DIGESTS_MAX} chunks: the broker cannot tell whether it is the chunk that is stored, or"
        " that of another writer with the same id",
        producer_id=header.producer_id,
        streamlet_id=header.streamlet_id,
        sequence=header.sequence,
        limit=DIGESTS_MAX,
    )


def _fenced(producer_id: int, producer_epoch: int, by_epoch: int) -> ProducerFenced:
    return ProducerFenced(
        f"producer {producer_id} epoch {producer_epoch} was fenced by {by_epoch}",
        producer_id=producer_id,
        producer_epoch=by_epoch,
    )
