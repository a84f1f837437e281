"""Grant and revoke under load, and kill the leading coordinator in between.

In each round a user writes to a stream and reads from it, over frames or gRPC, and goes on trying after every refusal.
Then the user loses access: a right, the role that had it, its token, its password, or its account. In every other
round the leading coordinator is killed during that request; the client repeats the request until it gets an answer.
Two seconds after the answer a marker is written to the stream.

Promised, and checked: the log has no record of the user behind the marker; the user has not read the marker, though it
has tried to, and was refused; rules, users and tokens are as they were set, also at the coordinator that leads next;
and after the right is granted again, the user goes on writing and reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kera.client import Client, ClientSettings
from kera.client.admin.access import Token
from kera.client.cluster.cluster import Cluster
from kera.core.access.credentials import of_daemon
from kera.core.errors import AuthenticationFailed, InvalidArgument, KeraError, NotAllowed, UnknownStream
from kera.core.runtime import MACHINE, secured
from kera.local.cluster import LocalCluster
from tests.chaos.running import Program, Run
from tests.chaos.verdict import Wrong
from tests.integration.zookeeper import ZooKeeper

STREAM = "s"
REVOKED_S = 2.0
"""Time after the answer within which a revocation takes effect."""
ROUND_S_MAX = 60.0
PAUSE_S = 0.005
SECRET = "a secret that all daemons of the cluster have"
PASSWORD = "correct horse battery"
WAYS = ("right", "role", "token", "password", "user")
ADMIN, WRITERS = "admin", "writers"
REFUSED = (AuthenticationFailed, NotAllowed, UnknownStream)
"""A user without any right to a stream does not learn that the stream exists."""
IMPATIENT: dict[str, Any] = {"retry_timeout_ms": 200, "request_timeout_ms": 3000, "connect_timeout_ms": 2000}


class User:
    """A user that writes and reads, and goes on trying after every refusal."""

    def __init__(self, bootstrap: str, settings: ClientSettings, name: str) -> None:
        self._bootstrap = bootstrap
        self._settings = settings
        self._name = name
        self.written = 0
        """Acknowledged records."""
        self.read = 0
        self.seen: set[bytes] = set()
        """Markers that the user has read."""
        self.refused = Counter[str]()
        """Number of refusals, by action."""
        self.failed = Counter[str]()
        """Errors, by their codes."""

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """The user keeps trying inside the block."""
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._consume())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()

    async def _write(self) -> None:
        """Write records that name the user and count up."""

        async def once(client: Client) -> None:
            async with client.producer(delivery_timeout_ms=3000) as producer:
                await producer.prepare(STREAM)
                while True:
                    await producer.send(STREAM, f"{self._name}:{self.written}".encode())
                    self.written += 1

        await self._again_and_again("write", once)

    async def _consume(self) -> None:
        """Read everything that comes from now on."""

        async def once(client: Client) -> None:
            async for chunk in client.consumer(STREAM, start="latest", shared_memory="never").batches():
                values = chunk.batch["value"].to_pylist()
                self.read += len(values)
                self.seen.update(value for value in values if value.startswith(b"marker:"))

        await self._again_and_again("read", once)

    async def _again_and_again(self, what: str, once: Callable[[Client], Awaitable[None]]) -> None:
        while True:
            try:
                async with await Client.connect(self._bootstrap, self._settings) as client:
                    await once(client)
            except KeraError as error:
                self.failed[error.code] += 1
                self.refused[what] += isinstance(error, REFUSED)
                await asyncio.sleep(PAUSE_S)


class Chaos:
    """The rounds with one cluster."""

    def __init__(self, cluster: LocalCluster, run: Run) -> None:
        self._cluster = cluster
        self._run = run

    @property
    def bootstrap(self) -> str:
        """The addresses of both coordinators."""
        return self._cluster.bootstrap

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connect as the administrator, and create the stream."""
        runtime = secured(MACHINE, None, of_daemon(SECRET))
        async with Client(Cluster(self.bootstrap, ClientSettings(), runtime=runtime)) as first:
            await first.access.create_user(ADMIN, PASSWORD)
            await first.access.grant(f"user:{ADMIN}", ["administer"], "cluster")
            await first.access.grant(f"user:{ADMIN}", ["read", "write"], f"stream:{STREAM}")
        settings = ClientSettings(user=ADMIN, password=PASSWORD, transport="tcp")
        async with await Client.connect(self.bootstrap, settings) as self._client:
            await self._client.admin.create_stream(STREAM, streamlets=1, replication=1)
            async with self._client.producer() as self._producer:
                await self._producer.prepare(STREAM)
                yield

    async def round(self, number: int) -> None:
        """Grant, revoke, look, grant again. Raises `Wrong`."""
        moments = self._run.moments
        way, transport, kills = moments.choice(WAYS), moments.choice(("tcp", "grpc")), number % 2 == 0
        name = f"u{number}"
        token = await self._make(name, way)
        known: dict[str, Any] = {"token": token.secret} if token else {"user": name, "password": PASSWORD}
        user = User(self.bootstrap, ClientSettings(transport=transport, **known, **IMPATIENT), name)
        async with user.at_work():
            await _until(
                lambda: user.written > 10 and user.read > 10, lambda: f"{name} does not begin: {dict(user.failed)}"
            )
            begun_s = time.monotonic()
            killed = await self._kill() if kills else ""
            await self._take(name, way, token)
            answered_s = time.monotonic()
            await asyncio.sleep(REVOKED_S)  # sleep: the promise is about the time after this
            marker = f"marker:{number}".encode()
            await self._producer.send(STREAM, marker)
            before = user.refused.copy()
            await self._check_rules(name, way)
            if killed:
                await self._cluster.restart(killed)
            await self._check_rules(name, way)
            # The second refusal after the marker was written is of a request that began after it.
            await _until(
                lambda: all(user.refused[what] > before[what] + 1 for what in ("write", "read")),
                lambda: f"{name} is not refused both to write and to read: {dict(user.failed)}",
            )
        if marker in user.seen:
            raise Wrong(f"{name} has read what was written {REVOKED_S:g} s after it was refused")
        await self._check_log(name, marker)
        await self._goes_on(name, way)
        self._run.seen["written"] += user.written
        self._run.seen["read"] += user.read
        self._run.tell(
            f"{way} over {transport}{', ' + killed + ' killed' if killed else ''};"
            f" answered in {answered_s - begun_s:.2f} s; {user.written:,} written, {user.read:,} read;"
            f" refused {dict(user.failed)}"
        )

    async def _make(self, name: str, way: str) -> Token | None:
        access = self._client.access
        await access.create_user(name, PASSWORD, [WRITERS] if way == "role" else [])
        principal = f"role:{WRITERS}" if way == "role" else f"user:{name}"
        await access.grant(principal, ["read", "write"], f"stream:{STREAM}")
        if way != "token":
            return None
        async with await Client.connect(self.bootstrap, ClientSettings(user=name, password=PASSWORD)) as client:
            return await client.access.issue_token([f"stream:{STREAM}"])

    async def _kill(self) -> str:
        """Kill the leading coordinator; returns its name."""
        description = await self._client.admin.describe_cluster()
        leader = description.coordinators[0]
        (name,) = [
            name for name, ready in self._cluster.ready.items()
            if name.startswith("coordinator") and ready["grpc_address"] == leader
        ]  # fmt: skip
        await self._cluster.kill(name)
        return name

    async def _take(self, name: str, way: str, token: Token | None) -> None:
        """Revoke, and repeat the request until there is an answer."""
        access = self._client.access
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "right": lambda: access.revoke(f"user:{name}", f"stream:{STREAM}"),
            "role": lambda: access.set_roles(name, []),
            "token": lambda: access.revoke_token(token.token_id if token else ""),
            "password": lambda: access.set_password(name, PASSWORD + " another"),
            "user": lambda: access.delete_user(name),
        }
        async with asyncio.timeout(ROUND_S_MAX):
            while True:
                try:
                    answer = await calls[way]()
                except InvalidArgument:
                    # The first request took effect, but its answer was lost: ask once more, to hear that all know.
                    answer = await access.grant(f"user:{ADMIN}", ["read"], f"stream:{STREAM}")
                except KeraError as error:
                    if not error.retriable:
                        raise
                    await asyncio.sleep(PAUSE_S)
                    continue
                untold = getattr(answer, "change", answer).untold
                if not untold:
                    return
                self._run.seen["daemons named"] += len(untold)

    async def _check_rules(self, name: str, way: str) -> None:
        access = self._client.access
        users = {user.name: user for user in await access.users()}
        rules = await access.rules(f"user:{name}")
        if (name in users) != (way != "user"):
            raise Wrong(f"users are {sorted(users)} after {way} of {name}")
        if way == "role" and users[name].roles:
            raise Wrong(f"{name} has roles {users[name].roles} again")
        if bool(rules) != (way in {"token", "password", "user"}):
            raise Wrong(f"rules of {name} are {rules} after {way}")
        if way == "token" and any(token.owner == name for token in await access.tokens()):
            raise Wrong(f"{name} has its token again")

    async def _check_log(self, name: str, marker: bytes) -> None:
        values = [
            value
            async for chunk in self._client.consumer(STREAM, start="earliest", end="latest").batches()
            for value in chunk.batch["value"].to_pylist()
        ]
        behind = [value for value in values[values.index(marker) :] if value.startswith(f"{name}:".encode())]
        if behind:
            raise Wrong(f"{name} has written {behind[:3]} {REVOKED_S:g} s after it was refused")

    async def _goes_on(self, name: str, way: str) -> None:
        """Give back the revoked access, and check that the user writes and reads again; then delete the user."""
        access = self._client.access
        if way == "user":
            await access.create_user(name, PASSWORD)
        if way in {"right", "role"}:
            await access.grant(f"user:{name}", ["read", "write"], f"stream:{STREAM}")
        if way == "password":
            await access.set_password(name, PASSWORD)
        user = User(self.bootstrap, ClientSettings(user=name, password=PASSWORD, **IMPATIENT), name)
        async with user.at_work():
            await _until(
                lambda: user.written > 3 and user.read > 3, lambda: f"{name} does not go on: {dict(user.failed)}"
            )
        await access.delete_user(name)
        with contextlib.suppress(InvalidArgument):
            await access.revoke(f"user:{name}", f"stream:{STREAM}")


async def _until(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    try:
        async with asyncio.timeout(ROUND_S_MAX):
            while not condition():
                await asyncio.sleep(PAUSE_S)
    except TimeoutError as error:
        raise Wrong(otherwise()) from error


async def work(run: Run) -> None:
    """Run all rounds. Raises `Wrong`."""
    secret = run.folder / "secret"
    secret.write_text(SECRET)
    settings: dict[str, object] = {"security": True, "cluster_secret_file": secret}
    with ZooKeeper(run.folder / "zookeeper") as zookeeper:
        async with LocalCluster(
            coordinators=2,
            zookeeper=f"{zookeeper.address}/chaos",
            brokers=3,
            backups=2,
            replication=1,
            arena_bytes=64 << 20,
            backup_memory_bytes=64 << 20,
            segment_bytes=1 << 20,
            coordinator_settings={**settings, "zookeeper_session_timeout_ms": 2000},
            broker_settings=settings,
            backup_settings=settings,
            log_dir=run.folder / "logs",
        ) as cluster:
            chaos = Chaos(cluster, run)
            async with chaos.running():
                for number in range(1, run.arguments.rounds + 1):
                    await chaos.round(number)


ACCESS = Program(
    __doc__ or "", f"nothing was done {REVOKED_S:g} s after it was refused, and rules stayed", work, rounds=200
)
