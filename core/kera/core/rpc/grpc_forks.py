"""gRPC and `fork`: a child process whose parent has an open channel cannot use gRPC, so it gets an error at once.

The library's threads are the parent's, and its state is copied as it was: calls in such a child wait for ever, or crash
it. A child whose parent has closed its channels, or has made none, uses gRPC as any other process does.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any
from weakref import WeakSet

from kera.core.errors import ClosedError

_channels: WeakSet[Any] = WeakSet()
"""Those that this process has not let go of."""
_is_broken = False


def check_process() -> None:
    """Call it before a channel is made. Raises `ClosedError` in a child process that cannot use gRPC."""
    if _is_broken:
        raise ClosedError(
            "this process was forked while its parent had a client open, and gRPC does not work in it: start processes"
            " with spawn or forkserver, or close the parent's clients before the fork"
        )


def remember(channel: Any) -> None:
    """A channel was made."""
    _channels.add(channel)


def _after_fork() -> None:
    global _is_broken  # noqa: PLW0603 - of the process
    for channel in list(_channels):
        _is_broken = True
        _never_close(channel)


def _never_close(channel: Any) -> None:
    """Leave the parent's channel alone: what gRPC does when the garbage collector finds it crashes a child process."""
    inner = channel.__dict__.pop("_channel", None)
    if inner is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


os.register_at_fork(after_in_child=_after_fork)
