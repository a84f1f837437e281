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
"""Mode bits that other users do not get on the files of a daemon."""
_OWNERS = 0o700
_PR_SET_PDEATHSIG = 1
_DESCRIPTORS_UNLIMITED = 1 << 20
"""Stands for the limit of a process that has none."""


def die_with_parent(parent_id: int | None = None) -> None:
    """Have the kernel send SIGTERM when the parent dies, if the environment asks for it.

    `parent_id`: the parent when this process began; by default, the present one.
    """
    if os.environ.get(DIE_WITH_PARENT_VARIABLE) != "1":
        return
    parent_id = parent_id or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_id:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def own_files(closed_to_others: int = 0) -> None:
    """Set the umask so that the owner can use the files of this process, and add `closed_to_others` to it."""
    before = os.umask(0)
    os.umask((before | closed_to_others) & ~_OWNERS)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors to the hard limit: it is low only for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a hard limit above what the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Return how many file descriptors the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _DESCRIPTORS_UNLIMITED if soft == resource.RLIM_INFINITY else soft


def process_name() -> str:
    """Return a name of this process for people: its host and process id."""
    return f"{socket.gethostname()}/{os.getpid()}"


def node_id(boot_id_path: Path = BOOT_ID_PATH) -> str:
    """Return an id of the host and its boot: processes with the same id can share memory and unix sockets."""
    try:
        boot = boot_id_path.read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown-boot"
    return f"{socket.gethostname()}/{boot}"
