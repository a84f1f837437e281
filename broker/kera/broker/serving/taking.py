"""Write requests that the native core carries out directly in a buffer; Python handles everything else.

`append` lets the native core append the next chunks of a request, as long as each is the next chunk of a known
producer. `take` lets it carry out whole requests in a connection's buffer (``kera.core.rpc.taking``): a request whose
chunks all go to one segment, together with the similar requests that follow it. Both do what
``kera.broker.serving.write`` does in Python; that module is the reference.

Answers that wait for backups are held here, together for all requests of a connection whose chunks form one run.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

from kera.broker.counters import Counters, Latencies
from kera.broker.ownership.stream import Stream
from kera.broker.records import ProducerRecord
from kera.broker.replication.virtual_segment import Batch
from kera.broker.serving.carrying import Carrying
from kera.broker.serving.pending_write import PendingWrite
from kera.broker.serving.write_access import AppendRules, WriteAccess
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, NotReplicated
from kera.core.native import native
from kera.core.rpc import api
from kera.core.rpc.frames import FrameKind, encode_error, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX, REQUEST_CHUNKS_MAX
from kera.core.rpc.taking import NOTHING, Asker, Taken
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2

log = get_logger("kera.broker")

_HELD = struct.Struct("<QI")
"""Precedes the statuses of a request: its id, and the size of the statuses in bytes."""


class NativeWrites:
    """Appends usual chunks with the native core, and counts them."""

    def __init__(  # noqa: PLR0913 - what appending needs
        self,
        take_writes: Callable[..., Any],
        streams: dict[int, Stream],
        carrying: Carrying,
        memory: PersistenceManager,
        counters: Counters,
        latencies: Latencies,
        pump: Callable[[], None],
        *,
        run_bytes_max: int,
        check_payloads: bool,
        as_usual: Callable[[], bool],
        access: WriteAccess | None,
    ) -> None:
        """`take_writes`: the native core's function; `pump`: starts the requests to backups that are due.

        `as_usual`: returns False while other requests wait for room, or the broker is fenced. `access`: the rights to
        write; None: everybody may write to all streams.
        """
        self._take_writes = take_writes
        self._memory = memory
        self._counters = counters
        self._latencies = latencies
        self._pump_replication = pump
        self._as_usual = as_usual
        self._access = access
        self._rules = AppendRules(
            streams=streams,
            gate=carrying.gate,
            replicate=carrying.replicate,
            record_type=ProducerRecord,
            run_bytes_max=run_bytes_max,
            check_payloads=check_payloads,
        )

    def append(self, write: PendingWrite) -> None:
        """Append the next chunks of a request, up to one that needs to be handled in Python."""
        memory, at, most = self._memory, write.at, REQUEST_CHUNKS_MAX - len(write.statuses)
        rules = self._rules if self._access is None else self._access.rules_for(write.peer, self._rules)
        end, _, _, statuses, chunks, records, size = self._take_writes(
            rules, write, write.bulk[at:], write.level, 0, most, memory.now_ms, memory.now_us
        )
        if chunks:
            write.at = at + end
            write.response.MergeFromString(statuses)
            self._count(chunks, records, size)

    def take(self, asker: Asker, frames: memoryview, requests_max: int) -> Taken:
        """Carry out requests, see `kera.core.rpc.taking.Taker`.

        Before the registration no stream is open, so no request is taken.
        """
        if not self._as_usual():
            return NOTHING
        taking, memory = Taking(asker, self._latencies), self._memory
        rules = self._rules if self._access is None else self._access.rules_for(asker.peer, self._rules)
        try:
            end, requests, held, answers, chunks, records, size = self._take_writes(
                rules, taking, frames, None, asker.bulk_bytes_max, requests_max, memory.now_ms, memory.now_us
            )
        finally:
            if taking.pump:
                self._pump_replication()
        if requests > held:
            self._latencies.appends.observe(perf_counter() - taking.begun_s, requests - held)
        self._counters.write_requests += requests
        self._count(chunks, records, size)
        return Taken(end, requests, held, answers, size)

    def _count(self, chunks: int, records: int, size: int) -> None:
        counters = self._counters
        counters.chunks_appended += chunks
        counters.records_appended += records
        counters.bytes_appended += size


class Taking:
    """The requests of a connection that one call takes."""

    __slots__ = ("_asker", "_latencies", "begun_s", "pump")

    def __init__(self, asker: Asker, latencies: Latencies) -> None:
        self._asker = asker
        self._latencies = latencies
        self.begun_s = perf_counter()
        self.pump = False

    def wait_for(self, batch: Batch, held: bytes, requests: int) -> int:
        """Hold the answers to `requests` requests, with these statuses, until backups have a batch."""
        batch.waiters.append(partial(self._answer, batch, held, requests))
        return requests

    def _answer(self, batch: Batch, held: bytes, requests: int, error: KeraError | None) -> None:
        """Answer `requests` requests: backups have their chunks, or there is an error."""
        self._asker.answer(_answers(batch, held, requests, error), requests)
        self._latencies.appends_waited.observe(perf_counter() - self.begun_s, requests)


def _answers(batch: Batch, held: bytes, requests: int, error: KeraError | None) -> bytes:
    """Return the frames of answers that were held for a batch."""
    place = batch.place
    try:
        if native is None or not batch.completed or place is None:
            return refused_answers(held, error or NotReplicated("the chunk could not be replicated"))
        answers: bytes = native.held_answers(held, place.virtual_segment_id, place.backups)
    except Exception as failure:  # it must not affect other requests that wait for the batch
        log.exception("answers cannot be made", requests=requests)
        message = error_to_message(failure)
        ids = [request_id for request_id, _ in _held(held)]
        return b"".join(encode_error(api.MULTI_WRITE_CHUNKS.number, request_id, message) for request_id in ids)
    return answers


def refused_answers(held: bytes, error: KeraError) -> bytes:
    """Return the frames of held answers, with the same error for each chunk."""
    message = error_to_message(error)
    frames = []
    for request_id, statuses in _held(held):
        response = broker_pb2.MultiWriteChunksResponse.FromString(statuses)
        for status in response.statuses:
            status.Clear()
            status.error.CopyFrom(message)
        frames += encode_frame(FrameKind.REPLY, api.MULTI_WRITE_CHUNKS, request_id, response, (), BULK_BYTES_MAX)
    return b"".join(frames)


def _held(held: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the id of each request and the statuses of its answer."""
    at = 0
    while at < len(held):
        request_id, size = _HELD.unpack_from(held, at)
        at += _HELD.size
        yield request_id, held[at : at + size]
        at += size
