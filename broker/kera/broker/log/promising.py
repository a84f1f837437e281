"""A streamlet's part in epochs (docs/epochs.md): it promises that nothing older comes, and writes that down. Pure.

A promise is in memory. It is written down, as a punctuation, before a chunk that is older, and when a producer says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kera.broker.log.epochs import NO_EPOCHS, EpochRules
from kera.broker.log.progress import StreamletProgress
from kera.broker.log.watermarks import watermark_of
from kera.core.errors import TimestampAhead
from kera.core.format.chunk import ChunkHeader, read_header
from kera.core.format.punctuation import NO_TIME, encode_punctuation
from kera.v1 import common_pb2

if TYPE_CHECKING:
    from kera.broker.log.entry import Entries, Entry
    from kera.broker.log.streamlet import Appended, Memory


class Promising(StreamletProgress):
    """The base of `Streamlet`."""

    stream_id: int
    streamlet_id: int
    entries: Entries
    owned: bool
    _memory: Memory

    def _begin_to_promise(self, memory: Memory) -> None:
        self._memory = memory
        self.epochs = NO_EPOCHS
        self.timestamp_ahead_us = 0
        self._owner_before_promised_us = NO_TIME
        """That nothing older comes may have been promised by whoever owned it before, or by an earlier launch."""

    # -- ownership -------------------------------------------------------------------------------------------------

    def _go_on_from_unknown(self) -> None:
        """It is owned from now on; nobody has said yet what the owner before has promised."""
        self._owner_before_promised_us = self._memory.now_us

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

    def _place(self, entry: Entry, chunk: memoryview, header: ChunkHeader, room: int = 0) -> Appended:
        """Copy a chunk to the end of an entry, where there is also `room` for another one, if that can be."""
        raise NotImplementedError  # in `Streamlet`

    def _is_next(self, header: ChunkHeader) -> bool:
        state = self.producers.get(header.producer_id)
        if state is None or header.producer_epoch > state.producer_epoch:
            return header.sequence == 0
        return (header.producer_epoch, header.sequence) == state

    # -- what comes too early --------------------------------------------------------------------------------------

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
