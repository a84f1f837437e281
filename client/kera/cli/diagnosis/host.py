"""Checks whether daemons of KerA would run well on this machine. Changes nothing, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kera.client.diagnosis.findings import Finding, ok, problem, warning
from kera.core.base.home import expanded
from kera.core.base.sizes import format_size
from kera.core.errors import InvalidArgument

GIB = 1 << 30
DESCRIPTORS_LEAST = 1024
DESCRIPTORS_GOOD = 16_384
"""512 for files, and the 10,000 connections that a daemon serves by default."""
FREE_LEAST = GIB
FREE_GOOD = 10 * GIB
JAVA_MIN = 17
JAVA_TIMEOUT_S = 20.0
GOOD_FILE_SYSTEMS = {"ext4", "xfs"}
LASTING_ELSEWHERE = {"nfs", "nfs4", "cifs", "smb3", "fuse", "9p", "ceph"}
VOLATILE = {"tmpfs", "ramfs"}
_CLOCK_UNSYNCHRONIZED = 5
"""The result of adjtimex() for a clock that is not synchronized (TIME_ERROR)."""
_TIMEX_BYTES = 256
"""More than the size of ``struct timex``."""


def checkup(data_dirs: Sequence[Path], arena_bytes: int, ports: Sequence[int]) -> list[Finding]:
    """Return all findings about this machine."""
    return [
        python_version(sys.version_info[:2]),
        native_core(),
        descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        *shared_memory(Path("/dev/shm"), arena_bytes),  # noqa: S108 - shared memory, nothing temporary
        memory(Path("/proc/meminfo"), arena_bytes),
        *(finding for each in data_dirs for finding in data_directory(each)),
        clock(),
        *(port_free(port) for port in ports),
        java(),
    ]


def python_version(version: tuple[int, ...]) -> Finding:
    """Check the Python version."""
    text = ".".join(map(str, version))
    if version < (3, 11):
        return problem("python", text, "install Python 3.11 or newer")
    return ok("python", text)


def native_core() -> Finding:
    """Check whether the native extension is installed."""
    from kera.core import native

    if native.native is not None:
        return ok("native core", "is there")
    return warning(
        "native core",
        f"{native.describe()}: all is done in Python, several times as slow",
        "install a package that was built with it, or build it: see docs/native.md",
    )


def descriptors(limit: int) -> Finding:
    """Check the hard limit of file descriptors, which a daemon raises its soft limit to."""
    if limit == resource.RLIM_INFINITY:
        return ok("file descriptors", "without limit")
    advice = "raise the hard limit: LimitNOFILE=65536 in a unit of systemd, nofile in /etc/security/limits.conf"
    if limit < DESCRIPTORS_LEAST:
        return problem("file descriptors", f"at most {limit}", advice)
    if limit < DESCRIPTORS_GOOD:
        return warning("file descriptors", f"at most {limit}: fewer than 10,000 connections of a daemon", advice)
    return ok("file descriptors", f"at most {limit}")


def shared_memory(path: Path, arena_bytes: int) -> list[Finding]:
    """Check whether shared memory has room for a broker's arena."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return [
            problem(
                str(path), f"cannot be used: {error.strerror}", "mount a tmpfs there: brokers have their memory in it"
            )
        ]
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{format_size(free)} of {format_size(size)} are free"
    findings = []
    if free < arena_bytes:
        advice = f"mount -o remount,size=16G {path} (--shm-size in Docker), or give the broker a smaller --arena-bytes"
        findings.append(problem(str(path), f"{text}, the arena takes {format_size(arena_bytes)}", advice))
    else:
        findings.append(ok(str(path), text))
    if not os.access(path, os.W_OK):
        findings.append(problem(str(path), "cannot be written to by this user", f"chmod 1777 {path}"))
    return findings


def memory(meminfo: Path, arena_bytes: int) -> Finding:
    """Check whether the machine's memory is enough for the arena."""
    try:
        text = meminfo.read_text(encoding="ascii")
    except OSError:
        return warning("memory", "cannot be seen here", "make sure that the arena and a GiB beside it fit")
    values = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    available, total = values.get("MemAvailable", 0), values.get("MemTotal", 0)
    said = f"{format_size(available)} of {format_size(total)} are available"
    if available < arena_bytes:
        return problem(
            "memory", f"{said}, the arena takes {format_size(arena_bytes)}", "give it a smaller --arena-bytes"
        )
    if available < arena_bytes + GIB // 2:
        advice = "leave half a GiB beside the arena, more for the page cache and for readers"
        return warning("memory", f"{said}, the arena takes {format_size(arena_bytes)}", advice)
    return ok("memory", said)


def data_directory(path: Path) -> list[Finding]:
    """Check a data directory, which need not exist yet."""
    subject = f"data directory {path}"
    try:
        path = expanded(path).absolute()
    except InvalidArgument as error:
        return [problem(subject, error.message, "choose another --data-dir")]
    subject = f"data directory {path}"
    try:
        return _directory_findings(subject, path)
    except OSError as error:  # a name that is too long, a file system that takes no files (/proc), a full disk
        return [problem(subject, f"cannot be used: {error.strerror}", "choose another --data-dir")]


def _directory_findings(subject: str, path: Path) -> list[Finding]:
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        return [problem(subject, f"{there} is not a directory", "choose another --data-dir")]
    if not os.access(there, os.W_OK | os.X_OK):
        owner = f"chown it to the user that runs daemons, or choose another --data-dir ({there})"
        return [problem(subject, "cannot be written to by this user", owner)]
    state = "is there" if there == path else f"would be made in {there}"
    findings = [ok(subject, f"{state}, and can be written to"), file_system(subject, file_system_of(there))]
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize
    text = f"{format_size(free)} are free"
    if free < FREE_LEAST:
        findings.append(problem(subject, text, "make room, or choose another disk"))
    elif free < FREE_GOOD:
        findings.append(warning(subject, text, "make room: nothing removes records but retention"))
    else:
        findings.append(ok(subject, text))
    findings.append(direct_io(subject, there))
    return findings


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system of a path; empty: unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    path = path.resolve()  # mount points are named without symbolic links
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def file_system(subject: str, kind: str) -> Finding:
    """Check the type of a file system for a log."""
    if kind in GOOD_FILE_SYSTEMS:
        return ok(subject, f"on {kind}")
    if kind in VOLATILE:
        return problem(subject, f"on {kind}, which is gone with the machine", "choose a directory on a disk")
    if kind.partition(".")[0] in LASTING_ELSEWHERE:
        advice = "choose a local disk: locks and syncs over a network are slow, and not all of them are kept"
        return warning(subject, f"on {kind}", advice)
    return warning(
        subject, f"on {kind or 'a file system that cannot be seen'}", "ext4 and XFS are what KerA is tested on"
    )


def direct_io(subject: str, directory: Path) -> Finding:
    """Check whether files can be written around the page cache. Raises ``OSError`` when no file can be made."""
    if not hasattr(os, "O_DIRECT"):
        return warning(subject, "this system has no O_DIRECT", "it works through the page cache, which takes memory")
    handle, name = tempfile.mkstemp(prefix=".kera-doctor-", dir=directory)
    os.close(handle)
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return warning(
            subject, "files cannot be written around the page cache", "it works, and takes memory: use ext4 or XFS"
        )
    finally:
        Path(name).unlink()
    return ok(subject, "files can be written around the page cache (O_DIRECT)")


def clock() -> Finding:
    """Check whether the kernel reports its clock as synchronized."""
    state = -1
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(ctypes.util.find_library("c")).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return clock_in(state)


def clock_in(state: int) -> Finding:
    """Return the finding about the clock from the result of adjtimex(); below 0: no result."""
    advice = "run chrony or systemd-timesyncd: retention by age and reading by time go by the clock"
    if state == _CLOCK_UNSYNCHRONIZED:
        return warning("clock", "is not synchronized, as far as the kernel knows", advice)
    if state < 0:
        return warning("clock", "it cannot be seen here whether it is synchronized", advice)
    return ok("clock", "is synchronized, as the kernel says")


def port_free(port: int, host: str = "127.0.0.1") -> Finding:
    """Check whether a daemon could listen on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = f"see who has it (ss -ltnp 'sport = :{port}'), or choose another port"
            return problem(f"port {port}", f"cannot be used: {error.strerror}", advice)
    return ok(f"port {port}", "is free")


def java(home: str | None = None) -> Finding:
    """Check Java, which only Spark needs."""
    home = os.environ.get("JAVA_HOME") if home is None else home
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    wanted = find_spec("pyspark") is not None
    absent = "not found; only Spark needs it"
    if program is None:
        return warning("java", absent, f"install a JDK {JAVA_MIN}") if wanted else ok("java", absent)
    try:
        done = subprocess.run(  # noqa: S603 - Java, from JAVA_HOME or the path
            [program, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return warning("java", f"{program} does not run: {error}", "set JAVA_HOME, if Spark is to run here")
    return java_version(done.stderr + done.stdout)


def java_version(said: str) -> Finding:
    """Return the finding about Java from the output of ``java -version``."""
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None:
        return warning("java", "its version cannot be read", "set JAVA_HOME, if Spark is to run here")
    if int(found[1]) < JAVA_MIN:
        return warning("java", f"version {found[1]}", f"install a JDK {JAVA_MIN}, if Spark is to run here")
    return ok("java", f"version {found[1]}, for Spark")
