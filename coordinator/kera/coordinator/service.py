"""The coordinator's service: its handlers as a transport calls them, and a hook that sees each request's outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from kera.coordinator.cluster.changing import REQUESTER
from kera.coordinator.cluster.handlers import Handlers
from kera.core.errors import KeraError
from kera.core.rpc.method import Call, Handler, Method, Reply, Service
from kera.server.access.guard import CALLER

Observe = Callable[[str, str], None]
"""Called once per request: the method's name, and ``ok``, the code of the error, or ``cancelled``."""


def coordinator_service(handlers: Handlers, observe: Observe) -> Service:
    """Return the service in the form of `kera.core.rpc`."""
    return {method: _observed(method, handle, observe) for method, handle in handlers.items()}


def _observed(method: Method[Any, Any], handle: Callable[[Any], Any], observe: Observe) -> Handler:
    async def serve(call: Call[Any]) -> Reply[Any]:
        outcome = "cancelled"
        REQUESTER.set(call.peer.address)  # this context is the call's own: each call runs in its own task
        CALLER.set(call.peer)
        try:
            result = handle(call.message)
            message: Message = await result if inspect.isawaitable(result) else result
            outcome = "ok"
        except KeraError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            observe(method.name, outcome)
        return Reply(message)

    return serve
