"""The push channel over a real unix socket, with a real arena: data, refused readers, ends of connections."""

import array
import asyncio
import errno
import mmap
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kera.broker.serving import push_server
from kera.broker.serving.push import Push
from kera.broker.serving.push_server import PushServer
from kera.core.errors import PathNotWritable
from kera.core.format.chunk import iterate_chunks
from kera.core.push import (
    ALIVE_INTERVAL_MS,
    VERSION,
    Decoder,
    PushKind,
    Run,
    encode,
    encode_numbers,
    encode_taken,
    runs_of,
)
from kera.core.rpc import api
from kera.core.rpc.unix_socket import peer_user
from kera.v1 import push_pb2
from tests.unit.broker.push_support import lane
from tests.unit.broker.support import CHUNK_BYTES, STREAM_ID, Broker, Engine, chunk, stream_info

EPOCH = 12
TIMEOUT_S = 30.0


@pytest.fixture
def path() -> Iterator[Path]:
    """The path for the socket."""
    with tempfile.TemporaryDirectory(prefix="kera-") as directory:
        yield Path(directory) / "push.sock"


@pytest.fixture
async def broker(make_engine: Callable[..., Engine]) -> Broker:
    return Broker(make_engine(64), stream_info())


@asynccontextmanager
async def serving(
    broker: Broker, path: Path, uid_of: Callable[[socket.socket], int] = peer_user, **limits: Any
) -> AsyncIterator[PushServer]:
    push = Push(broker.streams, broker.arena, broker.engine.memory, broker.pushed, asyncio.get_running_loop())
    server = PushServer(push, broker.arena, uid_of=uid_of, **limits)
    try:
        server.bind(path)
        await server.start(3, EPOCH)
        yield server
    finally:
        await server.close()


@pytest.fixture
async def served(broker: Broker, path: Path) -> AsyncIterator[Broker]:
    """A broker that pushes to every reader that connects."""
    async with serving(broker, path):
        yield broker


class RawReader:
    """A reader with nothing between it and its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.descriptors: list[int] = []
        self.hello = push_pb2.PushHello()
        self.runs: list[Run] = []
        self.ends: dict[int, push_pb2.PushEnd] = {}
        self.signs_of_life = 0
        self.decoder = Decoder()

    @classmethod
    async def connect(cls, path: Path) -> "RawReader":
        """Connect and take the HELLO."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        reader = cls(sock)
        await asyncio.get_running_loop().sock_connect(sock, str(path))
        await reader.readable()
        data, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 8))
        for _, _, content in ancillary:
            numbers = array.array("i")
            numbers.frombytes(content)
            reader.descriptors += numbers
        ((kind, body),) = reader.decoder.feed(data)
        assert kind == PushKind.HELLO
        reader.hello.ParseFromString(body)
        return reader

    async def readable(self) -> None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.sock, readable.set)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await readable.wait()
        finally:
            loop.remove_reader(self.sock)

    async def take(self) -> bool:
        """Take the next messages; False at the end of the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
            except ConnectionResetError:
                return False
        for kind, body in self.decoder.feed(data):
            if kind == PushKind.ALIVE:
                self.signs_of_life += 1
            elif kind == PushKind.RUNS:
                self.runs += runs_of(body)
            else:
                assert kind == PushKind.END
                end = push_pb2.PushEnd.FromString(body)
                self.ends[end.lane] = end
        return bool(data)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert await self.take(), "the connection has ended"

    async def until_closed(self) -> None:
        while await self.take():
            pass

    async def say(self, data: bytes) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def subscribe(self, *lanes: push_pb2.PushLane, window_bytes: int = 0) -> None:
        message = push_pb2.PushSubscribe(consumer_group="raw", window_bytes=window_bytes, lanes=lanes)
        await self.say(encode(PushKind.SUBSCRIBE, message.SerializeToString()))

    @contextmanager
    def memory(self) -> Iterator[mmap.mmap]:
        """Map the arena."""
        (descriptor,) = self.descriptors
        with mmap.mmap(descriptor, self.hello.arena_bytes, prot=mmap.PROT_READ) as memory:
            yield memory

    def close(self) -> None:
        self.sock.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


@pytest.fixture
async def connect(path: Path) -> AsyncIterator[Callable[[], Any]]:
    """Connects readers to the server of the socket."""
    made: list[RawReader] = []

    async def connect() -> RawReader:
        made.append(await RawReader.connect(path))
        return made[-1]

    yield connect
    for reader in made:
        reader.close()


def fill(broker: Broker, start: int, count: int, **fields: Any) -> None:
    chunks = [chunk(2, sequence, **fields) for sequence in range(start, start + count)]
    assert not any(status.error.code for status in broker.append(*chunks))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)


# --- what a reader gets ------------------------------------------------------------------------------------


async def test_hello_describes_the_arena_and_passes_it_read_only(served: Broker, connect: Any) -> None:
    reader = await connect()
    hello, arena = reader.hello, served.arena
    (descriptor,) = reader.descriptors

    assert (hello.version, hello.broker_id, hello.broker_epoch) == (VERSION, 3, EPOCH)
    assert hello.alive_interval_ms == ALIVE_INTERVAL_MS
    assert hello.arena_path == str(arena.path)
    assert hello.arena_bytes == arena.path.stat().st_size == os.fstat(descriptor).st_size
    assert (hello.slots, hello.slot_bytes, hello.slots_at) == (64, 4096, arena.slot(0).arena_offset)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.write(descriptor, b"x")
    with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
        mmap.mmap(descriptor, hello.arena_bytes)
    with reader.memory() as memory:
        for index in range(hello.slots):
            at = hello.rows_at + index * hello.row_bytes
            assert int.from_bytes(memory[at : at + 8], "little") == arena.slot(index).generation


async def test_stored_and_new_chunks_lie_in_the_arena_where_their_runs_say(served: Broker, connect: Any) -> None:
    reader = await connect()
    fill(served, 0, 6, fill=b"a")
    await reader.subscribe(lane())
    await reader.until(lambda: len(reader.runs) == 2)
    fill(served, 6, 1, fill=b"b")
    fill(served, 7, 1, fill=b"b")
    await reader.until(lambda: sum(run.length_bytes for run in reader.runs) == 8 * CHUNK_BYTES)
    with reader.memory() as memory:
        pieces = [memory[run.arena_offset : run.arena_offset + run.length_bytes] for run in reader.runs]
    sequences = [header.sequence for piece in pieces for header, _ in iterate_chunks(memoryview(piece))]

    assert sequences == list(range(8))
    assert len(reader.runs) == 3, "what is appended in one round is one run"
    assert b"".join(pieces).count(b"a" * 896) == 6


async def test_the_broker_handles_releases_taken_bytes_and_cancels(served: Broker, connect: Any) -> None:
    reader = await connect()
    fill(served, 0, 4)
    await reader.subscribe(lane(), window_bytes=2 * CHUNK_BYTES)
    await reader.until(lambda: len(reader.runs) == 1)
    (run,) = reader.runs
    assert served.arena.slot(run.slot).leases == 1
    await reader.say(encode_taken(run.length_bytes))
    await reader.until(lambda: len(reader.runs) == 2)
    assert served.arena.slot(run.slot).leases == 2
    await reader.say(encode_numbers(PushKind.RELEASE, [run.slot, run.slot]))
    await until(lambda: served.arena.slot(run.slot).leases == 0)
    await reader.say(encode_numbers(PushKind.CANCEL, [1]))
    await reader.until(lambda: 1 in reader.ends)

    assert reader.ends[1].reason == push_pb2.PushEnd.CANCELLED


async def test_a_message_may_come_in_pieces(served: Broker, connect: Any) -> None:
    reader = await connect()
    fill(served, 0, 1)
    message = encode(PushKind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=[lane()]).SerializeToString())
    for byte in message:
        await reader.say(bytes([byte]))
        await asyncio.sleep(0)
    await reader.until(lambda: len(reader.runs) == 1)

    assert reader.runs[0].length_bytes == CHUNK_BYTES


# --- the end of a connection -------------------------------------------------------------------------------


async def test_a_closed_connection_frees_the_leases_of_its_reader(served: Broker, connect: Any) -> None:
    reader, other = await connect(), await connect()
    fill(served, 0, 5)
    for each in (reader, other):
        await each.subscribe(lane())
        await each.until(lambda each=each: len(each.runs) == 2)
    await served.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=STREAM_ID))
    assert served.arena.free_slots == 62
    reader.close()
    await until(lambda: served.pushed.connections == 1)
    assert [served.arena.slot(run.slot).leases for run in other.runs] == [1, 1]
    other.close()
    await until(lambda: served.pushed.connections == 0)

    assert served.arena.free_slots == 64
    assert served.pushed.subscriptions == 0


@pytest.mark.parametrize(
    "message",
    [
        b"\xff" * 8,
        b"\xff\xff\xff\x7f" + bytes([PushKind.SUBSCRIBE, 0, 0, 0]),
        encode(PushKind.RUNS, bytes(64)),
        encode(PushKind.SUBSCRIBE, b"\xff"),
        encode(PushKind.TAKEN, b"\xff" * 8),
        encode_numbers(PushKind.RELEASE, [0, 0]),
        encode_numbers(PushKind.RELEASE, [1 << 31]),
    ],
)
async def test_an_invalid_message_ends_the_connection_and_its_leases(
    served: Broker, connect: Any, message: bytes
) -> None:
    reader, other = await connect(), await connect()
    fill(served, 0, 1)
    await reader.subscribe(lane())
    await reader.until(lambda: len(reader.runs) == 1)
    assert served.arena.leased_slots == 1
    await reader.say(message + encode(PushKind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=[lane(9)]).SerializeToString()))
    await reader.until_closed()

    assert served.arena.leased_slots == 0
    assert (served.pushed.connections, served.pushed.subscriptions, len(reader.runs)) == (1, 0, 1)
    await other.subscribe(lane())
    await other.until(lambda: len(other.runs) == 1)


async def test_closing_the_server_ends_connections_and_leases_and_removes_the_socket(
    broker: Broker, path: Path, connect: Any
) -> None:
    async with serving(broker, path):
        reader = await connect()
        fill(broker, 0, 1)
        await reader.subscribe(lane())
        await reader.until(lambda: len(reader.runs) == 1)
    await reader.until_closed()

    assert broker.arena.leased_slots == 0
    assert broker.pushed.connections == 0
    assert not path.exists()


async def test_a_server_that_did_not_start_leaves_no_socket(broker: Broker, path: Path) -> None:
    push = Push(broker.streams, broker.arena, broker.engine.memory, broker.pushed, asyncio.get_running_loop())
    server = PushServer(push, broker.arena)
    server.bind(path)
    with socket.socket(socket.AF_UNIX) as sock:
        assert sock.connect_ex(str(path)) == errno.ECONNREFUSED
    await server.close()

    assert not path.exists()


# --- refused readers ---------------------------------------------------------------------------------------


async def test_the_socket_is_private_to_its_owner_and_replaces_only_a_dead_socket(
    broker: Broker, path: Path, connect: Any
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(broker, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await connect()).hello.broker_epoch == EPOCH
    path.write_text("mine")
    with pytest.raises(PathNotWritable, match="a file of another kind"):
        async with serving(broker, path):
            pass


@pytest.mark.parametrize("uid", [os.getuid() + 1, 65534])
async def test_a_reader_of_another_user_is_refused_before_anything_is_sent(
    broker: Broker, path: Path, uid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(broker, path, lambda _sock: uid):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, str(path))
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""

    assert (broker.pushed.refused, broker.pushed.connections) == (1, 0)
    assert f"another user was refused uid={uid}" in capsys.readouterr().err


@pytest.mark.parametrize("uid", sorted({0, os.getuid()}))
async def test_the_brokers_user_and_root_may_read(broker: Broker, path: Path, connect: Any, uid: int) -> None:
    async with serving(broker, path, lambda _sock: uid):
        assert (await connect()).hello.broker_id == 3

    assert broker.pushed.refused == 0


def test_the_kernel_names_the_user_of_a_connection() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_user(one) == os.getuid()


async def test_readers_beyond_the_limit_are_refused(broker: Broker, path: Path, connect: Any) -> None:
    assert push_server.CONNECTIONS_MAX == 1024
    async with serving(broker, path, connections_max=2):
        first, _ = await connect(), await connect()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, str(path))
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        first.close()
        await until(lambda: broker.pushed.connections == 1)
        assert (await connect()).hello.broker_id == 3

    assert broker.pushed.refused == 1


# --- back-pressure -----------------------------------------------------------------------------------------


async def test_a_reader_that_takes_no_messages_costs_a_bounded_buffer_and_catches_up_later(
    make_engine: Callable[..., Engine], path: Path, connect: Any
) -> None:
    broker = Broker(make_engine(8192), stream_info())
    small = 128 + 8
    async with serving(broker, path, write_buffer_bytes_max=4096) as server:
        reader = await connect()
        await reader.subscribe(*(lane(number) for number in range(64)))
        (connection,) = server.connections
        count = 0
        while not connection.paused:
            fill(broker, count, 1, size=small)
            count += 1
            for _ in range(3):
                await asyncio.sleep(0)
            assert count < 1000, "its messages pile up somewhere"
        runs = broker.pushed.runs
        for _ in range(50):
            fill(broker, count, 1, size=small)
            count += 1
            await asyncio.sleep(0)
        assert broker.pushed.runs == runs, "nothing more until it takes"
        taken = 0
        while taken < 64 * count * small:
            assert await reader.take()
            pushed = sum(run.length_bytes for run in reader.runs)
            await reader.say(encode_taken(pushed - taken))
            taken = pushed

    for number in range(64):
        mine = [run for run in reader.runs if run.lane == number]
        ends = [(run.group_id, run.segment_id, run.offset + run.length_bytes) for run in mine]
        assert ends == sorted(set(ends))


# --- signs of life -----------------------------------------------------------------------------------------


async def test_an_idle_reader_gets_signs_of_life(broker: Broker, path: Path, connect: Any) -> None:
    async with serving(broker, path, alive_interval_ms=5):
        reader = await connect()
        assert reader.hello.alive_interval_ms == 5
        await reader.until(lambda: reader.signs_of_life >= 3)


async def test_a_reader_that_does_not_finish_a_message_is_disconnected(
    broker: Broker, path: Path, connect: Any
) -> None:
    async with serving(broker, path, alive_interval_ms=5, message_s_max=0.05):
        reader, other = await connect(), await connect()
        await reader.say(encode_taken(0)[:-1])
        await reader.until_closed()
        seen = other.signs_of_life
        await other.until(lambda: other.signs_of_life > seen)
