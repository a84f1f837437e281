"""Around what a daemon serves: counts what principals use, and has their answers wait (``usage``).

Whose quota has no rates pays for nothing but the counting. Of who has some, requests are taken past the handlers as
those of anybody, and counted behind that; once nothing is left, they go to the handlers, as an answer can wait there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from kera.core.errors import KeraError, TooManyRequests
from kera.core.rpc import api
from kera.core.rpc.method import Call, Handler, Method, Peer, Reply
from kera.core.rpc.taking import NOTHING, Asker, Taken, Taker
from kera.server.access import usage as usages
from kera.server.access.quotas import Debt
from kera.server.access.totals import exceeded
from kera.server.access.usage import Usage, Wait

Result = Reply[Any] | Awaitable[Reply[Any]]

_TOLD = {api.MULTI_WRITE_CHUNKS, api.MULTI_READ_CHUNKS}
"""Their answers say how long they have waited."""


def paced(method: Method[Any, Any], handler: Handler) -> Handler:
    """`handler`, for who may have a quota."""
    limited = _Limited(method, handler)
    reads = limited.reads

    def serve(call: Call[Any]) -> Result:
        usage = usage_of(call.peer)
        if usage is None:
            return handler(call)
        if usage.rates:
            return limited.serve(usage, call)
        usage.requests += 1
        usage.bytes_in += len(call.bulk)
        result = handler(call)
        return _counted(usage, result) if reads else result

    return serve


def paced_taker(taker: Taker) -> Taker:
    """`taker`, likewise."""

    def take(asker: Asker, frames: memoryview, requests_max: int) -> Taken:
        usage = usage_of(asker.peer)
        if usage is None:
            return taker(asker, frames, requests_max)
        if usage.rates and usage.is_used_up:
            return NOTHING
        taken = taker(asker, frames, requests_max)
        usage.asked(asker.peer, taken.bulk_bytes, taken.requests)
        return taken

    return take


def usage_of(peer: Peer) -> Usage | None:
    """The usage that requests of a peer count for; None: they are not counted."""
    remembered = peer.remembered
    return None if remembered is None else remembered.usage


def _counted(usage: Usage, result: Result) -> Result:
    if isinstance(result, Reply):
        usage.bytes_out += _bulk_bytes(result)
        return result
    return _counted_later(usage, result)


async def _counted_later(usage: Usage, result: Awaitable[Reply[Any]]) -> Reply[Any]:
    reply = await result
    usage.bytes_out += _bulk_bytes(reply)
    return reply


class _Limited:
    """A handler for those who have rates: a request is carried out at once, and answered when what it cost is paid."""

    def __init__(self, method: Method[Any, Any], handler: Handler) -> None:
        self.reads = method is api.MULTI_READ_CHUNKS
        """The cost of a request is known only when it is answered."""
        self._tells = method in _TOLD
        self._handler = handler

    def serve(self, usage: Usage, call: Call[Any]) -> Result:
        """Answer a request, if need be later."""
        if not call.peer.lasts:
            debts = usage.asked(call.peer, len(call.bulk))
            return self._serve_paid(usage, call, debts) if debts else self._handler(call)
        if usage.left_behind:
            bulk = memoryview(bytes(call.bulk))  # what the call has is gone when this returns
            return self._serve_later(usage, Call(call.message, bulk, call.peer))
        return self._serve(usage, call)

    async def _serve_paid(self, usage: Usage, call: Call[Any], debts: list[Debt]) -> Reply[Any]:
        """A call of gRPC, which has no bulk. Raises `TooManyRequests`."""
        wait = usage.wait(call.peer, debts, s_max=usages.CALL_S_MAX)
        try:
            await wait.over()
        finally:
            wait.end()
        if not wait.is_paid:
            has = f"asks so much that calls would wait for more than {usages.CALL_S_MAX:g} s"
            error = exceeded(usage.who.principal, usages.REQUESTS, usage.quota.requests_per_s, has)
            raise TooManyRequests(error.message, **error.attributes)
        result = self._handler(call)
        return result if isinstance(result, Reply) else await result

    async def _serve_later(self, usage: Usage, call: Call[Any]) -> Reply[Any]:
        call.peer.hold()  # what comes next is served behind it
        try:
            waited_ms = await usage.others_have_paid()
            result = self._serve(usage, call)
        finally:
            call.peer.release()
        reply = result if isinstance(result, Reply) else await result
        if self._tells:
            reply.message.throttled_ms += waited_ms
        return reply

    def _serve(self, usage: Usage, call: Call[Any]) -> Result:
        peer = call.peer
        debts = usage.asked(peer, len(call.bulk))
        waits = [usage.wait(peer, debts)] if debts else []
        if self.reads and (bytes_max := usage.read_bytes_max) is not None:
            call.message.bytes_max = min(call.message.bytes_max or bytes_max, bytes_max)
        try:
            result: Result | KeraError = self._handler(call)
        except KeraError as error:
            if not waits:
                raise
            result = error  # a refusal is answered no sooner than anything else
        except BaseException:
            _end(waits)
            raise
        if isinstance(result, Reply) and self.reads:
            self._pay(usage, peer, result, waits)
        if waits or isinstance(result, KeraError) or (self.reads and not isinstance(result, Reply)):
            return self._later(usage, peer, result, waits)
        return result

    async def _later(self, usage: Usage, peer: Peer, result: Result | KeraError, waits: list[Wait]) -> Reply[Any]:
        try:
            outcome = await _outcome(result)
            if outcome is not result and self.reads and isinstance(outcome, Reply):
                self._pay(usage, peer, outcome, waits)
            for wait in waits:
                await wait.over()
        except asyncio.CancelledError:
            for wait in waits:
                wait.leave()
            raise
        except BaseException:
            _end(waits)
            raise
        if isinstance(outcome, KeraError):
            raise outcome
        if self._tells:
            outcome.message.throttled_ms = sum(wait.ms for wait in waits)
        return outcome

    def _pay(self, usage: Usage, peer: Peer, reply: Reply[Any], waits: list[Wait]) -> None:
        debts = usage.answered(peer, _bulk_bytes(reply))
        if debts and waits and not waits[-1].is_over:
            usage.wait(peer, debts, waits[-1])
        elif debts:
            waits.append(usage.wait(peer, debts))


def _bulk_bytes(reply: Reply[Any]) -> int:
    return sum(map(len, reply.bulk))


async def _outcome(result: Result | KeraError) -> Reply[Any] | KeraError:
    if isinstance(result, Reply | KeraError):
        return result
    try:
        return await result
    except KeraError as error:
        return error


def _end(waits: list[Wait]) -> None:
    for wait in waits:
        wait.end()
