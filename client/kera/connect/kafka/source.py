"""A topic as the source of a copy. Its parts are its partitions, named by their numbers; places are offsets.

The copy reads only records of committed transactions, after their commit. So offsets have gaps, also where records were
compacted, and a place is the offset after the last record.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kera.connect.errors import RecordsGone, Refused, SourceChanged, Unreachable
from kera.connect.kafka.connection import ANSWER_S, identity_of, partitions_of, settings_of, translate, translated
from kera.connect.kafka.records import rows_of
from kera.connect.pieces import Piece, Place, Span
from kera.connect.worker import Worker
from kera.core.format.schema import DEFAULT_SCHEMA

MESSAGES_MAX = 10_000
"""Maximum number of messages to take from the client at once."""
POLL_S = 0.1
LOOK_S = 30.0
"""Interval of the checks whether a followed topic has more partitions."""
SILENT_S = 60.0
"""Time without a message, with more to read, after which the brokers count as unreachable."""


class TopicSource:
    """See `kera.connect.pieces.Source`."""

    schema = DEFAULT_SCHEMA
    may_shrink = True

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        name: str,
        settings: Mapping[str, str],
        *,
        follow: bool,
        from_latest: bool = False,
        skip_lost: bool = False,
    ) -> None:
        """`name`: the copy's name. `skip_lost`: continue after records that were removed before they were copied."""
        self.shown = self.identity = f"topic {topic}"
        self.notes: list[str] = []
        self.streamlets = 0
        self._topic = topic
        self._follow = follow
        self._from_latest = from_latest
        self._skip_lost = skip_lost
        self._settings = settings_of(
            bootstrap,
            settings,
            group_id=f"kera-connect.{name}",  # clients must have a group, but it stores no offsets
            enable_auto_commit=False,
            enable_auto_offset_store=False,
            enable_partition_eof=True,
            auto_offset_reset="error",
            isolation_level="read_committed",
        )
        self._settings.setdefault("queued.max.messages.kbytes", 65536)
        self._consumer: Any = None
        self._look_s = time.monotonic() + LOOK_S
        """When to count the partitions again."""
        self._worker = Worker("kafka")

    async def open(self) -> None:
        """See `Source`. Raises `Refused` if the topic does not exist, `Unreachable`."""
        await self._worker.call(self._open)

    def _open(self) -> None:
        import confluent_kafka as kafka

        with translated(self.shown):
            self._consumer = kafka.Consumer(self._settings)
        self.streamlets = partitions_of(self._consumer, self._topic)
        if not self.streamlets:
            raise Refused(f"there is no topic {self._topic!r} at {self._settings['bootstrap.servers']}")
        self.identity = f"topic {self._topic} of {identity_of(self._consumer, self._settings, self._topic)}"

    async def close(self) -> None:
        """See `Source`."""
        if self._consumer is not None:
            await self._worker.call(self._consumer.close)
            self._consumer = None
        self._worker.close()

    def _bounds(self) -> list[tuple[int, int]]:
        """Return the first offset of each partition, and the offset after its last."""
        import confluent_kafka as kafka

        with translated(self.shown):
            found = [
                self._consumer.get_watermark_offsets(kafka.TopicPartition(self._topic, number), timeout=ANSWER_S)
                for number in range(self.streamlets)
            ]
        if None in found:
            raise Refused(f"{self.shown}: Kafka does not say where its partitions begin and end")
        return found

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """See `Source`."""
        left = 0
        for number, (first, behind) in enumerate(await self._worker.call(self._bounds)):
            left += max(0, behind - max(first, places.get(str(number), behind if self._from_latest else first)))
        return left

    def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """See `Source`. Raises `RecordsGone` if the topic has removed the next records."""
        return self._worker.each(self._pieces(dict(places), piece_bytes))

    def _starts(self, places: dict[str, Place], bounds: Sequence[tuple[int, int]]) -> list[int]:
        """Return the offset where each partition continues. Raises `RecordsGone`, `SourceChanged`."""
        starts = []
        for number, (first, behind) in enumerate(bounds):
            place = places.get(str(number))
            if place is None:
                place = behind if self._from_latest else first
            elif place < first and not self._skip_lost:
                raise RecordsGone(
                    f"topic {self._topic!r} has removed offsets {place} to {first - 1} of partition {number} before"
                    " they were copied; --skip-lost goes on behind them",
                    partition=number,
                )
            elif place > behind:
                raise SourceChanged(
                    f"topic {self._topic!r} ends at offset {behind} of partition {number}, and was copied up to"
                    f" {place}: it was deleted and created again, or has lost records"
                )
            starts.append(max(place, first))
        return starts

    def _pieces(self, places: dict[str, Place], piece_bytes: int) -> Generator[Piece | None, None, None]:
        bounds = self._bounds()
        starts = dict(enumerate(self._starts(places, bounds)))
        ends = {number: None if self._follow else behind for number, (_, behind) in enumerate(bounds)}
        for number, start in starts.items():
            if self._from_latest and str(number) not in places:  # an empty piece makes the target store the place
                yield Piece(str(number), start, start, rows_of([]), number)
        for number, messages in self._messages(starts, ends):
            if not messages:
                yield None
            for some in _in_pieces(messages, piece_bytes):
                part, offsets = str(number), [message.offset() for message in some]
                end = offsets[-1] + 1
                yield Piece(part, places.get(part, starts[number]), end, rows_of(some), number, row_places=offsets)
                places[part] = end

    def _messages(self, starts: Mapping[int, int], ends: Mapping[int, int | None]) -> Iterator[tuple[int, list[Any]]]:
        """Yield each partition's messages from `starts` up to before `ends` (None: for ever), in turns.

        While no messages arrive, yield an empty list.
        """
        import confluent_kafka as kafka

        reading = {number for number, end in ends.items() if end is None or starts[number] < end}
        with translated(self.shown):
            self._consumer.assign([kafka.TopicPartition(self._topic, number, starts[number]) for number in reading])
        patience = _Patience(self.shown)
        while reading:
            begun_s = time.monotonic()
            with translated(self.shown):
                found = self._consumer.consume(MESSAGES_MAX, POLL_S)
            waited_s, heard = time.monotonic() - begun_s, False
            self._look_for_more(None in ends.values())
            by_partition: dict[int, list[Any]] = {}
            for message in found:
                number = message.partition()
                end = ends.get(number)
                at_end = message.error() is not None and self._is_end(message.error())
                heard = heard or at_end or message.error() is None
                if message.error() is not None:
                    if at_end and end is not None:
                        reading.discard(number)  # only marks of transactions are left
                elif end is None or message.offset() < end:
                    by_partition.setdefault(number, []).append(message)
                if end is not None and message.offset() is not None and message.offset() >= end - 1:
                    reading.discard(number)
            patience.waited(waited_s, heard=heard, forever=None in ends.values())
            yield from by_partition.items() or [(0, [])]

    def _look_for_more(self, follows: bool) -> None:  # noqa: FBT001 - whether it does
        """Raise `SourceChanged` if a followed topic has got more partitions, which this copy would not read."""
        if not follows or time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + LOOK_S
        if (count := partitions_of(self._consumer, self._topic)) > self.streamlets:
            raise SourceChanged(
                f"topic {self._topic!r} has {count} partitions now, and had {self.streamlets}: start the copy again"
            )

    def _is_end(self, error: Any) -> bool:
        """Return whether a partition has no more messages for now.

        Raises errors that end the copy; the client recovers from others.
        """
        import confluent_kafka as kafka

        code = error.code()
        if code in {kafka.KafkaError.OFFSET_OUT_OF_RANGE, kafka.KafkaError._AUTO_OFFSET_RESET}:  # noqa: SLF001
            raise RecordsGone(
                f"topic {self._topic!r} has removed records before they were copied: {error.str()}; --skip-lost goes on"
                " behind them"
            )
        passing = {kafka.KafkaError._TRANSPORT, kafka.KafkaError._ALL_BROKERS_DOWN, kafka.KafkaError._RESOLVE}  # noqa: SLF001
        at_end = bool(code == kafka.KafkaError._PARTITION_EOF)  # noqa: SLF001
        if not at_end and code not in passing and not error.retriable():
            raise translate(self.shown, error)
        return at_end

    async def kept(self, places: Mapping[str, Place]) -> None:
        """Do nothing: the topic's retention decides. See `Source`."""

    async def has_records(self, partition: int, start: int, end: int) -> bool:
        """Return whether a partition now has a record from `start` up to before `end`. Raises `SourceChanged`."""
        return await self._worker.call(self._has_records, partition, start, end)

    def _has_records(self, partition: int, start: int, end: int) -> bool:
        first, behind = self._bounds()[partition]
        if end > behind:
            raise SourceChanged(
                f"topic {self._topic!r} ends at offset {behind} of partition {partition}, before {end}: it was deleted"
                " and created again, or has lost records"
            )
        start = max(first, start)
        return start < end and any(messages for _, messages in self._messages({partition: start}, {partition: end}))

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """See `Source`."""
        return await self._worker.call(self._again, spans)

    def _again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        bounds = self._bounds()
        starts: dict[int, int] = {}
        ends: dict[int, int | None] = {}
        for part, start, end, *_ in spans:
            number = int(part)
            if number >= len(bounds) or end > bounds[number][1]:
                raise SourceChanged(
                    f"topic {self._topic!r} has no longer offset {end - 1} of partition {number}, which was being"
                    " copied when the copy ended: it was deleted and created again, or has lost records"
                )
            begin = max(bounds[number][0], start or 0)
            starts[number] = min(starts.get(number, begin), begin)
            ends[number] = max(ends.get(number) or 0, end)
        found: list[list[Any]] = [[] for _ in spans]
        for number, messages in self._messages(starts, ends):
            for at, (part, start, end, *_) in enumerate(spans):
                if int(part) == number:
                    found[at] += [message for message in messages if (start or 0) <= message.offset() < end]
        return [rows_of(messages) for messages in found]


class _Patience:
    """Measures how long the copy has waited without a message from a broker."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._silent_s = 0.0

    def waited(self, seconds: float, *, heard: bool, forever: bool) -> None:
        """Raise `Unreachable` if nothing was `heard` for too long, unless the copy waits `forever`."""
        self._silent_s = 0.0 if heard else self._silent_s + seconds
        if not forever and self._silent_s > SILENT_S:
            raise Unreachable(
                f"{self._what}: Kafka has sent nothing for {SILENT_S:.0f} s, though there is more to read"
            )


def _in_pieces(messages: Sequence[Any], piece_bytes: int) -> Iterator[Sequence[Any]]:
    """Yield `messages` in runs of about `piece_bytes`."""
    some: list[Any] = []
    size = 0
    for message in messages:
        some.append(message)
        size += len(message)
        if size >= piece_bytes:
            yield some
            some, size = [], 0
    if some:
        yield some
