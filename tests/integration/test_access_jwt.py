"""A cluster that accepts an issuer's JSON web tokens, and fetches the issuer's keys."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kera.client import Client
from kera.client.admin.daemons import describe_daemon
from kera.core.access.rights import Operation
from kera.core.credential_settings import secure
from kera.core.errors import AuthenticationFailed, KeraError, NotAllowed, Unavailable, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_options import AUTHORIZATION, BEARER
from kera.core.rpc.grpc_strangers import SHOWN_BYTES_MAX
from kera.core.rpc.method import call
from kera.core.runtime import MACHINE
from kera.v1 import access_pb2 as messages
from tests.integration.secured_cluster import Secured
from tests.integration.support import until
from tests.token_issuer import AUDIENCE, ISSUER, Published, claims_of, jwk, key_set, published, signed

pytestmark = pytest.mark.timeout(180)
TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", pytest.param("grpc", marks=pytest.mark.slow)])
EXPIRED_S = 3.0
"""An expired token has no effect any more after this time."""
PAUSE_S = 0.02
"""The pause between records while a client reads the stream."""
SHORT_S = (4, 16, 64)
"""Lifetimes to try for a token that is to expire soon: on a busy machine the first may expire before it is used."""


class Issuing:
    """A cluster, and the issuer of the tokens that it accepts."""

    def __init__(self, directory: Path, page: Published, stack: contextlib.ExitStack) -> None:
        self.page = page
        self.directory = directory
        settings = {"jwt_keys": page.url, "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_leeway_ms": 0}
        self.secured = Secured(directory, stack, settings)

    def token(self, user: str, *, key_id: str = "one", name: str = "", **claims: Any) -> str:
        return signed(claims_of(user, time.time(), **claims), key_id=key_id, name=name)

    def file(self, name: str, token: str) -> Path:
        path = self.directory / name
        path.write_text(token)
        return path

    async def client(self, token_file: Path, **settings: Any) -> Client:
        settings = {"retry_timeout_ms": 1000, **settings}
        return await Client.connect(
            self.secured.cluster.bootstrap, self.secured.settings(token_file=token_file, **settings)
        )

    async def refused(self, token: str, **settings: Any) -> str:
        """The error for a client that shows this token."""
        path = self.file("refused", token)
        with pytest.raises(AuthenticationFailed) as raised:
            async with await self.client(path, **settings) as client:
                await client.admin.list_streams()
        return raised.value.message


@pytest.fixture(scope="module")
def issuing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Issuing]:
    with contextlib.ExitStack() as stack:
        page = stack.enter_context(published(key_set(jwk("one", "ES256"))))
        yield Issuing(tmp_path_factory.mktemp("jwt"), page, stack)


@pytest.fixture
async def admin(issuing: Issuing) -> AsyncIterator[Client]:
    async with await issuing.client(issuing.file("admin", issuing.token("admin"))) as client:
        yield client


async def read_all(client: Client, stream: str) -> list[bytes]:
    return [
        value
        async for chunk in client.consumer(stream, start="earliest", end="latest").batches()
        for value in chunk.batch["value"].to_pylist()
    ]


async def write(client: Client, stream: str, values: list[bytes]) -> None:
    async with client.producer() as producer:
        await producer.prepare(stream)
        for value in values:
            await producer.send(stream, value)


@pytest.mark.parametrize(
    ("length", "transport"),
    [
        ("short", "tcp"),
        ("long", "grpc"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("short", "grpc"), ("long", "tcp"))),
    ],
)
async def test_a_token_has_the_rights_of_the_roles_in_it(
    issuing: Issuing, admin: Client, transport: str, length: str
) -> None:
    stream, group, role = (f"{kind}-{length}-{transport}" for kind in ("stream", "group", "role"))
    await admin.admin.create_stream(stream, streamlets=1, replication=1)
    await issuing.secured.grant(f"role:{role}", f"stream:{stream}", Operation.READ, Operation.WRITE)
    await issuing.secured.grant(f"role:{role}", f"group:{group}", Operation.USE)
    others = [f"another-role-of-{number}" for number in range(400 if length == "long" else 0)]
    path = issuing.file(stream, issuing.token(f"alice-{length}-{transport}", roles=[role, *others]))
    async with await issuing.client(path, transport=transport) as alice:
        await write(alice, stream, [b"one"])
        assert await read_all(alice, stream) == [b"one"]
        async with alice.group_consumer(group, stream) as consumer:
            async for _ in consumer:
                break
        with pytest.raises(NotAllowed, match="may not delete"):
            await alice.admin.delete_stream(stream)
    without = issuing.file(f"{stream}-without", issuing.token("somebody-else", roles=others))
    async with await issuing.client(without, transport=transport) as other:
        with pytest.raises(UnknownStream):
            await read_all(other, stream)


class Reading:
    """Reads a stream until the reads are refused."""

    def __init__(self, client: Client, stream: str) -> None:
        self.client = client
        self.stream = stream
        self.records = 0
        self.error: KeraError | None = None

    async def run(self) -> None:
        try:
            async for chunk in self.client.consumer(self.stream, start="earliest").batches():
                self.records += chunk.batch.num_rows
        except KeraError as error:
            self.error = error


@contextlib.asynccontextmanager
async def expiring(
    issuing: Issuing, admin: Client, stream: str, transport: str
) -> AsyncIterator[tuple[Reading, asyncio.Task[None], float]]:
    """A reader of a new stream whose token expires soon, the task that runs it, and when the token expires."""
    await admin.admin.create_stream(stream, streamlets=1, replication=1)
    await issuing.secured.grant("role:reader", f"stream:{stream}", Operation.READ)
    await write(admin, stream, [b"first"])
    for good_for_s in SHORT_S:
        until_s = int(time.time()) + good_for_s
        path = issuing.file(stream, issuing.token("reader", roles=["reader"], exp=until_s))
        try:
            client = await issuing.client(path, transport=transport)
        except AuthenticationFailed:
            continue
        async with client:
            reading = Reading(client, stream)
            task = asyncio.create_task(reading.run())
            await until(lambda: task.done() or reading.records > 0)  # noqa: B023 - it waits here
            in_time = reading.records > 0 and time.time() < until_s - good_for_s / 2
            if in_time:
                yield reading, task, until_s
            task.cancel()
            if in_time:
                return
    pytest.fail(f"a token that is good for {SHORT_S[-1]} s expired before it was used")


@TRANSPORTS
async def test_a_consumer_ends_when_its_token_expires(issuing: Issuing, admin: Client, transport: str) -> None:
    stream = f"expiring-{transport}"
    async with expiring(issuing, admin, stream, transport) as (reading, task, until_s), admin.producer() as producer:
        await producer.prepare(stream)
        while not task.done():
            await producer.send(stream, b"one")
            await asyncio.sleep(PAUSE_S)
        assert time.time() >= until_s
    assert isinstance(reading.error, AuthenticationFailed), reading.error
    assert "the token expired" in reading.error.message


@pytest.mark.slow
@TRANSPORTS
async def test_a_consumer_continues_with_a_newer_token_from_its_file(
    issuing: Issuing, admin: Client, transport: str
) -> None:
    stream = f"renewed-{transport}"
    async with expiring(issuing, admin, stream, transport) as (reading, task, until_s), admin.producer() as producer:
        issuing.file(stream, issuing.token("reader", roles=["reader"]))
        await producer.prepare(stream)
        sent = 1
        while time.time() < until_s + EXPIRED_S:
            await producer.send(stream, b"one")
            sent += 1
            await asyncio.sleep(PAUSE_S)
        await until(lambda: task.done() or reading.records >= sent)
    assert reading.error is None
    assert reading.records == sent


@TRANSPORTS
async def test_the_error_for_a_refused_token_says_why(issuing: Issuing, transport: str) -> None:
    now_s = time.time()
    for token, why in (
        (issuing.token("alice", aud="other"), "the token is for 'other' (aud), and not for 'kera'"),
        (
            issuing.token("alice", iss="https://other"),
            "the issuer of the token is 'https://other' and not 'https://issuer",
        ),
        (issuing.token("alice", name="of-somebody-else"), "the signature of the token is not right"),
        (issuing.token("alice")[:-20], "the signature of the token is not right|the token cannot be verified"),
        ("no-token-at-all", "a JWT"),
        # An issuer whose clock is ten minutes behind or ahead of ours, and its new tokens.
        (issuing.token("alice", exp=now_s - 300), "expired 5 min ago; get a new one; if it is new, the clocks of this"),
        (issuing.token("alice", nbf=now_s + 600, exp=now_s + 900), "valid only in 10 min; if it is new, the"),
    ):
        refused = await issuing.refused(token, transport=transport)
        assert any(each in refused for each in why.split("|")), refused


@pytest.mark.slow
async def test_new_keys_of_the_issuer_are_accepted_without_a_restart(issuing: Issuing, admin: Client) -> None:
    before = issuing.page.data
    token = issuing.token("admin", key_id="two", name="two")
    path = issuing.file("two", token)
    with pytest.raises(Unavailable, match="which is not known yet"):
        async with await issuing.client(path, retry_timeout_ms=0) as client:
            await client.admin.list_streams()
    issuing.page.data = key_set(jwk("one", "ES256"), jwk("two", "ES256", "two"))
    try:
        async with await issuing.client(path, retry_timeout_ms=60_000) as client:
            await client.admin.list_streams()
            await admin.admin.list_streams()  # with the old key
    finally:
        issuing.page.data = before


async def test_daemons_start_without_the_issuers_keys_and_load_them_later(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    settings = {"jwt_keys": str(keys), "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}
    with contextlib.ExitStack() as stack:
        secured = Secured(tmp_path, stack, settings, brokers=1)
        await secured.make_user("admin")
        runtime = secure(MACHINE, secured.settings(user="admin", password="correct horse battery"))

        async def states() -> set[tuple[str, str]]:
            found = [await describe_daemon(secured.cluster.bootstrap, runtime=runtime)]
            found.append(await describe_daemon(secured.cluster.ready["broker-1"]["grpc_address"], runtime=runtime))
            return {(each.state, each.text) for one in found for each in one.checks if each.name == "jwt_keys"}

        async with await secured.client("admin") as admin:
            await admin.admin.create_stream("early", streamlets=1, replication=1)
        assert await states() == {
            (
                "problem",
                f"there are no keys, and tokens of the issuer are refused: {keys}: No such file or directory",
            )
        }
        token = signed(claims_of("admin", time.time()))
        with pytest.raises(Unavailable, match=r"cannot be verified yet: .*keys.json: No such file"):
            async with await Client.connect(
                secured.cluster.bootstrap, secured.settings(token=token, retry_timeout_ms=0)
            ) as client:
                await client.admin.list_streams()
        keys.write_bytes(key_set(jwk("one", "ES256")))
        async with await Client.connect(secured.cluster.bootstrap, secured.settings(token=token)) as client:
            assert [each.name for each in await client.admin.list_streams()] == ["early"]
            await write(client, "early", [b"one"])
        assert await states() == {("ok", f"1 keys of {keys}")}
        keys.write_bytes(key_set(jwk("two", "ES256", "two")))
        changed = signed(claims_of("admin", time.time()), key_id="two", name="two")
        async with await Client.connect(secured.cluster.bootstrap, secured.settings(token=changed)) as client:
            assert await read_all(client, "early") == [b"one"]
            with pytest.raises(AuthenticationFailed, match="key 'one', which the issuer has not"):
                async with await Client.connect(secured.cluster.bootstrap, secured.settings(token=token)) as other:
                    await other.admin.list_streams()
            keys.unlink()
            on = f"{keys} cannot be read: No such file or directory; going on with 1 keys of {keys}"
            while await states() != {("warning", on)}:
                await asyncio.sleep(0.05)
            await write(client, "early", [b"two"])


async def test_oversized_tokens_are_rejected_and_do_no_harm(issuing: Issuing, admin: Client) -> None:
    for transport in ("tcp", "grpc"):
        channel: Any = GrpcChannel(issuing.secured.cluster.bootstrap, tls=issuing.secured.tls)
        if transport == "tcp":
            address = issuing.secured.cluster.ready["broker-1"]["frames_address"]
            channel = await FrameChannel.connect_tcp(address, timeout_s=5, tls=issuing.secured.tls)
        for size in (17 << 10, 63 << 10, 65 << 10, 400 << 10, 1 << 20):
            with pytest.raises(KeraError) as raised:
                await call(channel, api.AUTHENTICATE, messages.AuthenticateRequest(token="a" * size), timeout_s=5)
            if size < (64 << 10 if transport == "tcp" else SHOWN_BYTES_MAX):
                assert raised.value.message == "the token has more than 16384 characters"
        await channel.close()
    async with grpc.aio.secure_channel(
        issuing.secured.cluster.bootstrap, issuing.secured.tls.channel_credentials()
    ) as foreign:
        ask: Any = foreign.unary_unary(api.DESCRIBE_CLUSTER.path)
        for size in (17 << 10, 64 << 10, 1 << 20):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(b"", metadata=((AUTHORIZATION, BEARER + "a" * size),), timeout=5)
    await admin.admin.list_streams()
