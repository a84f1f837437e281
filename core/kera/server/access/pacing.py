"""Wraps a daemon's handlers and takers: counts the usage of principals, and delays their answers (``usage``).

For a principal whose quota has no rates, only counting is added. For a principal with rates, takers take requests as
for any other, and count them afterwards; once its rates are used up, its requests go to the handlers, where an answer
can be delayed.
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
"""Methods whose answers say how long they have waited."""


def paced(method: Method[Any, Any], handler: Handler) -> Handler:
    """Return `handler` with counting and delays for callers that may have a quota."""
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
    """Return `taker` with counting for callers that may have a quota; it takes nothing if their rates are used up."""

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
    """Return the usage to which requests of a peer count; None: they are not counted."""
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
    """A handler for callers with rates: it carries out a request at once, and answers when its cost is paid."""

    def __init__(self, method: Method[Any, Any], handler: Handler) -> None:
        self.reads = method is api.MULTI_READ_CHUNKS
        """Whether it is a read, whose cost is known only when it is answered."""
        self._tells = method in _TOLD
        self._handler = handler

    def serve(self, usage: Usage, call: Call[Any]) -> Result:
        """Return the answer to a request, or a future for it."""
        if not call.peer.lasts:
            debts = usage.asked(call.peer, len(call.bulk))
            return self._serve_paid(usage, call, debts) if debts else self._handler(call)
        if usage.left_behind:
            bulk = memoryview(bytes(call.bulk))  # the bulk of the call is valid only until this returns
            return self._serve_later(usage, Call(call.message, bulk, call.peer))
        return self._serve(usage, call)

    async def _serve_paid(self, usage: Usage, call: Call[Any], debts: list[Debt]) -> Reply[Any]:
        """Serve a call of gRPC without bulk once it is paid. Raises `TooManyRequests`."""
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
        call.peer.hold()  # later requests of the connection are served after it
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
            result = error  # an error waits like any other answer
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
