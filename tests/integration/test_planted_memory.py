"""Another user of the host plants files where a broker keeps its memory, or keeps the memory that the broker shared.

Whatever files are there, a broker that restarts serves the acknowledged records, or reports their loss, and serves no
other bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kera.client import Client
from kera.client.cluster import push_connect
from kera.core.base.settings import KIB, MIB
from kera.core.errors import DataLost
from kera.core.push import DEFAULT_DOMAIN
from kera.local.child import ChildStartError
from kera.local.cluster import RunningCluster
from tests.integration.support import BROKER, arena_of, keeping_cluster, lose_host, metric, until

NOBODY = 65_534
RECORDS = 100
HEAD_BYTES = 4096
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program of another user")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    """A cluster for one test, since its broker is killed. Records go to disk only on demand.

    Its memory is in a directory to which everybody may write, like ``/dev/shm``, and which other tests do not see.
    """
    with tempfile.TemporaryDirectory(prefix="kera-test-", dir="/dev/shm") as name:
        Path(name).chmod(0o1777)
        settings: dict[str, object] = {"shm_dir": name, "flush_delay_ms": 3_600_000}
        with keeping_cluster(tmp_path, arena_bytes=8 * MIB, segment_bytes=256 * KIB, **settings) as running:
            yield running


# --- planted files ---------------------------------------------------------------------------------------


BECOME_NOBODY = f"""
import ctypes, fcntl, mmap, os, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""
"""The beginning of programs that switch to another user: after their start, as that user may not be able to run
Python.
"""


def as_nobody(program: str, *arguments: object, stdin: bytes = b"") -> None:
    """Run a few lines of Python as another user."""
    command = [sys.executable, "-I", "-S", "-c", BECOME_NOBODY + program, *map(str, arguments)]
    subprocess.run(command, input=stdin, check=True, timeout=60)


WRITE = """
path, mode = sys.argv[1], int(sys.argv[2])
os.umask(0)
fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
with open(fd, "wb") as file:
    file.write(sys.stdin.buffer.read())
"""


def foreign_file(path: Path, content: bytes) -> None:
    as_nobody(WRITE, path, 0o666, stdin=content)


def wrong_owner(path: Path, content: bytes) -> None:
    as_nobody(WRITE, path, 0o600, stdin=content)


def link(path: Path, content: bytes) -> None:
    as_nobody(WRITE, path.with_suffix(".planted"), 0o666, stdin=content)
    as_nobody("os.symlink(*sys.argv[1:])", path.with_suffix(".planted"), path)


def pipe(path: Path, _: bytes) -> None:
    as_nobody("os.mkfifo(sys.argv[1], 0o666)", path)


def directory(path: Path, _: bytes) -> None:
    as_nobody("os.mkdir(sys.argv[1])", path)


def wrong_mode(path: Path, content: bytes) -> None:
    """An own file of another broker that others may access."""
    path.write_bytes(with_head(content, data_dir="/another"))
    path.chmod(0o666)


def own_head(**changed: object) -> Callable[[Path, bytes], None]:
    """An own file with an impossible head, as only a defect could leave it."""

    def plant(path: Path, content: bytes) -> None:
        path.touch(0o600)
        path.write_bytes(with_head(content, **changed))

    return plant


def nested_head(path: Path, content: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(b"[" * HEAD_BYTES + content[HEAD_BYTES:])


def foreign_head(path: Path, content: bytes) -> None:
    as_nobody(WRITE, path, 0o600, stdin=b"[" * HEAD_BYTES + content[HEAD_BYTES:])


PLANTED: dict[str, Callable[[Path, bytes], None]] = {
    "foreign file": foreign_file,
    "link": link,
    "pipe": pipe,
    "directory": directory,
    "wrong owner": wrong_owner,
    "wrong mode": wrong_mode,
    "foreign file with a wrong head": foreign_head,
    "own file with a nested head": nested_head,
    "own file with words for numbers": own_head(slots="8", slot_bytes=None),
    "own file with another format": own_head(format=1),
}
CONSUMED = {"own file with a nested head", "own file with words for numbers", "own file with another format"}
"""Orphans of this user: a start removes them."""


def with_head(memory: bytes, **changed: object) -> bytes:
    head = json.loads(memory[:HEAD_BYTES].rstrip(b"\0")) | changed
    return json.dumps(head).encode().ljust(HEAD_BYTES, b"\0") + memory[HEAD_BYTES:]


def state_of(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    content = hashlib.sha256(path.read_bytes()).digest() if stat.S_ISREG(status.st_mode) else b""
    return status.st_ino, status.st_mtime_ns, status.st_mode, content


def remove(path: Path) -> None:
    path.with_suffix(".planted").unlink(missing_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- the broker's reaction -----------------------------------------------------------------------------


async def filled(client: Client, stream: str) -> list[bytes]:
    """Acknowledged records of an unreplicated stream: they are only in memory."""
    await client.admin.create_stream(stream)
    values = [b"%s %d" % (stream.encode(), number) for number in range(RECORDS)]
    async with client.producer() as producer:
        await producer.prepare(stream)
        for pending in [producer.send(stream, value) for value in values]:
            await pending
    return values


async def read(client: Client, stream: str, **settings: object) -> list[bytes | None]:
    async with (
        asyncio.timeout(60),
        client.consumer(stream, start="earliest", end="latest", **settings) as consumer,  # type: ignore[arg-type]
    ):
        return [record.value async for record in consumer]


async def end(cluster: RunningCluster, how: str, own: str) -> None:
    arena = arena_of(cluster)
    if how == "host restarted":
        await asyncio.to_thread(lose_host, cluster)
    elif how == "stopped":
        os.kill(cluster.processes[BROKER], signal.SIGTERM)
        await until(lambda: BROKER not in cluster.processes)
    else:
        await asyncio.to_thread(cluster.kill, BROKER)
        if own == "gone":
            arena.unlink()
        elif own == "damaged":
            with arena.open("r+b") as file:
                file.write(b"[" * HEAD_BYTES)


async def one_case(cluster: RunningCluster, client: Client, how: str, own: str, what: str) -> str:
    """Plant `what` while the broker is down; returns the outcome of the next start: ``served`` or ``told``."""
    stream = f"{how} {own} {what}".replace(" ", "-")
    values = await filled(client, stream)
    arena = arena_of(cluster)
    forged = arena.read_bytes().replace(values[0], b"X" * len(values[0]))
    await end(cluster, how, own)
    names = [arena.parent / f"kera-{os.getuid()}-{name}.arena" for name in ("00000000", "z" * 32)]
    planted = [*names, *([] if arena.exists() else [arena])]
    try:
        for path in planted:
            PLANTED[what](path, forged)
        before = [state_of(path) for path in planted]
        await asyncio.to_thread(cluster.restart, BROKER)
        if what not in CONSUMED:
            assert [state_of(path) for path in planted] == before, "it was written to"
        assert arena_of(cluster) not in planted
        assert arena_of(cluster).stat().st_uid == os.geteuid()
        try:
            found = await read(client, stream)
        except DataLost:
            assert metric(cluster, "start_lost_memory") == 1
            assert await read(client, stream, on_data_lost="skip") == []
            return "told"
        assert found == values
        return "served"
    finally:
        for path in planted:
            remove(path)


EXPECTED = {
    ("stopped", "gone"): "served",  # a stopped broker has put everything on disk, and removed its memory
    ("killed", "there"): "served",
    ("killed", "gone"): "told",
    ("killed", "damaged"): "told",
    ("host restarted", "gone"): "told",
}


@contextlib.asynccontextmanager
async def connected(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as client:
        yield client


@as_root
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "own"), EXPECTED)
async def test_acknowledged_records_are_served_or_reported_lost_despite_planted_files(
    cluster: RunningCluster, how: str, own: str
) -> None:
    found = {}
    async with connected(cluster) as client:
        for what in PLANTED:
            found[what] = await one_case(cluster, client, how, own, what)
    assert found == dict.fromkeys(PLANTED, EXPECTED[how, own])


@as_root
async def test_a_restarted_broker_takes_its_own_memory_and_no_planted_file(
    cluster: RunningCluster,
) -> None:
    async with connected(cluster) as client:
        assert await one_case(cluster, client, "killed", "there", "foreign file") == "served"
        assert await one_case(cluster, client, "killed", "gone", "wrong owner") == "told"


@pytest.mark.slow
async def test_a_broker_does_not_start_with_memory_that_others_may_access(cluster: RunningCluster) -> None:
    async with connected(cluster) as client:
        values = await filled(client, "s")
        arena = arena_of(cluster)
        await asyncio.to_thread(cluster.kill, BROKER)
        arena.chmod(0o644)
        with pytest.raises(ChildStartError, match=f"cannot trust {arena}.*chmod 600"):
            await asyncio.to_thread(cluster.restart, BROKER)
        arena.chmod(0o600)
        await asyncio.to_thread(cluster.restart, BROKER)
        assert await read(client, "s") == values


# --- a reader and the shared memory -----------------------------------------------------------

HOLD = """
fd, size = int(sys.argv[1]), int(sys.argv[2])
done = []
def attempt(name, action):
    try:
        action()
    except OSError:
        return
    done.append(name)
attempt("write", lambda: os.pwrite(fd, b"X", 8192))
attempt("truncate", lambda: os.ftruncate(fd, 0))
attempt("reserve", lambda: os.posix_fallocate(fd, 0, size + 4096))
attempt("mode", lambda: os.fchmod(fd, 0o666))
attempt("mode by name", lambda: os.chmod(f"/proc/self/fd/{fd}", 0o666))
attempt("open to write", lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
attempt("map to write", lambda: mmap.mmap(fd, size))
memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
attempt("make a hole", lambda: memory.madvise(mmap.MADV_REMOVE, 0, 4096))
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if libc.mprotect(at, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0:
    done.append("make the mapping writable")
print(",".join(done) or "nothing", flush=True)
sys.stdin.readline()
fcntl.flock(fd, int(sys.argv[3]))
print("locked", flush=True)
sys.stdin.read()
"""


@as_root
@pytest.mark.parametrize("lock", [fcntl.LOCK_SH, pytest.param(fcntl.LOCK_EX, marks=pytest.mark.slow)])
async def test_a_reader_can_neither_change_the_memory_nor_make_the_broker_lose_it(
    cluster: RunningCluster, lock: int
) -> None:
    """The reader runs as another user, and has the descriptor that the broker has given it."""
    async with connected(cluster) as client:
        values = await filled(client, "s")
        sock, hello, fd, _ = await push_connect._greeting(cluster.ready[BROKER]["push_unix_path"], DEFAULT_DOMAIN, None)
        assert fd is not None
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", BECOME_NOBODY + HOLD, str(fd), str(hello.arena_bytes), str(lock),
            pass_fds=[fd],
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert reader.stdin is not None
        assert reader.stdout is not None
        try:
            async with asyncio.timeout(60):
                assert await reader.stdout.readline() == b"nothing\n"
                await asyncio.to_thread(cluster.kill, BROKER)
                reader.stdin.write(b"\n")
                assert await reader.stdout.readline() == b"locked\n"
            await asyncio.to_thread(cluster.restart, BROKER)
            assert (metric(cluster, "start_attached"), metric(cluster, "start_lost_memory")) == (1, 0)
            assert await read(client, "s") == values
        finally:
            os.close(fd)
            sock.close()
            reader.stdin.close()
            await reader.wait()
