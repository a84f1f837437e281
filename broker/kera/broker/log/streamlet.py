"""A streamlet: Q entries, each a log of segments in groups; appending with deduplication (thesis 6.2.1).

Appending decides, in this order: is the chunk the next of its producer (sequence), does it fit, where does it go. Until
all three are answered nothing has changed, so a refused chunk leaves no trace.

A streamlet of a stream with epochs (docs/epochs.md) promises readers that nothing older comes. A promise is in memory.
It is written down, as a punctuation, before a chunk that is older, and when a producer says so.

Reading is ``kera.broker.log.read_plan``; what is in memory and what on disk, ``kera.broker.storage.persistence``.

A streamlet that has moved is partly at other brokers: ``kera.broker.log.intervals`` says which of its groups are here.

Invariants: group ids grow by one over all entries of the streamlet, and are never used again; per producer and epoch,
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
    """Maximum of producers whose ids the coordinator gave: beyond it, the one that was silent for longest is forgotten.
    When it comes back, it begins a new epoch, as after any loss of its progress. So many do not come and go within the
    time for which a chunk is sent again."""
    spare: int = 2048
    """So many more are remembered before any is forgotten: it takes a look at all of them."""
    in_order: int = 1024
    """With more than so many, each is put behind the others when it is heard of; with fewer nobody asks for their
    order."""


PRODUCER_LIMITS = ProducerLimits()


class Appended(NamedTuple):
    """Where a chunk is."""

    entry: int
    group_id: int
    segment_id: int
    position: int
    first_record: int
    duplicate: bool
    segment: Segment | None
    """None for a repeat of a chunk that is not in memory any more."""
    end: int
    same: bool | None = None
    """For a repeat by a writer that chose its id: whether it has the payload that is stored; None: unknown."""


_as_appended = _as_record = tuple.__new__
"""Does the same as `Appended._make` in half the time: one is made for each chunk."""


class SlotSource(Protocol):
    """The source of slots: see ``kera.broker.storage.slots``."""

    @property
    def slot_bytes(self) -> int:
        """Size of a segment."""
        ...

    def allocate(self, domain: str) -> Slot:
        """A slot for a new segment, in the memory of a domain. Raises `ArenaFull` or `DiskFull`."""
        ...


class Memory(Protocol):
    """The owner of memory, which is notified of changes to it: see ``kera.broker.storage.persistence``."""

    @property
    def slots(self) -> SlotSource:
        """Memory for new segments."""
        ...

    def opened(self, segment: Segment) -> None:
        """A segment takes appends from now on."""
        ...

    def close(self, segment: Segment) -> None:
        """Have an open segment take no more appends."""
        ...

    def dropped(self, streamlet: Streamlet) -> None:
        """All of a streamlet goes."""
        ...

    @property
    def now_ms(self) -> int:
        """Monotonic, and coarse."""
        ...

    @property
    def now_us(self) -> int:
        """The time of day, as coarse."""
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
        """`first_epochs`: by producer, the first epoch of which its broker takes chunks."""
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
        """That nothing older comes may have been promised by whoever owned it before, or by an earlier launch."""
        self.sealed = False
        """It is about to move: nothing more is taken, though nobody else owns it yet."""
        self.takes_chunks = True
        self.owned = False
        self.bytes_appended = self.records_appended = self.bytes_read = 0
        """Since the last report to the coordinator."""
        self.broker_epoch = held.broker_epoch
        self.hold(held)

    # -- ownership -------------------------------------------------------------------------------------------------

    def hold(self, held: Holding) -> None:
        """Take note of which intervals are here; an owner takes chunks from now on, and others do not any more."""
        self.intervals = held.intervals
        if held.owned and not self.owned:
            self._owner_before_promised_us = self._memory.now_us  # nobody has said yet what the owner before promised
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
        """Let ordinals go on where the last interval here begins, or where it ended."""
        last = self.intervals[-1]
        here = last.following if last.closed else last.start
        record = last.end_record(entry.index) if last.closed else last.first_record(entry.index)
        first = self.intervals[0]
        if entry.start == EARLIEST:
            if first.inherits:  # else nothing was before it: there is no start before there is a first segment
                entry.move_start(first.start, first.first_record(entry.index))
        elif entry.start >= here:
            entry.start_record = max(entry.start_record, record)
        entry.go_on_from(record)
        if not entry.tail and not entry.stored_segments:
            entry.stored_record = entry.next_record

    def _begin_with_the_first(self, entry: Entry) -> None:
        """An entry of which nothing was removed begins where the first interval does, whatever its first group is.

        After a crash that is not known of one that had nothing on disk: then the start is that of its first segment.
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
        """Take no more chunks, so that what there is can become durable and another broker go on from there."""
        self.sealed, self.takes_chunks = True, False
        for entry in self.entries.made:
            head = entry.head
            if head is not None:
                self._memory.close(head)

    def unseal(self) -> None:
        """Take chunks again, in new groups."""
        self.sealed, self.takes_chunks = False, self.owned

    def set_epochs(self, rules: EpochRules) -> None:
        """Set the rules of its epochs from now on."""
        self.epochs = rules
        self.timestamp_ahead_us = rules.timestamp_ahead_us
        if not self.owned:
            return
        if rules.by_clock:
            self.entries.promise(self._owner_before_promised_us)
        elif rules.clock_until_us:
            self.entries.promise(min(self._owner_before_promised_us, rules.clock_until_us))
        self._owner_before_promised_us = NO_TIME  # whatever rules come now, all that was promised is known

    def go_on_from(self, handed_over: common_pb2.StreamletState | None) -> None:
        """Keep what its owner before has promised, who has just handed it over so; None: nobody knows what that was."""
        if handed_over is not None:
            promised = handed_over.HasField("promised_us")
            self._owner_before_promised_us = handed_over.promised_us if promised else NO_TIME
            self.entries.promise(self._owner_before_promised_us)  # also if nobody promises any more by now

    # -- producers -------------------------------------------------------------------------------------------------

    def learn(self, producers: dict[int, ProducerRecord]) -> None:
        """Producers had got so far at the broker that this streamlet comes from.

        What of them is not in the index yet, with their older chunks here, must not undo what was written down of that.
        """
        for producer_id, record in producers.items():
            self.producers[producer_id] = max(self.producers.get(producer_id, record), record)
        for entry in self.entries.made:
            for segment in entry.tail:
                for producer_id, record in segment.producers.items():
                    segment.producers[producer_id] = max(record, producers.get(producer_id, record))
        self.forget_producers()

    def forget_producers(self) -> list[int]:
        """If there are too many, forget those longest unheard of that can begin anew; returns them.

        Who chose its id and counts its chunks itself could not, and is remembered for ever.
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
        """Append a verified chunk of this streamlet; a repeat returns where it is already.

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
        """Raise `TimestampAhead` if a time is too far ahead of the clock; `what` has it."""
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
        """Copy a chunk to the end of an entry, where there is also `room` for another one, if that can be."""
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
        """Let readers see everything up to the end of `appended`, which has reached its level.

        Chunks of one entry are published in the order in which they were appended.
        """
        segment, end = appended.segment, appended.end
        if segment is not None and end > segment.durable_head:
            segment.advance_durable_head(end)
            segment.entry.wake()

    def _next_segment(self, entry: Entry, chunk_bytes: int) -> Segment:
        """A new segment, which takes the next chunk of `entry`: the open one, if there is one, has no room for it."""
        slot_bytes = self._memory.slots.slot_bytes
        if chunk_bytes > slot_bytes:
            raise RecordTooLarge(
                f"chunk of {chunk_bytes} bytes is larger than a segment ({slot_bytes} bytes)",
                chunk_bytes=chunk_bytes,
                limit=slot_bytes,
            )
        slot = self._memory.slots.allocate(entry.memory_domain)  # before anything is closed: it may raise
        head = entry.head  # which may have been closed to make room
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
        """Where the chunk with this producer, epoch and sequence is.

        Repeats are rare: look instead of remembering. But whoever repeats may repeat thousands, so look into one
        segment, the first one at whose end the producer was beyond it, and halve what is left.
        """
        wanted = (header.producer_epoch, header.sequence)
        if entry.unsure is not None:  # it may be among that
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
                break  # it was before this one
        # It was acknowledged and is on disk, or has been removed since: still a repeat, with no place to tell.
        same = self._check_repeat(header, None)
        return Appended(entry.index, 0, 0, 0, 0, True, None, 0, same)  # noqa: FBT003 - a field of a tuple

    def _check_repeat(self, header: ChunkHeader, stored: bytes | None) -> bool | None:
        """Whether a chunk is the one that is stored with its sequence; None: that is not known.

        `stored`: the digest of that one; None: it is not in memory. Raises `ProducerFenced` for a producer of the
        coordinator whose chunk is another one, or is not known to be the same: to call that a repeat would acknowledge
        records that are nowhere. Those who choose their ids send other records with the same sequence on purpose, and
        look at what is there: see ``kera.client.producing.appender``.
        """
        producer_id, epoch, sequence = header.producer_id, header.producer_epoch, header.sequence
        if stored is None:
            known = self.entries.digests(producer_id)
            if known is None or not known.covers(epoch, sequence):
                return None  # an earlier version stored it, and kept no digests
            stored = known.of(epoch, sequence)
        same = None if stored is None else stored == digest_of(header)
        if same or producer_id in PRODUCER_IDS:
            return same
        raise _other_chunk(header) if same is False else _too_old(header)

    # -- promises --------------------------------------------------------------------------------------------------

    @property
    def promised_us(self) -> int:
        """That nothing older comes, as far as anybody was told and the log does not say so; `NO_TIME`: nobody was."""
        return max(self.entries.first_promise_us, *(entry.promised_us for entry in self.entries.made), NO_TIME)

    def promise(self, entry: Entry) -> int | None:
        """That nothing older comes behind what is written of an entry, but behind a punctuation. None: no promise."""
        if not (self.epochs.by_clock and self.takes_chunks):
            return None
        promised_us = self._memory.now_us - self.epochs.grace_us
        if promised_us > entry.promised_us and promised_us > watermark_of(entry):
            entry.promised_us = promised_us
        return max(promised_us, entry.promised_us)

    def keep_promise(self, header: ChunkHeader, chunk_bytes: int) -> Appended | None:
        """Append a punctuation, if the chunk that comes next is older than what readers were promised.

        Raises what `append` raises for want of memory; then nothing has changed.
        """
        entry = self.entries[header.producer_id % self.entries.count]
        if header.max_timestamp_us >= entry.promised_us or not self._is_next(header):
            return None
        return self._write_down(entry, entry.promised_us, room=chunk_bytes)

    def punctuate(self, entry: Entry, timestamp_us: int) -> Appended | None:
        """Append a punctuation with this time, or a later one that was promised. None: the log says so already.

        Raises as `keep_promise`.
        """
        return self._write_down(entry, max(timestamp_us, entry.promised_us))

    def _write_down(self, entry: Entry, timestamp_us: int, room: int = 0) -> Appended | None:
        appended = None
        if watermark_of(entry) < timestamp_us:  # else the log says so
            chunk = memoryview(encode_punctuation(self.stream_id, self.streamlet_id, timestamp_us, self._memory.now_us))
            appended = self._place(entry, chunk, read_header(chunk), room=room)
        entry.promised_us = NO_TIME
        return appended

    # -- what is there ---------------------------------------------------------------------------------------------

    def is_active(self, group_id: int, entry: Entry) -> bool:
        """Whether more segments may come to a group."""
        head = entry.head
        return head is not None and head.address.group_id == group_id

    @property
    def length_bytes(self) -> int:
        """Size of the part that readers can see, over all entries."""
        return sum(entry.length_bytes for entry in self.entries.made)

    def entry_of(self, group_id: int) -> Entry | None:
        """The entry that a group belongs to, if anything is left of it."""
        return next((entry for entry in self.entries.made if entry.next_group(group_id - 1) == group_id), None)

    def available_groups(self) -> tuple[int, int]:
        """First and last group id; (0, 0) when there is none."""
        first = [group_id for entry in self.entries.made if (group_id := entry.next_group(0)) is not None]
        return (min(first), self.next_group_id - 1) if first else (0, 0)

    def drop(self) -> None:
        """Free all memory and wake all readers; the streamlet is not used any more."""
        self.entries.drop()
        self._memory.dropped(self)
        for entry in self.entries.made:
            entry.wake()


def _digest_at(segment: Segment, offset: int) -> bytes | None:
    """The digest of the chunk there; None: its header has been damaged since."""
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
