"""The backup's remote operations, for any transport.

`BackupService.replicate` is the hot path: without `persist` it answers at once, in the call. Each request takes effect
within its call, so that requests of one connection are carried out in order, even if they are answered later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from kera.backup.answers import Answers, HeldAnswer
from kera.backup.disks import disk_error
from kera.backup.engine import Engine
from kera.backup.metrics import RequestCounters
from kera.backup.reading import Streamlets, Walk
from kera.backup.replica import Replica
from kera.core.base.done import Done
from kera.core.errors import InvalidArgument, KeraError, Unavailable
from kera.core.native import native
from kera.core.rpc import Answer, Call, Reply, Service, api
from kera.core.rpc.method import Handler, Method, ResponseT
from kera.core.rpc.taking import NOTHING, Asker, Taken, Taker
from kera.v1 import backup_pb2

LIST_REPLICAS_MAX = 10_000
"""Maximum in one answer, which takes less than a megabyte."""

FREED_MAX = 8192
"""Maximum of virtual segments whose replicas one request frees."""


class BackupService:
    """All handlers of one backup; `service()` gives them to the transports."""

    def __init__(self, engine: Engine, counters: RequestCounters, *, read_bytes_max: int) -> None:
        """`read_bytes_max`: maximum of chunks in a response."""
        self._engine = engine
        self._store = engine.store
        self._counters = counters
        self._read_bytes_max = read_bytes_max
        self._loop = asyncio.get_running_loop()
        self.answers = Answers()
        self._ready = False
        self._take_replicas = native.take_replicas if native is not None else None

    def registered(self) -> None:
        """Accept requests from now on, as the coordinator has assigned an id to this backup."""
        self._ready = True

    def service(self) -> Service:
        """Return the handlers by method."""
        return {
            api.REPLICATE: self._checked(self.replicate),
            api.READ_REPLICA: self._checked(self.read_replica),
            api.LIST_REPLICAS: self._checked(self.list_replicas),
            api.FREE_REPLICAS: self._checked(self.free_replicas),
            api.FENCE_BROKER: self._checked(self.fence_broker),
        }

    def takers(self) -> Mapping[Method[Any, Any], Taker]:
        """Return the takers of methods with many small requests, for connections of frames."""
        return {api.REPLICATE: self.take_replicas}

    def _checked(self, handler: Handler) -> Handler:
        """Return a handler that refuses requests before the registration, and counts refused requests."""

        def checked(call: Call[Any]) -> Reply[Any] | Awaitable[Reply[Any]]:
            if not self._ready:
                raise Unavailable("the backup is starting; try again")
            try:
                result = handler(call)
            except KeraError as error:
                self._counters.refuse(error)
                raise
            if isinstance(result, asyncio.Future):
                result.add_done_callback(self._count_failed)
            return result

        return checked

    def _count_failed(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and isinstance(error := future.exception(), KeraError):
            self._counters.refuse(error)

    # -- from brokers ------------------------------------------------------------------------------------------

    def replicate(
        self, call: Call[backup_pb2.ReplicateRequest]
    ) -> Reply[backup_pb2.ReplicateResponse] | Awaitable[Reply[backup_pb2.ReplicateResponse]]:
        """Append chunks to a replica, or open or close it: all of the request, or nothing."""
        request = call.message
        self._counters.replicate_requests += 1
        replica = self._store.append(request, call.bulk)
        if replica is None:
            return Reply(backup_pb2.ReplicateResponse())
        length = replica.length
        if not request.persist or replica.durable_length >= length:
            return Reply(_response(replica, length))
        kept = replica
        future: Answer[Reply[backup_pb2.ReplicateResponse]] = Answer(loop=self._loop)
        self._store.persistence.wait(kept, length, _resolving(future, lambda: Reply(_response(kept, length))))
        return future

    def take_replicas(self, asker: Asker, frames: memoryview, requests_max: int) -> Taken:
        """See `kera.core.rpc.taking.Taker`: takes requests that append to open replicas without waiting for a disk."""
        if self._take_replicas is None or not self._ready:
            return NOTHING
        store = self._store
        end, requests, answers, chunks, size = self._take_replicas(
            store.epochs, store.replicas.by_broker, frames, asker.bulk_bytes_max, requests_max
        )
        self._counters.replicate_requests += requests
        totals = store.persistence.totals
        totals.chunks_appended += chunks
        totals.bytes_appended += size
        return Taken(end, requests, 0, answers)

    def free_replicas(
        self, call: Call[backup_pb2.FreeReplicasRequest]
    ) -> Awaitable[Reply[backup_pb2.FreeReplicasResponse]]:
        """Delete replicas; answered when they cannot reappear after a crash."""
        request = call.message
        if len(request.virtual_segment_ids) > FREED_MAX:
            raise InvalidArgument(f"at most {FREED_MAX} virtual segments in a request", limit=FREED_MAX)
        if request.virtual_segment_ids:  # from a broker; replicas of fenced launches are freed by others
            self._store.see_epoch(request.broker_id, request.broker_epoch)
        ids = [*request.virtual_segment_ids, *self._store.fenced(request.broker_id, request.before_epoch)]
        future: asyncio.Future[Reply[backup_pb2.FreeReplicasResponse]] = self._loop.create_future()
        reply = Reply(backup_pb2.FreeReplicasResponse())
        self._store.free(request.broker_id, ids, _resolving(future, lambda: reply))
        return future

    def fence_broker(
        self, call: Call[backup_pb2.FenceBrokerRequest]
    ) -> Awaitable[Reply[backup_pb2.FenceBrokerResponse]]:
        """Refuse older launches of a broker from now on; answered when the fence is stored."""
        broker_id, broker_epoch = call.message.broker_id, call.message.broker_epoch
        self._store.see_epoch(broker_id, broker_epoch)

        async def fence() -> Reply[backup_pb2.FenceBrokerResponse]:
            await self._engine.remember_fence(broker_id, broker_epoch)
            return Reply(backup_pb2.FenceBrokerResponse())

        return asyncio.ensure_future(fence())

    # -- for recovery ------------------------------------------------------------------------------------------

    def list_replicas(self, call: Call[backup_pb2.ListReplicasRequest]) -> Reply[backup_pb2.ListReplicasResponse]:
        """List the replicas of a broker."""
        request = call.message
        count_max = min(request.replicas_max or LIST_REPLICAS_MAX, LIST_REPLICAS_MAX)
        replicas, complete = self._store.replicas.after(request.broker_id, request.after_virtual_segment_id, count_max)
        return Reply(
            backup_pb2.ListReplicasResponse(
                replicas=[replica.info() for replica in replicas],
                complete=complete,
                headers_damaged=self._engine.found.headers_damaged,
            )
        )

    def read_replica(
        self, call: Call[backup_pb2.ReadReplicaRequest]
    ) -> Awaitable[Reply[backup_pb2.ReadReplicaResponse]]:
        """Return whole chunks of a replica, filtered; damaged chunks are left out."""
        request = call.message
        replica = self._store.replicas.get(request.broker_id, request.virtual_segment_id)
        if request.offset > replica.length:
            raise InvalidArgument(
                f"{replica} has {replica.length} bytes, and cannot be read from {request.offset}",
                length=replica.length,
                offset=request.offset,
            )
        bytes_max = min(request.bytes_max or self._read_bytes_max, self._read_bytes_max)
        wanted = _streamlets(request)
        answer = self.answers.admit(call.peer, min(bytes_max, replica.length - request.offset))
        try:
            reading = self._engine.reader.read(
                replica, request.offset, bytes_max, wanted, headers_only=request.headers_only
            )
        except BaseException:
            answer.give_up()
            raise
        reply = asyncio.ensure_future(self._read(replica, reading, answer))
        reply.add_done_callback(partial(_give_up_if_empty, answer))
        return reply

    async def _read(
        self, replica: Replica, reading: Awaitable[Walk], answer: HeldAnswer
    ) -> Reply[backup_pb2.ReadReplicaResponse]:
        try:
            found = await reading
        except OSError as error:
            raise disk_error(error, self._store.persistence.disks[replica.frame.disk].name) from error
        self._counters.bytes_read += len(found.chunks)
        message = backup_pb2.ReadReplicaResponse(replica=replica.info(), next_offset=found.next_offset)
        return Reply(message, (answer.is_made(found.chunks),) if found.chunks else ())


def _give_up_if_empty(answer: HeldAnswer, reading: asyncio.Future[Reply[Any]]) -> None:
    """Release an answer without data: the connection is gone, the request was refused, or no chunks were found."""
    if reading.cancelled() or reading.exception() is not None or not reading.result().bulk:
        answer.give_up()


def _resolving(future: asyncio.Future[Reply[ResponseT]], reply: Callable[[], Reply[ResponseT]]) -> Done:
    """Return a callback that resolves `future` with a reply, unless it is done because the connection is gone."""

    def done(error: KeraError | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(type(error)(error.message, **error.attributes))  # several may wait for one error
        else:
            future.set_result(reply())

    return done


def _response(replica: Replica, length: int) -> backup_pb2.ReplicateResponse:
    return backup_pb2.ReplicateResponse(length=length, durable_length=replica.durable_length)


def _streamlets(request: backup_pb2.ReadReplicaRequest) -> Streamlets:
    wanted: dict[int, frozenset[int]] = {}
    for item in request.streamlets:
        before = wanted.get(item.stream_id)
        everything = not item.streamlet_ids or before == frozenset()
        wanted[item.stream_id] = frozenset() if everything else (before or frozenset()) | set(item.streamlet_ids)
    return wanted
