"""gRPC and `fork`: a child process whose parent has an open channel cannot use gRPC, so it gets an error at once.

The library's threads exist only in the parent, and the child has a copy of their state: calls in such a child wait for
ever, or crash it. A child whose parent has closed its channels, or has made none, can use gRPC like any other process.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any
from weakref import WeakSet

from kera.core.errors import ClosedError

_channels: WeakSet[Any] = WeakSet()
"""The channels of this process that still exist."""
_is_broken = False


def check_process() -> None:
    """Raise `ClosedError` in a child process that cannot use gRPC; called before a channel is made."""
    if _is_broken:
        raise ClosedError(
            "this process was forked while its parent had a client open, and gRPC does not work in it: start processes"
            " with spawn or forkserver, or close the parent's clients before the fork"
        )


def remember(channel: Any) -> None:
    """Note a channel that was made."""
    _channels.add(channel)


def _after_fork() -> None:
    global _is_broken  # noqa: PLW0603 - of the process
    for channel in list(_channels):
        _is_broken = True
        _never_close(channel)


def _never_close(channel: Any) -> None:
    """Keep a parent's channel alive for ever: gRPC would crash the child when the garbage collector frees it."""
    inner = channel.__dict__.pop("_channel", None)
    if inner is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


os.register_at_fork(after_in_child=_after_fork)
