"""How a server runs a handler, the same on every transport.

Whatever a handler does, its caller gets an answer: a defect (an exception that is not KerA's, or a result that is no
reply) is answered as `InternalError`, and logged with its trace here, where the cause is.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kera.core.base.telemetry import get_logger
from kera.core.errors import InternalError, KeraError
from kera.core.rpc.method import Call, Handler, Method, Reply
from kera.core.rpc.wire import error_to_message
from kera.v1 import common_pb2

log = get_logger("kera.rpc")


def run_handler(handler: Handler, call: Call[Any]) -> Reply[Any] | asyncio.Future[Reply[Any]]:
    """Return the handler's reply, or a future for it. Raises the errors of the handler."""
    result = handler(call)
    if isinstance(result, Reply):
        return result
    return result if isinstance(result, asyncio.Future) else asyncio.ensure_future(result)


def deferred_reply(future: asyncio.Future[Reply[Any]]) -> Reply[Any]:
    """Return the reply of a future that is done. Raises its error; a cancellation by the daemon is a defect."""
    if future.cancelled():
        raise given_up()
    return checked_reply(future.result())


def given_up() -> InternalError:
    """Return the error for a handler that was cancelled, but not by its caller."""
    return InternalError("the request was given up by the daemon")


def checked_reply(reply: Any) -> Reply[Any]:
    """Return the result of a handler. Raises `InternalError` if it is not a reply."""
    if not isinstance(reply, Reply):
        raise InternalError(f"the handler returned {type(reply).__name__} and no reply")
    return reply


def error_reply(error: BaseException, method: Method[Any, Any] | None) -> common_pb2.Error:
    """Return `error` as a message, and log it if it is a defect. Drops its traceback to free the objects in it."""
    name = method.name if method is not None else None
    if not isinstance(error, KeraError):
        log.error("handler failed", method=name, exc_info=error)
    elif isinstance(error, InternalError):
        log.error("invariant broken", method=name, error=str(error), attributes=error.attributes, exc_info=error)
    _forget_trace(error)
    return error_to_message(error)


def _forget_trace(error: BaseException) -> None:
    """Drop the tracebacks of an error and its causes.

    A future refers to its error, and the error's traceback refers to the frames that awaited the future, and so to the
    request. The garbage collector would free this cycle late, since it counts objects, and a message is a single
    object, however many items it has.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            errors += (one.__cause__, one.__context__)
