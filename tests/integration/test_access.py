"""A cluster with security on: what each user may do, and how a change of rights takes effect."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from kera.client import Client
from kera.core.access.rights import Operation
from kera.core.credential_settings import secure
from kera.core.errors import AuthenticationFailed, KeraError, NotAllowed, Uncertain, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.method import call
from kera.core.runtime import MACHINE
from kera.v1 import access_pb2 as messages
from kera.v1 import backup_pb2, broker_pb2, coordinator_pb2
from tests.integration.go_client import GoClient
from tests.integration.secured_cluster import PASSWORD, Secured
from tests.integration.support import until

pytestmark = pytest.mark.timeout(180)
VALUES = [b"%d" % number for number in range(1000)]
Transport = Literal["tcp", "grpc", "unix", "auto"]
REVOKED_S = 2.0
"""A revoked right has no effect any more after this time."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        secured = Secured(tmp_path_factory.mktemp("access"), stack)
        asyncio.run(_make_users(secured))
        yield secured


async def _make_users(secured: Secured) -> None:
    await secured.make_user("admin")
    await secured.make_user("boss", "boss")
    await secured.make_user("alice")


@pytest.fixture
async def admin(secured: Secured) -> AsyncIterator[Client]:
    async with await secured.client("admin") as client:
        yield client


async def read_all(client: Client, stream: str) -> list[bytes]:
    return [
        value
        async for chunk in client.consumer(stream, start="earliest", end="latest").batches()
        for value in chunk.batch["value"].to_pylist()
    ]


async def write_one(client: Client, stream: str) -> None:
    async with client.producer() as producer:
        await producer.prepare(stream)
        await producer.send(stream, b"one")


async def consume_one(client: Client, group: str, stream: str) -> None:
    async with client.group_consumer(group, stream) as consumer:
        async for _ in consumer:
            return


@pytest.mark.parametrize(
    "transport", ["tcp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("grpc", "unix", "auto"))]
)
async def test_a_user_can_write_read_and_consume_with_the_rights_for_it(
    secured: Secured, admin: Client, transport: Transport
) -> None:
    stream, group = f"mine-{transport}", f"group-{transport}"
    await admin.admin.create_stream(stream, streamlets=2, replication=1)
    await secured.grant("user:alice", f"stream:{stream}", Operation.READ, Operation.WRITE)
    await secured.grant("user:alice", f"group:{group}", Operation.USE)
    async with await secured.client("alice", transport=transport) as alice:
        async with alice.producer() as producer:
            await producer.prepare(stream)
            for value in VALUES:
                producer.send(stream, value)
        assert sorted(await read_all(alice, stream)) == sorted(VALUES)
        async with alice.group_consumer(group, stream) as consumer:
            count = 0
            async for _ in consumer:
                count += 1
                if count == len(VALUES):
                    break


async def test_a_user_without_a_right_is_refused(secured: Secured, admin: Client) -> None:
    await admin.admin.create_stream("seen", streamlets=1)
    await write_one(admin, "seen")
    await admin.admin.create_stream("unseen", streamlets=1)
    await secured.grant("user:alice", "stream:seen", Operation.DESCRIBE)
    async with await secured.client("alice", transport="tcp", retry_timeout_ms=500) as alice:
        names = [each.name for each in await alice.admin.list_streams()]
        assert "seen" in names
        assert "unseen" not in names
        with pytest.raises(UnknownStream, match="there is no stream 'unseen'"):
            await alice.admin.describe_stream("unseen")
        with pytest.raises(NotAllowed, match="may not delete stream:seen"):
            await alice.admin.delete_stream("seen")
        with pytest.raises(NotAllowed, match="may not create stream:new"):
            await alice.admin.create_stream("new")
        with pytest.raises(NotAllowed, match="may not read stream:seen"):
            await read_all(alice, "seen")
        with pytest.raises(NotAllowed, match="may not write stream:seen"):
            await write_one(alice, "seen")
        async with alice.producer() as producer:
            with pytest.raises(NotAllowed, match="may not write stream:seen"):
                await producer.punctuate("seen", 5)
        with pytest.raises(NotAllowed, match="may not use group:others"):
            await consume_one(alice, "others", "seen")
    assert await read_all(admin, "seen") == [b"one"]


@pytest.mark.parametrize("transport", ["tcp", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_clients_that_do_not_authenticate_are_refused(secured: Secured, transport: Transport) -> None:
    for wrong, text in (
        ({}, "nobody has authenticated"),
        ({"user": "alice", "password": "wrong horse battery"}, "the user name or the password is not right"),
        ({"user": "nobody-here", "password": PASSWORD}, "the user name or the password is not right"),
        ({"token": "kera_0123_4567"}, "the token is not known"),
    ):
        settings = secured.settings(transport=transport, retry_timeout_ms=300, **wrong)
        with pytest.raises(AuthenticationFailed, match=text):
            async with await Client.connect(secured.cluster.bootstrap, settings) as client:
                await client.admin.list_streams()


async def test_a_super_user_cannot_call_the_methods_of_daemons(secured: Secured) -> None:
    ready = secured.cluster.ready
    calls: list[tuple[str, Any, Any]] = [
        ("broker-1", broker_pb2.DropStreamRequest(stream_id=1), api.DROP_STREAM),
        ("backup-1", backup_pb2.ListReplicasRequest(broker_id=1), api.LIST_REPLICAS),
        ("coordinator", coordinator_pb2.HeartbeatRequest(broker_id=1), api.HEARTBEAT),
    ]
    for name, request, method in calls:
        channel = secure(MACHINE, secured.settings(user="admin", password=PASSWORD)).channel(
            ready[name]["grpc_address"]
        )
        with pytest.raises(NotAllowed, match="serves daemons of the cluster only, and user:admin is not a daemon"):
            await call(channel, method, request, timeout_s=5)
        await channel.close()


async def test_an_unauthenticated_frame_connection_may_only_authenticate(secured: Secured) -> None:
    address = secured.cluster.ready["broker-1"]["frames_address"]
    channel = await FrameChannel.connect_tcp(address, timeout_s=5, tls=secured.tls)
    with pytest.raises(AuthenticationFailed, match="nobody has authenticated over this connection"):
        await call(channel, api.LIST_GROUPS, broker_pb2.ListGroupsRequest(stream_id=1), timeout_s=5)
    large = messages.AuthenticateRequest(token="x" * (65 << 10))
    with pytest.raises(KeraError):
        await call(channel, api.AUTHENTICATE, large, timeout_s=5)
    await channel.close()


class Writing:
    """Writes records of alice, one after the other, until one is refused."""

    def __init__(self, client: Client, stream: str) -> None:
        self.client = client
        self.stream = stream
        self.acknowledged = 0
        self.last_s = 0.0
        self.error: KeraError | None = None

    async def run(self) -> None:
        try:
            async with self.client.producer() as producer:
                await producer.prepare(self.stream)
                while True:
                    await producer.send(self.stream, b"%d" % self.acknowledged)
                    self.acknowledged += 1
                    self.last_s = time.monotonic()
        except KeraError as error:
            self.error = error


class Reading:
    """Reads a stream for alice until the reads are refused."""

    def __init__(self, client: Client, stream: str) -> None:
        self.client = client
        self.stream = stream
        self.records = 0
        self.last_s = 0.0
        self.error: KeraError | None = None

    async def run(self) -> None:
        try:
            async for chunk in self.client.consumer(self.stream, start="earliest").batches():
                self.records += chunk.batch.num_rows
                self.last_s = time.monotonic()
        except KeraError as error:
            self.error = error


@pytest.mark.parametrize(
    ("what", "transport"),
    [
        ("right", "tcp"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("right", "grpc"), ("user", "tcp"), ("user", "grpc"))
        ),
    ],
)
async def test_revoking_a_right_or_a_user_ends_its_reads_and_writes(
    secured: Secured, admin: Client, transport: Transport, what: str
) -> None:
    stream, name = f"revoked-{what}-{transport}", f"r-{what}-{transport}"
    await secured.make_user(name)
    await admin.admin.create_stream(stream, streamlets=1, replication=1)
    rule = await secured.grant(f"user:{name}", f"stream:{stream}", Operation.READ, Operation.WRITE)
    never: Any = {"transport": transport, "retry_timeout_ms": 1000}
    async with (
        await secured.client(name, **never) as one,
        await secured.client(name, **never) as other,
        admin.producer() as producer,
    ):
        await producer.prepare(stream)
        writing, reading = Writing(one, stream), Reading(other, stream)
        tasks = [asyncio.create_task(writing.run()), asyncio.create_task(reading.run())]
        await until(lambda: writing.acknowledged > 20 and reading.records > 20)
        if what == "right":
            await secured.revoke(rule)
        else:
            await secured.ask(api.DELETE_USER, messages.DeleteUserRequest(name=name))
        over_s = time.monotonic()
        while not all(task.done() for task in tasks):  # the reader must not see these
            await producer.send(stream, b"secret")
        assert writing.last_s <= over_s + REVOKED_S
        assert reading.last_s <= over_s + REVOKED_S
        refused = NotAllowed | UnknownStream | AuthenticationFailed
        assert isinstance(reading.error, refused), reading.error
        assert isinstance(writing.error, refused | Uncertain), writing.error  # a record in flight may be stored
    written = await read_all(admin, stream)
    assert len(written) - written.count(b"secret") <= writing.acknowledged + 1
    assert reading.records <= written.index(b"secret")


async def test_a_narrowed_token_works_for_its_stream_only_until_it_is_revoked(secured: Secured, admin: Client) -> None:
    for stream in ("token-in", "token-out"):
        await admin.admin.create_stream(stream, streamlets=1)
        await secured.grant("user:alice", f"stream:{stream}", Operation.READ, Operation.WRITE)
    async with await secured.client("alice") as alice:
        issued = await alice.access.issue_token(["stream:token-in"])
        settings = secured.settings(token=issued.secret, retry_timeout_ms=500, transport="tcp")
        async with await Client.connect(secured.cluster.bootstrap, settings) as client:
            assert [each.name for each in await client.admin.list_streams()] == ["token-in"]
            await write_one(client, "token-in")
            assert await read_all(client, "token-in") == [b"one"]
            with pytest.raises(UnknownStream):
                await read_all(client, "token-out")
            with pytest.raises(NotAllowed, match="cannot get another one"):
                await client.access.issue_token()
            assert (await client.access.renew_token(issued.token_id)).expires_in_ms > 0
            assert not (await alice.access.revoke_token(issued.token_id)).untold
            with pytest.raises(AuthenticationFailed, match="the token is not known"):
                await client.admin.list_streams()


@pytest.mark.slow
@pytest.mark.timeout(300)  # all that the client is made of may have to be compiled
async def test_the_go_client_authenticates_with_a_token_over_tls(
    go: GoClient, secured: Secured, admin: Client, tmp_path: Path
) -> None:
    await admin.admin.create_stream("from-go", streamlets=2)
    await secured.grant("user:alice", "stream:from-go", Operation.READ, Operation.WRITE)
    token = tmp_path / "token"
    over_tls = ("-stream", "from-go", "-timeout", "5s", "-tls-ca", str(secured.ca))
    async with await secured.client("alice") as alice:
        issued = await alice.access.issue_token(["stream:from-go"])
        token.write_text(issued.secret)
        shown = (*over_tls, "-token-file", str(token))
        code, _, errors = await go.run("kera-produce", secured.cluster.bootstrap, *shown, stdin=b"a\tone\nb\ttwo\n")
        assert code == 0, errors
        records = await go.read(secured.cluster.bootstrap, *shown[1:])
        assert sorted(each.value or b"" for each in records) == [b"one", b"two"]
        await alice.access.revoke_token(issued.token_id)
    for arguments, problem in (
        (shown, "the token is not known"),
        (over_tls, "(authentication_failed)"),
        (over_tls[:-2], "coordinator"),
    ):
        code, _, errors = await go.run("kera-consume", secured.cluster.bootstrap, *arguments)
        assert code == 1
        assert problem in errors


async def test_users_and_rules_survive_a_restart_of_the_coordinator(secured: Secured, admin: Client) -> None:
    await admin.admin.create_stream("lasting", streamlets=1)
    await secured.grant("user:alice", "stream:lasting", Operation.WRITE)
    before = await secured.ask(api.LIST_RIGHTS, messages.ListRightsRequest())
    secured.cluster.restart("coordinator")
    assert await secured.ask(api.LIST_RIGHTS, messages.ListRightsRequest()) == before
    async with await secured.client("alice") as alice:
        await write_one(alice, "lasting")


async def test_a_restarted_broker_gets_the_rules(secured: Secured, admin: Client) -> None:
    stream = await admin.admin.create_stream("told", streamlets=1, replication=1)
    await secured.grant("user:alice", "stream:told", Operation.WRITE)
    secured.cluster.restart(f"broker-{stream.assignments[0].broker_id}")
    async with await secured.client("alice") as alice:
        await write_one(alice, "told")
    assert await read_all(admin, "told") == [b"one"]


async def test_a_user_may_change_only_its_own_password(secured: Secured) -> None:
    await secured.make_user("carol")
    async with await secured.client("carol") as carol:
        with pytest.raises(NotAllowed):
            await carol.access.set_password("alice", PASSWORD)
        with pytest.raises(NotAllowed):
            await carol.access.set_roles("carol", ["boss"])
        assert not (await carol.access.set_password("carol", "another password")).untold
    with pytest.raises(AuthenticationFailed):
        async with await secured.client("carol", retry_timeout_ms=300) as client:
            await client.admin.list_streams()
    settings = secured.settings(user="carol", password="another password")
    async with await Client.connect(secured.cluster.bootstrap, settings) as client:
        await client.admin.list_streams()


async def test_listing_users_reveals_no_password_verifiers(secured: Secured) -> None:
    users = (await secured.ask(api.LIST_USERS, messages.ListUsersRequest())).users
    assert {"admin", "alice"} <= {user.name for user in users}
    assert not any(user.scram.salt or user.scram.stored_key or user.scram.server_key for user in users)


async def test_metrics_require_the_right_to_describe_the_cluster(secured: Secured) -> None:
    context = secured.tls.client_context()

    def get(name: str, path: str, token: str = "") -> tuple[int, str]:
        request = urllib.request.Request(f"https://{secured.cluster.ready[name]['metrics_address']}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, context=context, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    await secured.make_user("watcher")
    async with await secured.client("watcher") as client:
        token = await client.access.issue_token()
    for name in ("coordinator", "broker-1", "backup-1"):
        assert await asyncio.to_thread(get, name, "/livez") == (200, "live\n")
        assert (await asyncio.to_thread(get, name, "/readyz"))[1] == "ready\n"
        assert (await asyncio.to_thread(get, name, "/metrics"))[0] == 403
        assert (await asyncio.to_thread(get, name, "/metrics", "kera_a_b"))[0] == 401
        assert (await asyncio.to_thread(get, name, "/metrics", token.secret))[0] == 403
    await secured.grant("user:watcher", "cluster", Operation.DESCRIBE)
    for name in ("coordinator", "broker-1", "backup-1"):
        status, text = await asyncio.to_thread(get, name, "/metrics", token.secret)
        assert status == 200
        assert "kera_access_denied_total" in text
        assert "kera_access_version 0.0" not in text  # the daemon has received the rules
        assert "[+] state: it serves" in (await asyncio.to_thread(get, name, "/readyz", token.secret))[1]
