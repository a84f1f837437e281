"""The calling end of a gRPC connection; gRPC's errors end here and become KerA's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # an extension without stubs

from kera.core.base.address import CLOSED_AT_ONCE, not_taken
from kera.core.base.closing import is_being_cancelled
from kera.core.base.freed_memory import keep_freed_memory
from kera.core.errors import InternalError, KeraError, ProtocolError, Unavailable, Uncertain
from kera.core.rpc import api, grpc_forks
from kera.core.rpc.answer import Answer
from kera.core.rpc.grpc_options import AUTHORIZATION, BEARER, ERROR_METADATA, client_options
from kera.core.rpc.grpc_strangers import beside_call
from kera.core.rpc.limits import BULK_BYTES_MAX, REQUESTS_IN_FLIGHT_MAX, check_request
from kera.core.rpc.method import REFUSALS, Introduction, Method, Reply, RequestT, ResponseT, introduce
from kera.core.rpc.wire import error_from_message, parse, parse_with_bulk, serialize_with_bulk
from kera.core.security import Tls
from kera.v1 import access_pb2, common_pb2

_NOT_SENT = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed", "empty address list")
"""The beginnings of gRPC's texts when there was no connection to send a request on; the status code is the same as for
a connection that broke. Any other text counts as a broken connection, which is the safe assumption.
"""


_NO_ADDRESS = "Failed to create channel to "
"""The beginning of gRPC's text for an invalid address."""
INTRODUCTION_S = 10.0
"""Time-out of each step of authentication."""
_Metadata = tuple[tuple[str, str | bytes], ...]


WRONG_HOST = "call host does not match SSL server name"
"""The text of gRPC if only the subject of a certificate names a host, as was once usual; it has its own status code."""
_CLOSED = ("Socket closed", "Connection reset by peer")
_VERIFICATION = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:;]+)")
_ANOTHER_HOST = not_taken("it is for another host")
_WORDS = {
    "Hostname Verification Check failed": _ANOTHER_HOST,
    "Peer name": _ANOTHER_HOST,
    WRONG_HOST: _ANOTHER_HOST,
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "missing selected ALPN": "it speaks TLS and not gRPC: that is another port, of frames or metrics",
    "NO_COMMON_SIGNATURE_ALGORITHMS": "one of the two certificates has a key of a kind that gRPC does not know; RSA"
    " will do, and EC with P-256 or P-384",
}


def reason_of_tls(details: str, tls: Tls | None) -> str:
    """Return why TLS made no connection; `details`: gRPC's text. Empty: the error is not about TLS.

    A server of gRPC that refuses a handshake closes the connection without a reason, so the caller has to look at its
    own certificate to find out.
    """
    found = _VERIFICATION.search(details)
    if found is not None:
        return not_taken(found[1])
    for words, reason in _WORDS.items():
        if words in details:
            return reason
    if not any(words in details for words in _CLOSED):
        return ""
    if tls is None:
        return CLOSED_AT_ONCE
    if tls.files.cert is None:
        return "it closes the connection at once; if it wants a certificate, set tls_cert and tls_key"
    text = f"it closes the connection at once, as if it did not take {tls.files.cert}"
    own = tls.own_refusal()
    return f"{text}: {own}" if own else f"{text}; its log says why"


class GrpcChannel:
    """A connection over gRPC; see `kera.core.rpc.Channel`. gRPC connects and reconnects automatically."""

    transport = "grpc"

    def __init__(
        self,
        address: str,
        *,
        bulk_bytes_max: int = BULK_BYTES_MAX,
        tls: Tls | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        """`tls`: encrypts the connection, which is replaced when certificates have changed.

        `introduction`: authenticates, before the first call, and again if the daemon asks for it.
        """
        self._address = address
        self._bulk_bytes_max = bulk_bytes_max
        self._tls = tls
        self._tls_version = b""
        self._loop = asyncio.get_running_loop()
        self._channel = self._open()
        self._introduction = introduction
        self._introducing: asyncio.Task[_Metadata] | None = None
        """The task that authenticates; its result is the metadata of calls."""
        self._showing: _Metadata | None = None
        """The result of that task, as soon as it is known."""
        self._streams: dict[int, _BulkStream] = {}
        self._replaced: list[tuple[grpc.aio.Channel, dict[int, _BulkStream]]] = []
        """Earlier connections whose requests are still in flight."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._unary_slots = asyncio.Semaphore(REQUESTS_IN_FLIGHT_MAX)  # gRPC would take any number
        self._closed = False

    @property
    def closed(self) -> bool:
        """See `Channel.closed`."""
        return self._closed

    def submit(
        self,
        method: Method[RequestT, ResponseT],
        message: RequestT,
        bulk: Sequence[Any] = (),
        *,
        timeout_s: float,
    ) -> Answer[Reply[ResponseT]]:
        """See `Channel.submit`."""
        future: Answer[Reply[ResponseT]] = Answer(loop=self._loop)
        try:
            if self._closed:
                raise Unavailable(f"connection to {self._address} is closed", address=self._address)
            if self._tls is not None and self._tls.version != self._tls_version:
                self._renew()
            bulk_bytes = sum([memoryview(piece).nbytes for piece in bulk])
            check_request(method, message.ByteSize(), bulk_bytes, self._bulk_bytes_max)
        except KeraError as error:
            future.set_exception(error)
            return future
        if method.bulk:
            self._stream(method).submit(message, bulk, future, timeout_s)
        else:
            self._start(self._unary(method, message.SerializeToString(), future, timeout_s))
        return future

    async def close(self) -> None:
        """See `Channel.close`."""
        self._closed = True
        connections = [(self._channel, self._streams), *self._replaced]
        for _, streams in connections:
            for stream in streams.values():
                stream.cancel()
        if self._introducing is not None:
            self._introducing.cancel()
        await asyncio.gather(*[channel.close(grace=None) for channel, _ in connections])
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open(self) -> grpc.aio.Channel:
        grpc_forks.check_process()
        options = client_options(self._bulk_bytes_max)
        if self._tls is None:
            channel = grpc.aio.insecure_channel(self._address, options=options)
        else:
            self._tls_version = self._tls.version
            channel = grpc.aio.secure_channel(self._address, self._tls.channel_credentials(), options=options)
        grpc_forks.remember(channel)
        return channel

    def _renew(self) -> None:
        """Use a new connection from now on; requests that are in flight end on the old one."""
        before = self._channel, self._streams
        self._channel, self._streams = self._open(), {}
        self._replaced.append(before)
        under_way = list(self._tasks)

        async def end() -> None:
            old, streams = before
            for stream in streams.values():
                stream.finish()
            if under_way:
                await asyncio.wait(under_way)
            await old.close(grace=None)
            self._replaced.remove(before)

        self._start(end())

    def _stream(self, method: Method[Any, Any]) -> _BulkStream:
        stream = self._streams.get(method.number)
        if stream is None or stream.done:
            stream = self._streams[method.number] = _BulkStream(
                self._channel, self._address, method, self._tls, self._shown, self._shown_anew
            )
            self._start(stream.read())
            self._start(stream.write())
        return stream

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unary(
        self,
        method: Method[Any, ResponseT],
        data: bytes,
        future: asyncio.Future[Reply[ResponseT]],
        timeout_s: float,
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._unary_slots:
                shown = await self._shown()
                try:
                    response = await self._send(method, data, shown)
                except grpc.aio.AioRpcError as error:
                    anew = await self._shown_anew(error, shown)
                    if anew is None:
                        raise
                    response = await self._send(method, data, anew)
            message = parse(method.response, response)
        except ProtocolError as error:
            _fail(future, Uncertain(f"{self._address} sent an invalid answer: {error}", address=self._address))
        except KeraError as error:
            _fail(future, error)  # authentication has failed
        except TimeoutError:
            _fail(future, _no_answer(self._address, method.name, timeout_s))
        except grpc.aio.AioRpcError as error:
            _fail(future, _translate(error, self._address, method.name, self._tls))
        except asyncio.CancelledError:
            _fail(future, _lost(self._address, "closed"))
            raise
        except Exception as error:  # noqa: BLE001 - a caller must never wait for ever
            defect = InternalError(f"{method.name} at {self._address}: {error!r}", address=self._address)
            _fail(future, _lost(self._address, "closed") if self._closed else defect)  # gRPC raises its own error
        else:
            if not future.done():
                future.set_result(Reply(message))

    async def _send(self, method: Method[Any, Any], data: bytes, shown: _Metadata) -> bytes:
        if method is api.AUTHENTICATE:
            data, shown = b"", (*shown, *beside_call(data))
        call: Any = self._channel.unary_unary(method.path)  # its types do not allow bytes to bytes
        response: bytes = await call(data, metadata=shown)
        return response

    async def _shown_anew(self, error: grpc.aio.AioRpcError, before: _Metadata) -> _Metadata | None:
        """Return the credentials for a second try, after a daemon has refused `before`.

        A session may have ended, or a token has expired and its file has a new one by now. None: a second try would be
        refused as well. Raises as `_shown`.
        """
        if self._introduction is None or error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return None
        if self._showing == before:  # and no other call has authenticated anew meanwhile
            self._showing = self._introducing = None
        anew = await self._shown()
        return anew if anew != before else None

    async def _shown(self) -> _Metadata:
        """Return the credentials that a call shows. Raises the daemon's error."""
        if self._introduction is None:
            return ()
        while True:
            if self._introducing is None:
                self._introducing = self._loop.create_task(self._introduce())
            introducing = self._introducing
            try:
                return await asyncio.shield(introducing)
            except (Exception, asyncio.CancelledError) as error:
                if self._introducing is introducing and introducing.done():
                    self._introducing = None  # the next call tries again
                if not isinstance(error, asyncio.CancelledError) or self._closed or is_being_cancelled():
                    raise
                # `asyncio.run` cancels all tasks at its end, but calls that are made after that need an answer.

    async def _introduce(self) -> _Metadata:
        ask: Any = self._channel.unary_unary(api.AUTHENTICATE.path)

        async def step(request: access_pb2.AuthenticateRequest) -> access_pb2.AuthenticateResponse:
            try:
                shown = beside_call(request.SerializeToString())
                answer = await ask(b"", metadata=shown, timeout=INTRODUCTION_S)
            except grpc.aio.AioRpcError as error:
                translated = _translate(error, self._address, api.AUTHENTICATE.name, self._tls)
                if isinstance(translated, Uncertain):  # an authentication has no effect that matters
                    raise Unavailable(translated.message, address=self._address) from error
                raise translated from error
            return parse(access_pb2.AuthenticateResponse, answer)

        token = await introduce(self._introduction, step, each_call=True)
        self._showing = ((AUTHORIZATION, BEARER + token),) if token else ()
        return self._showing


class _BulkStream:
    """One bidirectional stream: requests go out in order, and responses are matched to them by request id."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        method: Method[Any, Any],
        tls: Tls | None,
        shown: Callable[[], Awaitable[_Metadata]],
        shown_anew: Callable[[grpc.aio.AioRpcError, _Metadata], Awaitable[_Metadata | None]],
    ) -> None:
        """`shown`: returns the credentials; `shown_anew`: returns new ones after these were refused."""
        keep_freed_memory()
        self._channel = channel
        self._show = shown
        self._show_anew = shown_anew
        self._shown: _Metadata = ()
        self._address = address
        self._tls = tls
        self._method = method
        self._ids = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle]] = {}
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()  # callers bound it by their requests in flight
        self._call: Any = None
        self._begun = asyncio.Event()
        self.done = False
        """Whether no more requests can be submitted."""

    def submit(self, message: Any, bulk: Sequence[Any], future: asyncio.Future[Any], timeout_s: float) -> None:
        request_id = next(self._ids)
        message.request_id = request_id
        timer = self._loop.call_later(timeout_s, self._timed_out, request_id, timeout_s)
        self._pending[request_id] = (future, timer)
        self._outgoing.put_nowait(serialize_with_bulk(message, bulk))

    def finish(self) -> None:
        """Accept no more requests; the stream ends when all pending ones are answered."""
        self._outgoing.put_nowait(None)

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._end(_lost(self._address, "closed"))

    async def write(self) -> None:
        """Send the submitted requests until the stream ends."""
        try:
            self._shown = await self._show()
            if self.done:
                return
            self._call = self._channel.stream_stream(self._method.path)(metadata=self._shown)
            self._begun.set()
            while (data := await self._outgoing.get()) is not None:
                if not await _written(self._call, data):
                    self.done = True
                    return
            if not self.done:
                await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            self.done = True  # the reading side gets the reason
            if is_being_cancelled():
                raise
        except KeraError as error:
            self._end(error)  # authentication has failed
        finally:
            self._begun.set()

    async def read(self) -> None:
        """Resolve pending requests with the answers, until the stream ends."""
        error: KeraError = _lost(self._address, "it ended the stream")
        try:
            await self._begun.wait()
            if self._call is None:
                return
            async for data in self._call:
                self._resolve(*parse_with_bulk(self._method.response, data))
        except grpc.aio.AioRpcError as rpc_error:
            self.done = True  # new requests go over another stream
            error = _translate(rpc_error, self._address, self._method.name, self._tls)
            refused = isinstance(error, REFUSALS)
            try:
                refused = refused and await self._show_anew(rpc_error, self._shown) is None
            except KeraError as why:
                error, refused = why, isinstance(why, REFUSALS)
            unread = rpc_error.code() is grpc.StatusCode.UNIMPLEMENTED
            if not (isinstance(error, Unavailable | Uncertain) or unread or refused):
                error = _lost(self._address, error.message)  # the error that ended the stream answers no request
        except ProtocolError as protocol_error:
            self._call.cancel()
            error = _lost(self._address, protocol_error.message)
        except asyncio.CancelledError:
            error = _lost(self._address, "closed")
            if is_being_cancelled():
                raise
        finally:
            self._end(error)

    def _end(self, error: KeraError) -> None:
        self.done = True
        self._outgoing.put_nowait(None)
        pending, self._pending = self._pending, {}
        for future, timer in pending.values():
            timer.cancel()
            _fail(future, error)

    def _resolve(self, message: Any, bulk: memoryview) -> None:
        future, timer = self._pending.pop(message.request_id, (None, None))
        if future is None or timer is None:
            return  # it has timed out
        timer.cancel()
        if future.done():
            return
        if message.HasField("error"):
            future.set_exception(error_from_message(message.error))
        else:
            future.set_result(Reply(message, (bulk,) if bulk else ()))

    def _timed_out(self, request_id: int, timeout_s: float) -> None:
        future, _ = self._pending.pop(request_id, (None, None))
        if future is not None:
            _fail(future, _no_answer(self._address, self._method.name, timeout_s))


async def _written(call: Any, data: bytes) -> bool:
    """Send a message of a stream; False: the stream has ended, and its reading end gets the reason.

    If a stream is ended while a message is sent, gRPC's own `write` raises an internal error, and the daemon's error is
    lost.
    """
    sent: asyncio.Event = call._metadata_sent  # noqa: SLF001 - as `write` does
    if not sent.is_set():
        # If a stream ends before it has begun, gRPC would let its writer wait for ever.
        call.add_done_callback(lambda _: sent.set())
        await sent.wait()
    if call.done():
        return False
    try:
        await call._cython_call.send_serialized_message(data)  # noqa: SLF001 - the same
    except cygrpc.InternalError:
        return False
    return True


def _fail(future: asyncio.Future[Any], error: KeraError) -> None:
    if not future.done():
        future.set_exception(error)


def _lost(address: str, reason: str) -> Uncertain:
    return Uncertain(f"connection to {address} was lost: {reason}", address=address)


def _no_answer(address: str, method: str, timeout_s: float) -> Uncertain:
    return Uncertain(f"no answer from {address} to {method} within {timeout_s:g} s", address=address)


def _not_connected(address: str, details: str, tls: Tls | None) -> Unavailable:
    """Return the error; it has the attribute ``refused`` if a process listens at the address."""
    reason = reason_of_tls(details, tls)
    attributes = {"refused": True} if reason else {}
    return Unavailable(f"cannot connect to {address}: {reason or details}", address=address, **attributes)


def _translate(error: grpc.aio.AioRpcError, address: str, method: str, tls: Tls | None) -> KeraError:
    """Return KerA's error for gRPC's: the daemon's own error if it sent one, otherwise one that the status implies."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA:
            with contextlib.suppress(ProtocolError):
                return error_from_message(parse(common_pb2.Error, value))
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if details.startswith(_NOT_SENT):
            return _not_connected(address, details, tls)
        case _ if details == WRONG_HOST or details.startswith(_NO_ADDRESS):
            return _not_connected(address, details, tls)
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(
                f"unknown method {method}: {address} is another daemon, or an older one", address=address
            )
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:
            return InternalError(f"{method} at {address}: {details}", address=address)
        case _:  # the connection was cut off, at either end
            return _lost(address, details)
