"""What a daemon's process needs from the operating system: its identity on the node, and an orderly end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

DIE_WITH_PARENT_VARIABLE = "KERA_DIE_WITH_PARENT"
"""Set to 1 by a supervisor whose children must not outlive it."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies, if the environment asks for it."""
    if os.environ.get(DIE_WITH_PARENT_VARIABLE) != "1":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def node_id() -> str:
    """Names the host since its last boot: processes with the same one can share memory and unix sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown-boot"
    return f"{socket.gethostname()}/{boot}"
