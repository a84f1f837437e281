"""A cluster with security on, fuzzed by unknown clients, and by a user with few rights.

A client on a unix socket that runs as the daemons' own user has all of their rights, so no client does that here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kera.client import Client
from kera.core.access.credentials import of_daemon
from kera.core.access.passwords import verifier_for
from kera.core.access.rights import Operation, wire
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import Method, RequestT, ResponseT, call
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from kera.local.cluster import LocalCluster
from kera.v1 import access_pb2 as messages
from tests.fuzz.talking import OPEN, Access
from tests.integration.secured_cluster import HOST, PASSWORD, SECRET

ADMIN, USER, STRANGER, UNENCRYPTED = "admin", "user", "stranger", "unencrypted"
CALL_S = 20.0
RIGHTS: Mapping[str, tuple[Operation, ...]] = {
    "stream:foreign": tuple(each for each in Operation if each not in {Operation.USE, Operation.ADMINISTER}),
    "group:foreign*": (Operation.USE,),
    "producer:foreign*": (Operation.USE,),
    "cluster": (Operation.DESCRIBE,),
}
"""Rights of the user."""


class Door(NamedTuple):
    """Credentials for the cluster's daemons."""

    tls: Tls | None = None
    secret: str = ""
    """The daemons' secret. If it is empty, daemons do not ask who a client is."""
    access: Mapping[str, Access] = {"": OPEN}
    """Access by the kind of client."""

    @property
    def introduction(self) -> Any:
        """The introduction of a daemon."""
        return of_daemon(self.secret) if self.secret else None

    def channel(self, address: str) -> GrpcChannel:
        """A channel to a daemon, with a daemon's credentials."""
        return GrpcChannel(address, tls=self.tls, introduction=self.introduction)


@contextlib.asynccontextmanager
async def secured_cluster(
    directory: Path, *, encrypted: bool = True, **settings: Any
) -> AsyncIterator[tuple[LocalCluster, Door]]:
    """A running cluster; new clients are a super user. `settings`: of `LocalCluster`, with those of roles merged."""
    directory.mkdir(parents=True, exist_ok=True)
    authority, _ = Authority.open_or_make(directory)
    one, secret, ca = authority.issue(HOST), directory / "secret", authority.path if encrypted else None
    secret.write_text(SECRET)
    daemon = {
        **({"tls_cert": one.cert, "tls_key": one.key, "tls_ca": ca} if encrypted else {}),
        "security": True,
        "super_users": [f"user:{ADMIN}"],
        "metrics_port": 0,
        "cluster_secret_file": secret,
    }
    roles = ("coordinator", "broker", "backup")
    of_roles: dict[str, Any] = {
        f"{role}_settings": {**daemon, **settings.pop(f"{role}_settings", {})} for role in roles
    }
    async with LocalCluster(data_dir=directory / "cluster", **settings, **of_roles) as cluster:
        tls = Tls(TlsFiles(ca=ca)) if encrypted else None
        for name in (ADMIN, USER):
            request = messages.PutUserRequest(name=name, create=True, scram=verifier_for(PASSWORD))
            await _ask(cluster, tls, api.PUT_USER, request)
        for resource, operations in RIGHTS.items():
            rule = messages.AccessRule(principal=f"user:{USER}", resource=resource, operations=wire(operations))
            await _ask(cluster, tls, api.GRANT_RIGHT, messages.GrantRightRequest(rule=rule))
        with _as_user(ca, USER):
            async with await Client.connect(cluster.bootstrap) as user:
                token = await user.access.issue_token()
        with _as_user(ca, ADMIN):
            access = {UNENCRYPTED: OPEN, STRANGER: Access(ca), USER: Access(ca, token.secret)}
            yield cluster, Door(tls, SECRET, access)


async def _ask(
    cluster: LocalCluster, tls: Tls | None, method: Method[RequestT, ResponseT], request: RequestT
) -> ResponseT:
    channel = Door(tls, SECRET).channel(cluster.bootstrap)
    try:
        async with asyncio.timeout(CALL_S):
            return await call(channel, method, request, timeout_s=CALL_S)
    finally:
        await channel.close()


@contextlib.contextmanager
def _as_user(ca: Path | None, user: str) -> Iterator[None]:
    """Make clients of this process, and of those that it starts, authenticate as that user."""
    variables = {"KERA_CLIENT_USER": user, "KERA_CLIENT_PASSWORD": PASSWORD}
    variables |= {"KERA_CLIENT_TLS_CA": str(ca)} if ca else {}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
