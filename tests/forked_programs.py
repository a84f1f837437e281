"""Starts programs of KerA for tests without their imports, which take most of a program's start.

`Forks` is a process that has imported the modules of ``python -m kera.cli`` and of the daemons. For each such program
that the process of the tests starts with `subprocess` or asyncio it forks a child: a child of the process of the tests,
as the caller expects, with the same arguments, environment, directory and standard streams. From there on, the child
runs and ends as the program does. A program that starts others, such as ``kera dev``, forks them likewise.

A program is started in the ordinary way if it is another one, if its environment concerns Python itself or imports,
or if the start has options that this module does not know. `started_alone` starts all programs that way, for tests
about the start itself.
"""

from __future__ import annotations

import array
import asyncio
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

import uvloop

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
"""Prefixes of the names of modules that are forked with ``-m``."""
ABOUT_IMPORTS = ("sys.modules", "fork", "multiprocessing")
"""A program after ``-c`` that imports KerA is forked, unless it has one of these words."""
DAEMONS = ("coordinator", "broker", "backup")
STARTING = ("dev", "node", "bench")
"""Commands of `kera` that start other programs."""
USERS = ("tests/integration/", "tests/spark/")
"""Tests whose programs after ``-c`` are those of users. In unit tests, such a program tests the import of a module."""
IMPORTED = (
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
"""Prefixes of the names of variables; a program with a different value of one is started in the ordinary way."""
MESSAGE_BYTES_MAX = 1 << 20
COMMAND_LINE_BYTES = 8192
"""Space for the command line of a program, which replaces that of the forking process."""
CLONE_PARENT = 0x00008000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())


class Forks:
    """The tests' handle of the forking process. The main thread starts that process, because it lives longest."""

    def __init__(
        self, process: subprocess.Popen[Any] | None, requests: socket.socket, environment: Mapping[str, str]
    ) -> None:
        requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES_MAX)
        self._process = process
        self._socket = requests
        self._environment = dict(environment)
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def new(cls, *, daemons: bool) -> Forks:
        """A new process with all imports. gRPC is only for daemons: it writes to logs, not to users of commands."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # These libraries start no threads then; a fork would lack them.
        alone = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.forked_programs",
                    str(theirs.fileno()),
                    str(daemons),
                    " " * COMMAND_LINE_BYTES,
                ],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **alone},
                cwd=Path(__file__).parent.parent,
            )
        return cls(process, ours, os.environ)

    def close(self) -> None:
        """End the process; its forked children go on."""
        self._socket.close()
        if self._process is not None:
            self._process.wait()

    def takes(self, argv: Sequence[str], environment: Mapping[str, str], directory: str) -> bool:
        """Whether this program can be forked."""
        names = [name for name in {*environment, *self._environment} if name.startswith(READ_AT_IMPORTS)]
        if self._owner != os.getpid():  # in a fork of the tests: a child would be that one's
            return False
        same = all(environment.get(name) == self._environment.get(name) for name in names)
        short = len("\0".join(argv).encode()) < COMMAND_LINE_BYTES and len(json.dumps(dict(environment))) < 100_000
        return same and short and os.access(directory, os.X_OK)

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Fork a new child of this process with `streams` as its standard ones; return its process id."""
        message = json.dumps(request).encode()
        descriptors = array.array("i", streams)
        with self._lock:
            self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            return int(self._socket.recv(64))


def _is_keras(argv: Sequence[str]) -> bool:
    """Whether an interpreter with these arguments runs a program of KerA."""
    if len(argv) < 3 or argv[0] != sys.executable:
        return False
    flag, program = argv[1:3]
    if flag == "-c":
        whose = os.environ.get("PYTEST_CURRENT_TEST", "")
        return whose.startswith(USERS) and "kera" in program and not any(word in program for word in ABOUT_IMPORTS)
    return flag == "-m" and program.startswith(MODULES)


_forks: dict[bool, Forks] = {}
"""Key: whether the process is for daemons."""
_alone = 1
"""Number of active blocks without forks."""
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


@contextlib.contextmanager
def forked_programs() -> Iterator[None]:
    """Fork programs within the block."""
    global _alone  # noqa: PLW0603 - there is one for the process
    if SYS_CLONE is None or os.environ.get("KERA_TESTS_FORK") == "0":
        yield
        return
    subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]
    _alone -= 1
    try:
        yield
    finally:
        _alone += 1
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
        for forks in _forks.values():
            forks.close()
        _forks.clear()


def begin_to_fork() -> None:
    """Import the modules of programs before a thread starts one: only the main thread can do that, see `Forks`."""
    if not _forks and not _alone and threading.current_thread() is threading.main_thread():
        _forks.update({daemons: Forks.new(daemons=daemons) for daemons in (False, True)})


@contextlib.contextmanager
def started_alone() -> Iterator[None]:
    """Start each program with a new interpreter within the block, as users do."""
    global _alone  # noqa: PLW0603 - as above
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def _start(popen: subprocess.Popen[Any], *arguments: Any) -> None:
    """Replaces `Popen._execute_child`, and has its arguments."""
    (args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell) = arguments[:10]
    (p2cread, _, _, c2pwrite, _, errwrite) = arguments[10:16]
    _, gid, gids, uid, umask, start_new_session, process_group = arguments[16:23]
    argv = [os.fspath(each) for each in args] if isinstance(args, (list, tuple)) else []
    environment = dict(os.environ if env is None else env)
    directory = os.path.abspath(cwd or ".")  # noqa: PTH100 - it may be bytes
    unknown = (executable, preexec_fn, pass_fds, shell, gid, gids, uid)
    if (
        _alone
        or any(unknown)
        or umask not in {-1, None}
        or process_group not in {-1, None}
        or any(isinstance(each, bytes) for each in [*argv, *environment, directory])
        or not _is_keras(argv)
    ):
        _execute_child(popen, *arguments)
        return
    begin_to_fork()
    forks = _forks.get(argv[2] == "kera.cli" and len(argv) > 3 and argv[3] in DAEMONS)
    if forks is None or not forks.takes(argv, environment, directory):
        _execute_child(popen, *arguments)
        return
    streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
    if any(os.isatty(each) for each in streams):
        _execute_child(popen, *arguments)
        return
    request = {"argv": argv, "env": environment, "cwd": directory, "session": bool(start_new_session)}
    popen.pid = forks.fork(request, streams)
    popen._child_created = True  # type: ignore[attr-defined]
    popen._close_pipe_fds(*arguments[10:16])  # type: ignore[attr-defined]


def _fork_beside() -> int:
    """As `os.fork`, but the child belongs to this process's parent."""
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


def _show(argv: Sequence[str]) -> None:
    """Make `/proc` show this command line."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"".join(os.fsencode(each) + b"\0" for each in argv)[: end - start]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork until the requests end, and return None then; in a child, return the program to run."""
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
    """Become an interpreter with these arguments."""
    _show(program["argv"])
    if program["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    flag, text, *arguments = program["argv"][1:]
    sys.path[0] = program["cwd"] if flag == "-m" else ""
    sys.argv = [flag if flag == "-c" else text, *arguments]
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors)  # noqa: SIM115 - a descriptor
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    if flag == "-c":  # such a test may check how a program ends
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), main.__dict__)
        return
    for name in (text, f"{text}.__main__"):  # runpy warns of a module that is loaded already
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)
    try:
        runpy.run_module(text, run_name="__main__", alter_sys=True)
        ended = SystemExit(0)
    except SystemExit as error:
        ended = error
    if isinstance(ended.code, int | None):
        _end(ended.code or 0)
    raise ended


def _end(code: int) -> None:
    """End without the interpreter's teardown, which would copy the memory that is shared with the parent.

    Returns if output cannot be written: the interpreter then reports that itself.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _fork_for_others(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Begin to fork programs for this one; in each of them, return the program to run."""
    global _alone  # noqa: PLW0603 - in this program
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.setsid()  # signals to the program's process group must not reach this process
        _show(["forks"])
        with Path(os.devnull).open("r+b") as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        program = _serve(theirs)
        if program is None:
            os._exit(0)
        return program
    theirs.close()
    _forks.update(dict.fromkeys((False, True), Forks(None, ours, environment)))
    _alone = 0
    subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]
    uvloop.new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]  # it starts processes by `subprocess`
    return None


def _main() -> None:
    if sys.argv[2] == str(True):
        __import__("grpc")
    for name in IMPORTED:
        __import__(name)
    command_of(app)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        program = _serve(requests)
    if program is None:
        return
    if program["argv"][1:3] == ["-m", "kera.cli"] and program["argv"][3:4] and program["argv"][3] in STARTING:
        program = _fork_for_others(program["env"]) or program
    _become(program)


if __name__ == "__main__":
    _main()
