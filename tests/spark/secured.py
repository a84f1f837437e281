"""A secured cluster for the tests with Spark: TLS, a cluster secret, and users with rights on their streams.

Secrets are marked, so that `secrets_in` can find them where they must not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kera.client import Client, ClientSettings
from kera.client.admin.access import Operation
from kera.core.credential_settings import as_daemon
from kera.core.runtime import MACHINE
from kera.core.security.issuing import Authority, Issued
from kera.local.cluster import LocalCluster, RunningCluster

T = TypeVar("T")

HOST = "127.0.0.1"
MARK = "x5ecret"
CLUSTER_SECRET = f"{MARK}-of-the-cluster-0123456789"
SECRETS = re.compile(rb"(?<!Bearer )(x5ecret[A-Za-z0-9-]*|kera_[0-9a-f]{8,}_[0-9a-f]{16,}|kera-session_[A-Za-z0-9_-]+)")
"""Passwords and the cluster secret; tokens, which always have this form."""


def password_of(user: str) -> str:
    """The password of a user."""
    return f"{MARK}-password-of-{user}"


def secrets_in(data: bytes) -> list[bytes]:
    """The secrets in `data`, each with the bytes around it."""
    return [data[max(0, found.start() - 80) : found.end() + 20] for found in SECRETS.finditer(data)]


class SecuredCluster:
    """A cluster and its credentials. Its secrets are in files of the folder ``secrets``."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, **cluster: Any) -> None:
        """`cluster`: the numbers of daemons, see `LocalCluster`."""
        self.folder = folder / "secrets"
        self.authority, _ = Authority.open_or_make(folder / "certificates")
        self.ca = self.authority.path
        self.host: Issued = self.authority.issue(HOST)
        self.folder.mkdir()
        self._watching: str | None = None
        secret = self.folder / "cluster"
        secret.write_text(CLUSTER_SECRET)
        files = {"tls_ca": self.ca, "tls_cert": self.host.cert, "tls_key": self.host.key}
        daemon = {**files, "security": True, "cluster_secret_file": secret}
        coordinator = {**daemon, "metrics_port": 0, **cluster.pop("coordinator_settings", {})}
        self.cluster: RunningCluster = stack.enter_context(
            LocalCluster.running(
                arena_bytes=64 << 20,
                backup_memory_bytes=64 << 20,
                segment_bytes=1 << 20,
                coordinator_settings=coordinator,
                broker_settings=daemon,
                backup_settings=daemon,
                **cluster,
            )
        )

    @property
    def bootstrap(self) -> str:
        """The addresses of its coordinators."""
        return self.cluster.bootstrap

    def password_file(self, user: str) -> Path:
        """A file with the password of a user."""
        file = self.folder / user
        file.write_text(password_of(user))
        file.chmod(0o600)
        return file

    def options(self, user: str) -> dict[str, str]:
        """Options for a query of a user."""
        return {
            "kera.bootstrap.servers": self.bootstrap,
            "tls.ca": str(self.ca),
            "user": user,
            "password.file": str(self.password_file(user)),
        }

    def run(self, work: Callable[[Client], Awaitable[T]], user: str | None = None) -> T:
        """The result of `work` with a client of a user; None: a client with all rights."""

        async def connected() -> T:
            settings, runtime = ClientSettings(tls_ca=self.ca), as_daemon(MACHINE, self.folder / "cluster")
            if user is not None:
                settings = ClientSettings(tls_ca=self.ca, user=user, password_file=self.password_file(user))
                runtime = MACHINE
            async with await Client.connect(self.bootstrap, settings, runtime=runtime) as client:
                return await work(client)

        return asyncio.run(connected())

    def make_user(self, user: str) -> None:
        """Create a user without rights."""
        self.run(lambda client: client.access.create_user(user, password_of(user)))

    def create(self, stream: str, **arguments: Any) -> None:
        """Create a stream without any rights on it."""
        self.run(lambda client: client.admin.create_stream(stream, **arguments))

    def grant(self, user: str, resource: str, *operations: Operation) -> None:
        """Give a user rights."""
        self.run(lambda client: client.access.grant(f"user:{user}", operations, resource))

    def revoke(self, user: str, resource: str, *operations: Operation) -> None:
        """Take rights from a user."""
        self.run(lambda client: client.access.revoke(f"user:{user}", resource, operations))

    def tokens(self) -> list[str]:
        """The ids of all valid tokens."""

        async def ids(client: Client) -> list[str]:
            return sorted(token.token_id for token in await client.access.tokens())

        return self.run(ids)

    def revoke_tokens(self, stream: str) -> int:
        """Revoke the tokens for this stream alone; return their number."""

        async def revoke(client: Client) -> int:
            meant = [token for token in await client.access.tokens() if token.resources == (f"stream:{stream}",)]
            for token in meant:
                await client.access.revoke_token(token.token_id)
            return len(meant)

        return self.run(revoke)

    def failures(self) -> int:
        """The number of failed authentications at the coordinator."""

        async def issue(client: Client) -> str:
            return (await client.access.issue_token()).secret

        if self._watching is None:
            self.make_user("watcher")
            self.grant("watcher", "cluster", "describe")
            self._watching = self.run(issue, "watcher")
        request = urllib.request.Request(f"https://{self.cluster.ready['coordinator']['metrics_address']}/metrics")
        request.add_header("Authorization", f"Bearer {self._watching}")
        context = ssl.create_default_context(cafile=self.ca)
        with urllib.request.urlopen(request, context=context, timeout=60) as answer:
            found = re.findall(rb"^kera_access_authentications_failed_total (\S+)", answer.read(), re.MULTILINE)
        return round(sum(map(float, found)))

    def send(self, stream: str, values: Iterable[bytes]) -> None:
        """Store records."""

        async def send(client: Client) -> None:
            async with client.producer() as producer:
                await producer.prepare(stream)
                for value in values:
                    producer.send(stream, value, keys=value)

        self.run(send)

    def values(self, stream: str) -> list[bytes]:
        """The values of a stream, sorted."""

        async def read(client: Client) -> list[bytes]:
            consumer = client.consumer(stream, start="earliest", end="latest", shared_memory="never")
            return sorted([value async for chunk in consumer.batches() for value in chunk.batch["value"].to_pylist()])

        return self.run(read)


@contextlib.contextmanager
def secured_cluster(folder: Path, **cluster: Any) -> Iterator[SecuredCluster]:
    """Run a secured cluster."""
    with contextlib.ExitStack() as stack:
        yield SecuredCluster(folder, stack, **cluster)
