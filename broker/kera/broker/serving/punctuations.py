"""Punctuations: producers' statements that no older data follows the present data (docs/epochs.md).

A punctuation is written into each entry of the streamlets that a request names. The request is answered when all
punctuations have reached its level. An entry whose watermark is as late already gets no punctuation, so a repeated or
late request does no harm: its answer waits for the data that exists. An entry to which nothing was ever written gets
none either, because it does not delay the watermark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kera.broker.log.entry import Entry, still_unsure
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.watermarks import watermark_of
from kera.broker.ownership.stream import Stream
from kera.broker.ownership.streams import Streams
from kera.broker.serving.levels import check_level
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.pending_write import PendingWrite
from kera.broker.serving.write import Writer
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.turns import Turns
from kera.core.errors import ArenaFull, InvalidArgument, KeraError
from kera.core.format.punctuation import NO_TIME
from kera.core.rpc import Call, Reply
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2

STREAMLETS_MAX = 65536
"""Maximum number of streamlets in one request."""
PunctuateCall = Call[broker_pb2.PunctuateRequest]


class Punctuations:
    """Handles punctuate."""

    def __init__(
        self, streams: Streams, writer: Writer, memory: PersistenceManager, turns: Turns, limits: ServingLimits
    ) -> None:
        self._streams = streams
        self._writer = writer
        self._turns = turns
        self._limits = limits
        self._room = asyncio.Event()
        memory.events.room.listen(self._room.set)

    async def punctuate(self, call: PunctuateCall) -> Reply[broker_pb2.PunctuateResponse]:
        """Write punctuations into the entries of streamlets; each streamlet has its own result."""
        request = call.message
        self._check(call)
        write = PendingWrite(
            broker_pb2.MultiWriteChunksRequest(durability=request.durability), call.bulk, call.peer, self._writer.go_on
        )
        response = broker_pb2.PunctuateResponse()
        places: list[broker_pb2.PunctuatedStreamlet] = []
        pace = self._turns.pace(id(call.peer))
        until_s = asyncio.get_running_loop().time() + self._limits.room_wait_ms / 1000
        for streamlet_id in request.streamlet_ids:
            told = response.streamlets.add()
            try:
                for index in self._indexes(request.stream_id, streamlet_id, request.timestamp_us):
                    await pace.step()
                    if await self._punctuate(write, request, streamlet_id, index, until_s):
                        told.written += 1
                    told.entries += 1
                    places.append(told)
            except KeraError as error:
                told.error.CopyFrom(error_to_message(error))
        await self._writer.settle(write)
        for told, status in zip(places, write.statuses, strict=True):
            if status.HasField("error") and not told.HasField("error"):
                told.error.CopyFrom(status.error)
        return Reply(response)

    def _check(self, call: PunctuateCall) -> None:
        """Check a request as a whole. Raises `InvalidArgument`, `UnknownStream`, `NotAllowed` or `QuotaExceeded`."""
        request = call.message
        if not request.streamlet_ids:
            raise InvalidArgument("a punctuation needs at least one streamlet")
        if len(request.streamlet_ids) > STREAMLETS_MAX:
            raise InvalidArgument(f"at most {STREAMLETS_MAX} streamlets in a request", limit=STREAMLETS_MAX)
        check_level(request.durability)
        stream = self._streams.get(request.stream_id)
        self._writer.check_access(call.peer, stream)
        if request.timestamp_us < 0:
            raise InvalidArgument(
                f"the time of a punctuation is in microseconds since 1970, and {request.timestamp_us} is before",
                timestamp_us=request.timestamp_us,
            )
        if not stream.epochs.are_kept:
            raise InvalidArgument(
                f"stream {stream.name!r} has no epochs to close; set their length with kera stream alter"
                f" {stream.name} --epoch",
                stream=stream.name,
            )
        here = (stream.streamlets.get(each) for each in request.streamlet_ids)
        entries = sum(len(each.entries.made_by_index) for each in here if each is not None)
        if entries > self._limits.described_entries_max:
            raise InvalidArgument(
                f"at most {self._limits.described_entries_max} entries get a punctuation in a request: name fewer"
                " streamlets",
                limit=self._limits.described_entries_max,
            )

    def _indexes(self, stream_id: int, streamlet_id: int, timestamp_us: int) -> list[int]:
        stream, streamlet = self._owned(stream_id, streamlet_id)
        streamlet.check_time(timestamp_us, "a punctuation")  # also if no entry gets one
        return [entry.index for entry in _written(stream, streamlet.streamlet_id)]

    def _owned(self, stream_id: int, streamlet_id: int) -> tuple[Stream, Streamlet]:
        stream = self._streams.get(stream_id)
        streamlet = stream.streamlet(streamlet_id)
        if not streamlet.takes_chunks:
            raise stream.not_owner(streamlet_id)
        return stream, streamlet

    async def _punctuate(
        self,
        write: PendingWrite,
        request: broker_pb2.PunctuateRequest,
        streamlet_id: int,
        index: int,
        until_s: float,
    ) -> bool:
        """Append a punctuation once there is room for it; return whether the entry needed one."""
        while True:
            self._room.clear()
            stream, streamlet = self._owned(request.stream_id, streamlet_id)
            streamlet.check_time(request.timestamp_us, "a punctuation")
            entry = streamlet.entries[index]
            if entry.unsure is not None:  # its last data, and the times in it, may be lost
                raise still_unsure(entry)
            try:
                return self._writer.punctuate(write, stream, streamlet, entry, request.timestamp_us)
            except ArenaFull as error:
                if "domain" in error.attributes:  # waiting does not help
                    raise
                if self._writer.made_room(write):
                    continue
                try:
                    async with asyncio.timeout_at(until_s):
                        await self._room.wait()
                except TimeoutError:
                    raise error from None


def _written(stream: Stream, streamlet_id: int) -> Iterator[Entry]:
    """Yield the entries that were ever written to, at this broker or an earlier owner."""
    for entry in stream.streamlets[streamlet_id].entries.made:
        if entry.next_record or watermark_of(entry) != NO_TIME:
            yield entry
