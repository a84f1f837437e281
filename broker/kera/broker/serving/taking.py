"""Requests to write that the native core carries out as they lie in a connection's buffer (``kera.core.rpc.taking``).

It takes a request whose chunks all go to one segment, each the next one of a producer that is known, and those behind
it of the same kind with it. What is decided of chunks is as in ``kera.broker.serving.write``, on whose way everything
else goes. Answers that wait for backups are held here: as one, for all requests whose chunks are one run.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from kera.broker.counters import Counters, Latencies
from kera.broker.log.segment import Segment
from kera.broker.ownership.stream import Stream
from kera.broker.replication.virtual_log import VirtualLog
from kera.broker.replication.virtual_logs import VirtualLogs
from kera.broker.replication.virtual_segment import Batch
from kera.broker.serving.write_access import AppendRules, WriteAccess
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, NotReplicated
from kera.core.native import native
from kera.core.rpc import api
from kera.core.rpc.frames import Kind, encode_error, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.taking import NOTHING, Asker, Taken
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2

log = get_logger("kera.broker")

_PERSISTED = common_pb2.DURABILITY_PERSISTED
_HELD = struct.Struct("<QI")
"""Before the statuses of a request: its id, and how many bytes they are."""


class Taking:
    """A call of the core."""

    __slots__ = ("asker", "begun_s", "pump")

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self.begun_s = perf_counter()
        self.pump = False
        """Replication may have something to do."""


class WriteTaker:
    """Carries out requests to write for the service."""

    def __init__(
        self,
        rules: AppendRules,
        logs: VirtualLogs,
        memory: PersistenceManager,
        counters: Counters,
        latencies: Latencies,
        pump: Callable[[], None],
        as_usual: Callable[[], bool],
        access: WriteAccess | None = None,
    ) -> None:
        """`rules`: those of `append_chunks`; `as_usual`: whether no request has to wait or be refused for others.

        `access`: who may write to which streams; None: everybody to all.
        """
        self._access = access
        self._rules = rules._replace(replicate=self._hold)
        self._logs = logs
        self._memory = memory
        self._counters = counters
        self._latencies = latencies
        self._pump_replication = pump
        self._as_usual = as_usual
        self._take_writes = native.take_writes if native is not None else None

    def take(self, asker: Asker, frames: memoryview, requests_max: int) -> Taken:
        """See `kera.core.rpc.taking.Taker`. Before the registration no stream is open, and so nothing is taken."""
        if self._take_writes is None or not self._as_usual():
            return NOTHING
        taking, memory, rules = Taking(asker), self._memory, self._rules
        if self._access is not None:
            rules = self._access.rules_for(asker.peer, rules)
        try:
            end, requests, held, answers, chunks, records, size = self._take_writes(
                rules, taking, frames, asker.bulk_bytes_max, requests_max, memory.now_ms, memory.now_us
            )
        finally:
            if taking.pump:
                self._pump_replication()
        counters = self._counters
        if requests > held:
            self._latencies.appends.observe(perf_counter() - taking.begun_s, requests - held)
        counters.write_requests += requests
        counters.chunks_appended += chunks
        counters.records_appended += records
        counters.bytes_appended += size
        return Taken(end, requests, held, answers, size)

    def _hold(  # noqa: PLR0913, PLR0917 - what a run of chunks is
        self,
        taking: Taking,
        stream: Stream,
        log: VirtualLog,
        segment: Segment,
        start: int,
        end: int,
        held: bytes,
        requests: int,
        level: int,
    ) -> None:
        """Refer to chunks that follow each other in a virtual log, and hold the answers to their requests."""
        batch = self._logs.append(log, segment, start, end, persist=_PERSISTED in (level, stream.durability))
        if requests:
            batch.waiters.append(partial(self._answer, taking, batch, held, requests))
            self._logs.held.waits(batch, segment, start, requests)

    def _answer(self, taking: Taking, batch: Batch, held: bytes, requests: int, error: KeraError | None) -> None:
        """Backups have the chunks of so many requests, or there is an error."""
        _answer(taking.asker, batch, held, requests, error)
        self._latencies.appends_waited.observe(perf_counter() - taking.begun_s, requests)


def _answer(asker: Asker, batch: Batch, held: bytes, requests: int, error: KeraError | None) -> None:
    place = batch.place
    try:
        if native is None or not batch.completed or place is None:
            answers = refused_answers(held, error or NotReplicated("the chunk could not be replicated"))
        else:
            answers = native.held_answers(held, place.virtual_segment_id, place.backups)
    except Exception as failure:  # the others that wait for the batch have nothing to do with it
        log.exception("answers cannot be made", requests=requests)
        message = error_to_message(failure)
        ids = [request_id for request_id, _ in _held(held)]
        answers = b"".join(encode_error(api.MULTI_WRITE_CHUNKS.number, request_id, message) for request_id in ids)
    asker.answer(answers, requests)


def refused_answers(held: bytes, error: KeraError) -> bytes:
    """The frames of answers that were held, when all chunks that they are about have the same error."""
    message = error_to_message(error)
    frames = []
    for request_id, statuses in _held(held):
        response = broker_pb2.MultiWriteChunksResponse.FromString(statuses)
        for status in response.statuses:
            status.Clear()
            status.error.CopyFrom(message)
        frames += encode_frame(Kind.REPLY, api.MULTI_WRITE_CHUNKS, request_id, response, (), BULK_BYTES_MAX)
    return b"".join(frames)


def _held(held: bytes) -> Iterator[tuple[int, bytes]]:
    """The id of each request and the statuses of its answer."""
    at = 0
    while at < len(held):
        request_id, size = _HELD.unpack_from(held, at)
        at += _HELD.size
        yield request_id, held[at : at + size]
        at += size
