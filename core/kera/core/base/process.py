"""A daemon's process and the operating system: its identity on the node, and an orderly end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
from pathlib import Path

DIE_WITH_PARENT_VARIABLE = "KERA_DIE_WITH_PARENT"
"""Set to 1 by a supervisor whose children must not outlive it."""

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
OTHERS_WRITE = 0o022
"""Mode bits that are taken from others for the files of a daemon."""
_OWNERS = 0o700
_PR_SET_PDEATHSIG = 1
_DESCRIPTORS_UNLIMITED = 1 << 20
"""Counts as the limit where there is none."""


def die_with_parent(parent_id: int | None = None) -> None:
    """Have the kernel send SIGTERM when the parent dies, if the environment asks for it.

    `parent_id`: who that was when this process began; by default, who it is now.
    """
    if os.environ.get(DIE_WITH_PARENT_VARIABLE) != "1":
        return
    parent_id = parent_id or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_id:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def own_files(closed_to_others: int = 0) -> None:
    """Have the owner use what this process creates, whatever the umask says; `closed_to_others` is added to it."""
    before = os.umask(0)
    os.umask((before | closed_to_others) & ~_OWNERS)


def raise_descriptor_limit() -> None:
    """Have as many file descriptors as the process may: the soft limit is low for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a hard limit above what the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """How many file descriptors the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _DESCRIPTORS_UNLIMITED if soft == resource.RLIM_INFINITY else soft


def process_name() -> str:
    """Names this process for people: where it runs, and as which."""
    return f"{socket.gethostname()}/{os.getpid()}"


def node_id(boot_id_path: Path = BOOT_ID_PATH) -> str:
    """Names the host since its last boot: processes with the same one can share memory and unix sockets."""
    try:
        boot = boot_id_path.read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown-boot"
    return f"{socket.gethostname()}/{boot}"
