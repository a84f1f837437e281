"""Serves methods over gRPC, the open interface: any language's client works, from ``proto/kera/v1``.

Unary methods are unary; bulk methods are long-lived bidirectional streams whose responses carry the ``request_id`` of
their request. The server also has the health and reflection services. The size of answers that clients do not read is
bounded (``grpc_untaken``): an answer counts from when it is given to gRPC until gRPC has passed it on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # an extension without stubs
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kera.core.access.identity import not_authenticated
from kera.core.base.address import join_address
from kera.core.base.freed_memory import keep_freed_memory
from kera.core.base.telemetry import get_logger
from kera.core.base.turns import SLICE_S, Turns
from kera.core.errors import (
    InternalError,
    KeraError,
    PortTaken,
    ProtocolError,
    RecordTooLarge,
    Unavailable,
)
from kera.core.rpc import grpc_unknown
from kera.core.rpc.connections import CONNECTIONS_MAX_DEFAULT
from kera.core.rpc.grpc_options import (
    AUTHORIZATION,
    BEARER,
    CALLS_MAX,
    CONNECTION_CALLS_MAX_DEFAULT,
    ERROR_METADATA,
    HANDSHAKE_MS,
    server_options,
)
from kera.core.rpc.grpc_others import OthersBehind
from kera.core.rpc.grpc_room import Room
from kera.core.rpc.grpc_strangers import closing, request_of
from kera.core.rpc.grpc_untaken import UNTAKEN_LIMITS, Untaken, UntakenLimits
from kera.core.rpc.handling import checked_reply, deferred_reply, error_reply, given_up, run_handler
from kera.core.rpc.holds import Holds
from kera.core.rpc.limits import (
    BULK_BYTES_MAX,
    REQUESTS_IN_FLIGHT_MAX,
    SEND_BUFFER_BYTES_MAX,
    check_request,
    check_size,
    head_bytes_max,
)
from kera.core.rpc.method import Call, Doorkeeper, Evidence, Handler, Method, Peer, Reply, Service
from kera.core.rpc.wire import parse, parse_with_bulk, serialize_with_bulk
from kera.core.security import Tls
from kera.v1 import common_pb2

log = get_logger("kera.grpc")

_NO_BULK = memoryview(b"")
_STATUS_TEXT_CHARS_MAX = 256
"""The status text repeats the error's text for clients that do not read our metadata, and shares their limit."""

_ENDING: set[asyncio.Task[None]] = set()
"""Tasks that end calls, kept here because a loop does not keep its tasks."""

_STATUS = {
    "authentication_failed": grpc.StatusCode.UNAUTHENTICATED,
    "not_allowed": grpc.StatusCode.PERMISSION_DENIED,
    "quota_exceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "too_many_requests": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unknown_stream": grpc.StatusCode.NOT_FOUND,
    "unknown_group": grpc.StatusCode.NOT_FOUND,
    "stream_exists": grpc.StatusCode.ALREADY_EXISTS,
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "streamlet_out_of_range": grpc.StatusCode.OUT_OF_RANGE,
    "not_owner": grpc.StatusCode.FAILED_PRECONDITION,
    "stale_epoch": grpc.StatusCode.FAILED_PRECONDITION,
    "arena_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
}


class GrpcServer:
    """One gRPC server for any number of services."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        bulk_bytes_max: int = BULK_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX_DEFAULT,
        connection_calls_max: int = CONNECTION_CALLS_MAX_DEFAULT,
        handshake_ms: int = HANDSHAKE_MS,
        untaken: UntakenLimits = UNTAKEN_LIMITS,
        tls: Tls | None = None,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        """`tls`: encrypts connections; `doorkeeper`: finds out who calls."""
        self._tls = tls
        self._connections_max = connections_max
        self._room: Room | None = None
        # If certificates are required, TLS itself stops a peer without one.
        asks = doorkeeper is not None and (tls is None or tls.files.client_auth != "required")
        options = server_options(bulk_bytes_max, connections_max, connection_calls_max, handshake_ms, asks=asks)
        self.turns = Turns()
        self._server = grpc_unknown.server(options, CALLS_MAX)
        names = []
        self.untaken = Untaken(untaken)
        behind = None if doorkeeper is None else _Behind(doorkeeper)
        for service in services:
            by_name: dict[str, dict[str, Any]] = {}
            for method, handler in service.items():
                by_name.setdefault(method.service, {})[method.name] = _rpc_handler(
                    method, handler, bulk_bytes_max, self.untaken, self.turns, behind
                )
            for name, handlers in by_name.items():
                self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
                self._server.add_registered_method_handlers(name, handlers)
                names.append(name)
        self._health = health.aio.HealthServicer()
        others: Any = self._server if behind is None else OthersBehind(self._server, behind.admit)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, others)
        names.append(health.SERVICE_NAME)
        described = reflection.aio.ReflectionServicer((*names, reflection.SERVICE_NAME))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(described, others)  # type: ignore[no-untyped-call]
        self._names = names

    async def listen(self, host: str, port: int) -> int:
        """Serve on `host`:`port` (0: any free one); returns the port. Raises `PortTaken`."""
        try:
            if self._tls is not None:
                bound = self._server.add_secure_port(join_address(host, port), self._tls.server_credentials())
            else:
                bound = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            raise PortTaken(
                f"gRPC: cannot listen on {join_address(host, port)}: the address is in use or not ours;"
                " choose another port",
                host=host,
                port=port,
            ) from error
        await self._server.start()
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._room = Room(int(bound), self._connections_max, encrypted=self._tls is not None)
        return int(bound)

    async def close(self, grace_s: float = 0.5) -> None:
        """Stop accepting, give calls in progress `grace_s` seconds, then end them. It closes even if a step fails."""
        async with contextlib.AsyncExitStack() as steps:  # runs them in reverse order, even if one fails
            steps.push_async_callback(self._server.stop, grace_s)
            steps.push_async_callback(self._health.enter_graceful_shutdown)
            if self._room is not None:
                steps.push_async_callback(self._room.close)


def _rpc_handler(
    method: Method[Any, Any],
    handler: Handler,
    bulk_bytes_max: int,
    untaken: Untaken,
    turns: Turns,
    behind: _Behind | None,
) -> Any:
    """Return gRPC's handler of a method. Messages stay bytes until our code parses them: gRPC would only log errors."""
    if method.bulk:

        async def serve_stream(requests: AsyncIterator[bytes], context: Any) -> None:
            if not await _begin(context):
                return
            stream = _Stream(method, handler, context, bulk_bytes_max, untaken, turns)
            if behind is not None:
                await behind.meet(stream.peer, context, method)
            await stream.serve(requests)

        return grpc.stream_stream_rpc_method_handler(serve_stream)

    async def serve_call(received: Any, context: Any) -> bytes:
        peer, unnamed = Peer("grpc", context.peer(), lasts=False), grpc.StatusCode.UNKNOWN
        try:
            data = received if behind is None else await behind.request(peer, context, method, received)
            await turns.turn(peer.address)  # of simultaneous calls, one is begun in each round of the loop
            unnamed = grpc.StatusCode.INVALID_ARGUMENT  # an invalid request is its caller's fault
            check_request(method, len(data), 0, bulk_bytes_max)  # before it is parsed
            message = parse(method.request, data)
            unnamed = grpc.StatusCode.UNKNOWN
            result = handler(Call(message, _NO_BULK, peer))
            if isinstance(result, Reply):
                reply = result
            else:
                reply = await _deferred(result)
                await turns.turn(peer.address)  # serializing a large answer takes long, and many may be ready at once
            answer: bytes = reply.message.SerializeToString()  # once, as computing its size takes as long
            check_size(method, len(answer), sum([memoryview(piece).nbytes for piece in reply.bulk]), bulk_bytes_max)
            hold = untaken.admit(peer.address, len(answer))
            _when_over(hold.release)
            return answer
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is answered
            return await _abort(context, error_reply(error, method), unnamed)
        finally:
            peer.closed()

    if behind is not None:  # a caller sees no difference, but here no message is received yet when it begins
        return grpc.stream_unary_rpc_method_handler(serve_call)
    return grpc.unary_unary_rpc_method_handler(serve_call)


class _Behind:
    """Applies a doorkeeper to calls, before the server receives any message of them."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper

    def find_out(self, peer: Peer, context: Any) -> None:
        """Find out the identity of a call's peer. Raises the doorkeeper's errors."""
        peer.end = _ending(context)
        self._doorkeeper.admit(peer, _evidence(context))

    async def request(
        self, peer: Peer, context: Any, method: Method[Any, Any], requests: AsyncIterator[bytes]
    ) -> bytes:
        """Return the request of a unary call. Raises the doorkeeper's errors, and `AuthenticationFailed`."""
        self.find_out(peer, context)
        return await request_of(peer, method, context, requests)

    async def meet(self, peer: Peer, context: Any, method: Method[Any, Any] | None) -> None:
        """Find out the peer of a stream, and end the stream if the peer is not authenticated."""
        try:
            self.find_out(peer, context)
            if peer.identity is None:
                raise not_authenticated()
        except KeraError as error:
            await _abort(context, error_reply(error, method))

    async def admit(self, context: Any) -> None:
        """Do the same for a stream of one of gRPC's own services."""
        await _begin(context)
        peer = Peer("grpc", context.peer(), lasts=False)
        _when_over(peer.closed)
        await self.meet(peer, context, None)


async def _begin(context: Any) -> bool:
    """Send the initial metadata of a stream's answers; False if the caller is gone.

    By default gRPC sends them with the first answer, and once more with a status that is sent at the same time. It then
    rejects the status, so the caller is not informed that the stream has ended, and waits. Call this before anything
    that can write to the stream or end it.
    """
    try:
        await context.send_initial_metadata(())
    except cygrpc.ExecuteBatchError:
        return False
    return True


def _when_over(then: Callable[[], object]) -> None:
    """Call `then` when the call that is being served has ended.

    ``context.add_done_callback`` would do the same, but make a cycle of the call and all its objects, which only the
    garbage collector would free.
    """
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(lambda _: then())


def _ending(context: Any) -> Callable[[], None]:
    """Return a function that ends the call that is being served: it sends the caller a status, then cancels the task.

    Without this status the caller would not notice the end.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    async def end() -> None:
        with contextlib.suppress(Exception):  # it always raises, errors of various kinds
            await context.abort(grpc.StatusCode.ABORTED, "your rights have changed")
        if task is not None:
            task.cancel()

    def begin() -> None:
        ending = loop.create_task(end())
        _ENDING.add(ending)
        ending.add_done_callback(_ENDING.discard)

    return begin


def _evidence(context: Any) -> Evidence:
    """Return the evidence of a caller's identity that gRPC has."""
    token = next((value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION), "")
    shown = context.auth_context().get("x509_pem_cert")
    text = token.removeprefix(BEARER) if isinstance(token, str) else ""
    return Evidence(certificate=shown[0] if shown else b"", token=text)


async def _deferred(result: Awaitable[Reply[Any]]) -> Reply[Any]:
    """Wait for the reply; if the caller gives up, so does the handler.

    A coroutine runs in the task of its call, and at once: in a separate task it would have to wait for the loop.
    """
    try:
        reply = await result
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise given_up() from None
    return checked_reply(reply)


async def _abort(context: Any, error: common_pb2.Error, unnamed: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> NoReturn:
    """End a call with `error`; `unnamed`: the status of an error that `_STATUS` does not have."""
    metadata = ((ERROR_METADATA, error.SerializeToString()),)
    try:
        await context.abort(_STATUS.get(error.code, unnamed), error.message[:_STATUS_TEXT_CHARS_MAX], metadata)
    except grpc.aio.AbortError as aborted:  # gRPC's call refers to it, and its traceback to gRPC's call
        _when_over(partial(aborted.with_traceback, None))
        raise
    raise InternalError("gRPC went on after an abort")  # it raises; the type checker cannot know


def _check(method: Method[Any, Any], reply: Reply[Any], bulk_bytes_max: int) -> int:
    """Return the size of `reply` in bytes. Raises an error if it cannot be sent."""
    head_bytes: int = reply.message.ByteSize()
    bulk_bytes = sum([memoryview(piece).nbytes for piece in reply.bulk])
    check_size(method, head_bytes, bulk_bytes, bulk_bytes_max)
    return head_bytes + bulk_bytes


class _Stream:
    """One bulk stream: the same order, limits and answers as a framed connection.

    Handlers run in the order of their requests; replies are sent by one task, as gRPC takes one write at a time.
    """

    def __init__(
        self,
        method: Method[Any, Any],
        handler: Handler,
        context: Any,
        bulk_bytes_max: int,
        untaken: Untaken,
        turns: Turns,
    ) -> None:
        keep_freed_memory()
        self._method = method
        self._handler = handler
        self._context = context
        self._bulk_bytes_max = bulk_bytes_max
        self._head_bytes_max = head_bytes_max(method, bulk_bytes_max)
        self._untaken = untaken
        self._turns = turns
        self._waiting: set[asyncio.Future[Reply[Any]]] = set()
        self._replies: asyncio.Queue[tuple[Reply[Any], int]] = asyncio.Queue()  # with their bytes; bounded by `_full`
        self._unsent = 0  # replies that gRPC has not taken yet, and their bytes
        self._unsent_bytes = 0
        self._changed = asyncio.Event()  # `_waiting` or `_unsent` has shrunk, or all holds are released
        self._holds = Holds(lambda: None, self._changed.set)
        self.peer = Peer("grpc", context.peer(), hold=self._holds.hold, release=self._holds.release)
        self._done = False

    async def serve(self, requests: AsyncIterator[bytes]) -> None:
        """Answer `requests` until the client ends the stream or is gone."""
        sending = asyncio.ensure_future(self._send())
        try:
            async with closing(requests) as received:
                async for data in received:
                    begun_s = perf_counter()
                    try:
                        message, bulk = parse_with_bulk(self._method.request, data, self._head_bytes_max)
                    except (
                        ProtocolError,
                        RecordTooLarge,
                    ) as error:  # its request id is unknown, so the stream ends
                        await _abort(self._context, error_reply(error, self._method))
                    if self.peer.dismissed:
                        continue  # unanswered: the abort is on its way, and the client may have newer credentials
                    self._handle(message, bulk)
                    if perf_counter() - begun_s > SLICE_S:
                        await self._turns.turn(self.peer.address)  # others come before the next request
                    await self._until(lambda: not self._full)
            await self._until(lambda: not self._waiting and not self._unsent)
        finally:
            self._done = True
            sending.cancel()
            for future in self._waiting:
                future.cancel()
            self.peer.closed()

    def _handle(self, message: Any, bulk: memoryview) -> None:
        request_id = message.request_id
        try:
            result = run_handler(self._handler, Call(message, bulk, self.peer))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is answered
            self._answer_error(request_id, error)
            return
        if isinstance(result, Reply):
            self._answer(request_id, result)
            return
        self._waiting.add(result)
        result.add_done_callback(partial(self._finished, request_id))

    def _finished(self, request_id: int, future: asyncio.Future[Reply[Any]]) -> None:
        self._waiting.discard(future)
        self._changed.set()
        unanswered = self._done or self.peer.dismissed  # dismissed: as in `serve`
        try:
            reply = deferred_reply(future)
        except Exception as error:  # noqa: BLE001 - as above
            if not unanswered:
                self._answer_error(request_id, error)
        else:
            if not unanswered:
                self._answer(request_id, reply)

    def _answer(self, request_id: int, reply: Reply[Any]) -> None:
        if self._done:
            return
        try:
            reply.message.request_id = request_id
            reply_bytes = _check(self._method, reply, self._bulk_bytes_max)
        except Exception as error:  # noqa: BLE001 - it is too large, or the handler's result cannot be sent
            self._answer_error(request_id, error)
            return
        self._enqueue(reply, reply_bytes)

    def _answer_error(self, request_id: int, error: BaseException) -> None:
        answer = self._method.response(request_id=request_id, error=error_reply(error, self._method))
        self._enqueue(Reply(answer), answer.ByteSize())

    def _enqueue(self, reply: Reply[Any], reply_bytes: int) -> None:
        self._unsent += 1
        self._unsent_bytes += reply_bytes
        self._replies.put_nowait((reply, reply_bytes))

    async def _send(self) -> None:
        try:
            while True:
                reply, reply_bytes = await self._replies.get()
                try:
                    hold = self._untaken.admit(self.peer.address, reply_bytes)
                except Unavailable as error:
                    request_id = reply.message.request_id
                    reply = Reply(self._method.response(request_id=request_id, error=error_reply(error, self._method)))
                    hold = self._untaken.admit(self.peer.address, 0)
                try:
                    data = serialize_with_bulk(reply.message, reply.bulk)  # only now, so that only one copy exists
                    del reply  # drops the references to the handler's memory
                    await self._context.write(data)
                    del data
                finally:
                    hold.release()
                self._unsent -= 1
                self._unsent_bytes -= reply_bytes
                self._changed.set()
        except Exception as error:  # noqa: BLE001 - gRPC raises errors of various kinds
            log.debug("client is gone", method=self._method.name, error=repr(error))
            self._done = True
            self._changed.set()

    @property
    def _full(self) -> bool:
        """Whether no further request may be taken."""
        return (
            bool(self._holds)
            or len(self._waiting) >= REQUESTS_IN_FLIGHT_MAX
            or self._unsent_bytes > SEND_BUFFER_BYTES_MAX
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not (condition() or self._done):
            self._changed.clear()
            await self._changed.wait()
