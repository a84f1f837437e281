"""Programs of KerA that tests start, without their imports: those take most of a program's start.

`Forks` is a process that has imported what ``python -m kera.cli`` and the daemons need. For each such program that the
process of the tests starts with `subprocess` or asyncio it forks a child: a child of the process of the tests, as
the caller expects, with the same arguments, environment, directory and standard streams. What the child does from
there on, and how it ends, is what the program does. Only its command line is shown by `/proc` as that of this module.

A program is started in the ordinary way if it is another one, if its environment concerns Python itself or what is
read at an import, or where the start has options that this module does not know. `started_alone` has all of them
started that way, for tests about the start itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kera.cli._run import command_of
from kera.cli.app import app

MODULES = (
    "kera.cli",
    "kera.coordinator",
    "kera.broker",
    "kera.backup",
    "kera.spark_connector.service",
    "tests.integration.",
)
"""Beginnings of the names of modules that are forked with ``-m``."""
ABOUT_IMPORTS = ("sys.modules", "fork", "multiprocessing")
"""Text given to ``-c`` that imports KerA is forked, unless it has one of these words."""
IMPORTED = (
    "grpc",
    "uvloop",
    "kera.client",
    "kera.coordinator.__main__",
    "kera.backup.__main__",
    "kera.broker.__main__",
)
READ_AT_IMPORTS = (
    "PYTHON",
    "KERA_NATIVE",
    "GRPC_",
    "LD_",
    "MALLOC_",
    "OPENBLAS_",
    "ARROW_",
    "KERA_COMMIT",
    "LANG",
    "LC_",
)
"""Beginnings of the names of variables; a program in whose environment one differs is started in the ordinary way."""
MESSAGE_BYTES_MAX = 1 << 20
CLONE_PARENT = 0x00008000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())


class Forks:
    """The process that forks, as the process of the tests sees it. Started by the main thread, which lives longest."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES_MAX)
        self._environment = dict(os.environ)
        # Neither has threads of its own, which a fork would be without.
        alone = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked_programs", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **alone},
                cwd=Path(__file__).parent.parent,
            )
        self._socket = ours
        self._lock = threading.Lock()

    def close(self) -> None:
        """End it; what it has forked goes on."""
        self._socket.close()
        self._process.wait()

    def takes(self, argv: Sequence[object], environment: Mapping[str, str], directory: str) -> bool:
        """Whether this program is one to fork."""
        if len(argv) < 3 or argv[0] != sys.executable or not _is_keras(str(argv[1]), str(argv[2])):
            return False
        names = [name for name in {*environment, *self._environment} if name.startswith(READ_AT_IMPORTS)]
        same = all(environment.get(name) == self._environment.get(name) for name in names)
        return same and os.access(directory, os.X_OK) and len(json.dumps([argv, dict(environment)])) < 100_000

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The process id of a new child of this process; `streams` are its standard ones."""
        message = json.dumps(request).encode()
        descriptors = array.array("i", streams)
        with self._lock:
            self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            return int(self._socket.recv(64))


def _is_keras(flag: str, program: str) -> bool:
    """Whether an interpreter runs a program of KerA's with these arguments."""
    if flag == "-c":
        return "kera" in program and not any(word in program for word in ABOUT_IMPORTS)
    return flag == "-m" and program.startswith(MODULES)


_forks: Forks | None = None
_alone = 0
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


@contextlib.contextmanager
def forked_programs() -> Iterator[None]:
    """Have programs forked from here on."""
    global _forks  # noqa: PLW0603 - there is one for the process
    if _forks is not None or SYS_CLONE is None or os.environ.get("KERA_TESTS_FORK") == "0":
        yield
        return
    _forks = Forks()
    subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
        _forks.close()
        _forks = None


@contextlib.contextmanager
def started_alone() -> Iterator[None]:
    """Have each program start with an interpreter of its own, as for users."""
    global _alone  # noqa: PLW0603 - as above
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def _start(popen: subprocess.Popen[Any], *arguments: Any) -> None:
    """In place of `Popen._execute_child`, whose arguments these are."""
    (args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell) = arguments[:10]
    (p2cread, _, _, c2pwrite, _, errwrite) = arguments[10:16]
    _, gid, gids, uid, umask, start_new_session, process_group = arguments[16:23]
    argv = [os.fspath(each) for each in args] if isinstance(args, (list, tuple)) else []
    environment = dict(os.environ if env is None else env)
    directory = os.fspath(cwd) if cwd is not None else os.getcwd()  # noqa: PTH109 - it may be bytes
    unknown = (executable, preexec_fn, pass_fds, shell, gid, gids, uid)
    if (
        _forks is None
        or _alone
        or any(unknown)
        or umask not in {-1, None}
        or process_group not in {-1, None}
        or any(isinstance(each, bytes) for each in [*argv, *environment, directory])
        or not _forks.takes(argv, environment, directory)
    ):
        _execute_child(popen, *arguments)
        return
    streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
    if any(os.isatty(each) for each in streams):
        _execute_child(popen, *arguments)
        return
    request = {"argv": argv[1:], "env": environment, "cwd": directory, "session": bool(start_new_session)}
    popen.pid = _forks.fork(request, streams)
    popen._child_created = True  # type: ignore[attr-defined]
    popen._close_pipe_fds(*arguments[10:16])  # type: ignore[attr-defined]


def _fork_beside() -> int:
    """As `os.fork`, but the child is one of this process's parent."""
    python = ctypes.PyDLL(None)  # the interpreter stays locked meanwhile
    flags = ctypes.c_long(CLONE_PARENT | signal.SIGCHLD)
    nothing = ctypes.c_long(0)
    python.PyOS_BeforeFork()
    pid = python.syscall(ctypes.c_long(SYS_CLONE or 0), flags, nothing, nothing, nothing, nothing)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return int(pid)


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork until nobody asks any more: None then; in a child, what it is to run."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, 3)
        if not message:
            return None
        pid = _fork_beside()
        if pid == 0:
            requests.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(3, max(descriptors) + 1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return dict(json.loads(message))
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _become(program: Mapping[str, Any]) -> None:
    """Be what `python -m` would be now."""
    if program["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    flag, text, *arguments = program["argv"]
    sys.path[0] = program["cwd"] if flag == "-m" else ""
    sys.argv = [flag if flag == "-c" else text, *arguments]
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors)  # noqa: SIM115 - a descriptor
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    if flag == "-c":  # which may be about how a program ends
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), main.__dict__)
        return
    try:
        runpy.run_module(text, run_name="__main__", alter_sys=True)
        ended = SystemExit(0)
    except SystemExit as error:
        ended = error
    if isinstance(ended.code, int | None):
        _end(ended.code or 0)
    raise ended


def _end(code: int) -> None:
    """End without taking everything apart, which copies the memory that is shared with the parent.

    Returns where output cannot be written: the interpreter has its own ways with that.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _main() -> None:
    for name in IMPORTED:
        __import__(name)
    command_of(app)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        program = _serve(requests)
    if program is not None:
        _become(program)


if __name__ == "__main__":
    _main()
