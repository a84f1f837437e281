"""Push: which users get the memory of a domain, which get copies, and what follows when they lose rights."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.broker.serving.push import Push
from kera.broker.serving.push_server import PushServer
from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.cluster.push import PushChannel, Reason, SubscriptionEnd
from kera.client.cluster.push_connect import connect
from kera.core.access.accounts import Token
from kera.core.access.credentials import Credentials
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.base.blocks import FileCalls
from kera.core.base.ids import EARLIEST, EntryId
from kera.core.errors import (
    AuthenticationFailed,
    InternalError,
    InvalidArgument,
    NotAllowed,
    Unavailable,
    UnknownStream,
)
from kera.core.push import STRANGER_BYTES_MAX, PushKind, encode, encode_numbers
from kera.core.rpc import api
from kera.core.rpc.unix_socket import ANY_USER, OWN_USER
from kera.server.access.guard import Guard
from kera.v1 import access_pb2, push_pb2
from tests.unit.broker.support import CHUNK_BYTES, Broker, Engine, chunk, stream_info
from tests.unit.core.access.support import PASSWORD, Now, guard, rule, table, user

TIMEOUT_S = 30.0
ORDERS, PAYMENTS = 7, 8
SOMEBODY = 12_345
"""The id of a host user without a name."""
READ = Operation.READ
ALICE = Credentials(user="alice", password=lambda: PASSWORD)
TOKEN = Token("t1", "secret")
"""A token of alice."""


@pytest.fixture
def path() -> Iterator[Path]:
    """The path for the socket."""
    with tempfile.TemporaryDirectory(prefix="kera-") as directory:
        yield Path(directory) / "push.sock"


@dataclass
class Served:
    """A broker with stream `ORDERS` in domain eu, and `PAYMENTS` in the default domain."""

    broker: Broker
    guard: Guard
    path: Path
    now: Now
    uid: int = SOMEBODY
    version: int = 1
    sequences: dict[int, int] = field(default_factory=lambda: {ORDERS: 0, PAYMENTS: 0})

    def allow(self, *rules: access_pb2.AccessRule, **changes: Any) -> None:
        """Replace the rules."""
        self.version += 1
        users = changes.pop("users", [user("alice"), user("bob")])
        self.guard.apply(table(self.version, users=users, rules=rules, **changes), 1)

    def fill(self, stream_id: int, count: int = 1, fill: bytes = b"x") -> None:
        start = self.sequences[stream_id]
        self.sequences[stream_id] += count
        chunks = [chunk(2, number, stream_id=stream_id, fill=fill) for number in range(start, start + count)]
        assert not any(status.error.code for status in self.broker.append(*chunks))

    async def connect(self, domain: str = "eu", introduction: Credentials | None = ALICE) -> PushChannel:
        return await connect(
            str(self.path), timeout_s=TIMEOUT_S, domain=domain, introduction=introduction, return_delay_s=0.001
        )


@asynccontextmanager
async def serving(broker: Broker, path: Path, mode: int = ANY_USER, **limits: Any) -> AsyncIterator[Served]:
    loop = asyncio.get_running_loop()
    now = Now()
    with guard(now, look_s=60) as door:
        served = Served(broker, door, path, now)

        def uid_of(_: socket.socket) -> int:
            return served.uid

        push = Push(broker.streams, broker.arena, broker.engine.memory, broker.pushed, loop)
        server = PushServer(push, broker.arena, uid_of=uid_of, guard=door, mode=mode, **limits)
        try:
            server.bind(path)
            await server.start(3, 12)
            yield served
        finally:
            await server.close()


@pytest.fixture
async def broker(make_engine: Callable[..., Engine]) -> Broker:
    return Broker(make_engine(64), stream_info(ORDERS, memory_domain="eu"), stream_info(PAYMENTS))


@pytest.fixture
async def served(broker: Broker, path: Path) -> AsyncIterator[Served]:
    async with serving(broker, path) as served:
        yield served


@dataclass
class Reader:
    """A reader of a stream from its start."""

    runs: list[Fetched] = field(default_factory=list)
    ends: list[SubscriptionEnd] = field(default_factory=list)

    @classmethod
    def of(cls, channel: PushChannel, stream_id: int) -> Reader:
        reader = cls()
        wanted = Wanted(EntryId(stream_id, 0, 0), EARLIEST, None)
        channel.subscriber("group", 1 << 20).open(wanted, reader.runs.append, reader.ends.append)
        return reader

    async def has(self, size: int) -> None:
        await until(lambda: sum(run.size_bytes for run in self.runs) == size)

    async def end(self) -> SubscriptionEnd:
        await until(lambda: bool(self.ends))
        return self.ends[0]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_user_that_may_read_a_domain_reads_its_streams_in_place(served: Served) -> None:
    served.allow(rule("user:alice", "domain:eu", READ), rule("user:alice", "stream:orders", READ))
    served.fill(ORDERS, 3)
    channel = await served.connect()
    reader = Reader.of(channel, ORDERS)
    await reader.has(3 * CHUNK_BYTES)

    assert all(run.slot is not None for run in reader.runs)
    assert not reader.ends
    await channel.close()


@pytest.mark.parametrize("rules", [[], [rule("user:alice", "stream:orders", READ)]], ids=["nothing", "stream"])
async def test_a_user_that_may_not_read_a_domain_is_refused(served: Served, rules: list[access_pb2.AccessRule]) -> None:
    served.allow(*rules)
    with pytest.raises(NotAllowed, match="user:alice may not read domain:eu"):
        await served.connect()


async def test_an_unexpected_error_of_the_authentication_is_sent_to_the_client(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(served.guard, "service", lambda: {api.AUTHENTICATE: fail})
    with capture_logs(), pytest.raises(InternalError, match="a defect"):
        await served.connect()


async def test_a_reader_of_a_domain_is_not_pushed_streams_that_it_may_not_read(served: Served) -> None:
    served.allow(rule("user:alice", "domain:eu", READ))
    served.fill(ORDERS)
    channel = await served.connect()
    end = await Reader.of(channel, ORDERS).end()

    assert end.reason is Reason.FAILED
    assert isinstance(end.error, UnknownStream)
    await channel.close()


async def test_a_subscription_to_a_stream_of_another_domain_ends_with_pull(served: Served) -> None:
    everything = [rule("user:alice", each, READ) for each in ("domain:eu", "stream:orders", "stream:payments")]
    served.allow(*everything)
    served.fill(PAYMENTS)
    channel = await served.connect()
    end = await Reader.of(channel, PAYMENTS).end()

    assert end.reason is Reason.PULL
    await channel.close()


@pytest.mark.parametrize(
    ("credentials", "error"),
    [
        (None, "no rule allows it|not authenticated|authenticate"),
        (Credentials(user="alice", password=lambda: "wrong"), "password"),
    ],
)
async def test_an_unauthenticated_user_is_refused(served: Served, credentials: Credentials | None, error: str) -> None:
    served.allow(rule("user:alice", "domain:eu", READ))
    with pytest.raises((AuthenticationFailed, NotAllowed), match=error):
        await served.connect(introduction=credentials)


async def test_other_host_users_are_refused_unless_the_broker_serves_any_user(broker: Broker, path: Path) -> None:
    async with serving(broker, path, OWN_USER) as served:
        served.allow(rule("user:alice", "domain:eu", READ))
        with pytest.raises(Unavailable, match="unix_socket_users"):
            await served.connect()
        assert path.stat().st_mode & 0o777 == 0o600
    async with serving(broker, path):
        assert path.stat().st_mode & 0o777 == 0o666


async def test_the_brokers_own_user_reads_each_domain_over_its_own_connection(served: Served) -> None:
    served.uid = 0
    for stream_id in (ORDERS, PAYMENTS):
        served.fill(stream_id, 2)
    for domain, stream_id in (("eu", ORDERS), ("default", PAYMENTS)):
        channel = await served.connect(domain, introduction=None)
        await Reader.of(channel, stream_id).has(2 * CHUNK_BYTES)
        await channel.close()


async def test_no_memory_is_made_for_a_domain_without_streams(served: Served) -> None:
    served.allow(rule("user:alice", "domain:*", READ))
    with pytest.raises(Unavailable, match="no stream of memory domain 'us'"):
        await served.connect("us")

    assert {slot.file.domain for slot in served.broker.arena.slots()} == {"default"}


@pytest.mark.parametrize(("uid", "domain"), [(SOMEBODY, "eu"), (0, "eu"), (0, "default")])
async def test_a_domain_without_room_is_unavailable_until_there_is_room(
    served: Served, uid: int, domain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.allow(rule("user:alice", "domain:eu", READ))
    served.uid = uid
    arena = served.broker.arena
    arena.renew(domain)
    with monkeypatch.context() as no_room:
        no_room.setattr(arena, "_calls", FileCalls(reserve=_fails))
        with pytest.raises(Unavailable, match="no file in"):
            await served.connect(domain)
    channel = await served.connect(domain)
    await channel.close()


async def test_a_user_with_a_quota_cannot_map_a_domain(served: Served) -> None:
    served.allow(rule("user:alice", "domain:eu", READ), default_quota=access_pb2.Quota(bytes_out_per_s=1 << 20))
    with pytest.raises(NotAllowed, match="quota"):
        await served.connect()


@pytest.mark.parametrize("lost", ["right", "user", "password"])
async def test_a_user_that_loses_a_domain_sees_no_new_data_in_its_mapped_memory(served: Served, lost: str) -> None:
    bob = [rule("user:bob", each, READ) for each in ("domain:eu", "stream:orders")]
    alice = [rule("user:alice", each, READ) for each in ("domain:eu", "stream:orders")]
    served.allow(*alice, *bob)
    served.fill(ORDERS, 2, fill=b"before")
    theirs, others = await served.connect(), await served.connect(introduction=_of("bob"))
    reader = Reader.of(theirs, ORDERS)
    await until(lambda: bool(reader.runs))
    mapped = theirs._memory
    if lost == "right":
        served.allow(*bob)
    else:
        users = [user("bob"), *([user("alice", version=2)] if lost == "password" else [])]
        served.allow(*bob, *(alice if lost == "password" else []), users=users)
    await until(lambda: theirs.closed and others.closed)
    served.fill(ORDERS, 20, fill=b"after!")

    assert b"before" in bytes(mapped)
    assert b"after!" not in bytes(mapped)
    again = await served.connect(introduction=_of("bob"))
    reader = Reader.of(again, ORDERS)
    assert (await reader.end()).reason is Reason.PULL, "what was there before is not in the memory that it has now"
    assert b"after!" in bytes(again._memory)
    await again.close()


@pytest.mark.parametrize("shown", ["token", "session"])
async def test_memory_mapped_with_a_stolen_credential_gets_no_new_data_once_that_is_invalid(
    broker: Broker, path: Path, shown: str
) -> None:
    """Even after the thief disconnects: the token expires, and the password behind the session changes."""
    async with serving(broker, path, alive_interval_ms=1) as served:
        rules = [rule("user:alice", "domain:eu", READ)]
        served.allow(*rules, tokens=[_token_for(600)])
        alice = served.guard.authenticator.known(Identity("alice", how="password", password_version=1))
        session, _ = served.guard.authenticator.session_for(alice)
        stolen = str(TOKEN) if shown == "token" else session
        channel = await served.connect(introduction=Credentials(token=lambda: stolen))
        mapped, file = channel._memory, broker.arena.file("eu")
        await channel.close()
        served.fill(ORDERS, 2, fill=b"before")
        served.now.s += 3_700
        if shown == "session":
            served.allow(*rules, users=[user("alice", version=2)])
        await until(lambda: broker.arena.is_renewed(file))
        served.fill(ORDERS, 20, fill=b"after!")

        assert b"before" in bytes(mapped)
        assert b"after!" not in bytes(mapped)


async def test_memory_is_kept_while_the_token_is_renewed_in_time(served: Served) -> None:
    mine = rule("user:alice", "domain:eu", READ)
    served.allow(mine, tokens=[_token_for(10)])
    channel = await served.connect(introduction=Credentials(token=lambda: str(TOKEN)))
    file = served.broker.arena.file("eu")
    for left_s, renewed in ((5, False), (20, False), (3, False), (0, True)):
        served.now.s += 9
        served.allow(mine, tokens=[_token_for(left_s)])
        assert served.broker.arena.is_renewed(file) == renewed
    await channel.close()


async def test_a_user_that_gets_a_quota_sees_no_new_data_in_its_mapped_memory(served: Served) -> None:
    rules = [rule("user:alice", each, READ) for each in ("domain:eu", "stream:orders")]
    served.allow(*rules)
    channel = await served.connect()
    served.allow(*rules, default_quota=access_pb2.Quota(bytes_out_per_s=1 << 20))
    await until(lambda: channel.closed)
    served.fill(ORDERS, 2, fill=b"after!")

    assert b"after!" not in bytes(channel._memory)


async def test_losing_another_right_leaves_the_memory_of_a_domain_as_it_is(served: Served) -> None:
    mine = [rule("user:alice", each, READ) for each in ("domain:eu", "stream:orders")]
    served.allow(*mine, rule("user:alice", "stream:payments", READ))
    served.fill(ORDERS)
    channel = await served.connect()
    file = served.broker.arena.file("eu")
    served.allow(*mine)

    assert served.broker.arena.file("eu") is file
    assert not channel.closed
    await channel.close()


async def test_a_stream_moved_to_another_domain_stores_new_data_there_only(served: Served) -> None:
    served.uid = 0
    served.fill(ORDERS, 2, fill=b"before")
    eu = await served.connect("eu", introduction=None)
    info = stream_info(ORDERS, memory_domain="us")
    info.config_version = 2
    served.broker.streams.open(info, 3, 9)
    served.fill(ORDERS, 2, fill=b"after!")
    us = await served.connect("us", introduction=None)

    assert b"before" in bytes(eu._memory)
    assert b"after!" not in bytes(eu._memory)
    assert b"after!" in bytes(us._memory)
    await us.close()
    await eu.close()


# --- hostile peers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        encode(PushKind.SUBSCRIBE, push_pb2.PushSubscribe().SerializeToString()),
        encode_numbers(PushKind.RELEASE, [0]),
        encode(PushKind.HELLO, b""),
        encode(PushKind.AUTHENTICATE, b"\xff\xff"),
        encode(PushKind.OPEN, b"\xff"),
        encode(PushKind.AUTHENTICATE, bytes(STRANGER_BYTES_MAX + 1))[:16],
        2 * encode(PushKind.AUTHENTICATE, access_pb2.AuthenticateRequest(token="x").SerializeToString()),
    ],
    ids=["subscribe", "release", "hello", "no request", "no open", "large", "twice at once"],
)
async def test_a_stranger_that_breaks_the_protocol_is_disconnected(served: Served, said: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, str(served.path))
        await loop.sock_sendall(sock, said)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    if not await loop.sock_recv(sock, 1 << 16):
                        break
                except ConnectionResetError:
                    break


async def test_a_silent_stranger_is_disconnected_after_a_while(broker: Broker, path: Path) -> None:
    async with serving(broker, path, stranger_s_max=0.05) as served:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, str(served.path))
            async with asyncio.timeout(TIMEOUT_S):
                while await loop.sock_recv(sock, 1 << 16):
                    pass


async def test_idle_connections_of_one_user_do_not_keep_others_out(broker: Broker, path: Path) -> None:
    async with serving(broker, path, connections_max=16) as served:
        served.allow(rule("user:alice", "domain:eu", READ))
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            for _ in range(40):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.setblocking(False)
                await loop.sock_connect(sock, str(path))
                with suppress(ConnectionError):  # disconnected at once
                    await loop.sock_recv(sock, 1)
            served.uid = SOMEBODY + 1
            channel = await served.connect()
            served.uid = 0
            own = await served.connect("default", introduction=None)
            await own.close()
            await channel.close()


async def test_some_connections_are_reserved_for_the_brokers_own_user(broker: Broker, path: Path) -> None:
    async with serving(broker, path, connections_max=4) as served:
        served.allow(rule("user:alice", "domain:eu", READ))
        channels = [await served.connect() for _ in range(2)]
        with pytest.raises(Unavailable):
            await served.connect()
        served.uid = 0
        channels += [await served.connect("default", introduction=None) for _ in range(2)]
        for channel in channels:
            await channel.close()


@pytest.mark.parametrize("uid", [0, SOMEBODY])
async def test_opening_a_second_domain_closes_the_connection(served: Served, uid: int) -> None:
    served.allow(rule("user:alice", "domain:*", READ), rule("user:alice", "stream:*", READ))
    served.uid = uid
    channel = await served.connect()
    channel._send(encode(PushKind.OPEN, push_pb2.PushOpen(memory_domain="default").SerializeToString()))
    await until(lambda: channel.closed)


async def test_an_invalid_domain_name_is_refused(served: Served) -> None:
    served.allow(rule("user:alice", "domain:*", READ))
    for name in ("a*", "../eu", "x" * 10_000):
        with pytest.raises((Unavailable, NotAllowed, InvalidArgument)):
            await served.connect(name)


def _of(name: str) -> Credentials:
    return Credentials(user=name, password=lambda: PASSWORD)


def _fails(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _token_for(seconds: int) -> access_pb2.TokenRecord:
    return access_pb2.TokenRecord(token_id="t1", digest=TOKEN.digest, owner="alice", expires_in_ms=seconds * 1000)
