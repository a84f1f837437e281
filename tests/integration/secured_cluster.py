"""A cluster with security on for tests; each test makes the users that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kera.client import Client, ClientSettings
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

HOST = "127.0.0.1"
SECRET = "a secret that all daemons of the cluster have"
PASSWORD = "correct horse battery"


class Secured:
    """A cluster of two brokers and a backup over TLS, whose daemons know each other by a secret."""

    def __init__(
        self,
        directory: Path,
        stack: contextlib.ExitStack,
        daemon_settings: Mapping[str, Any] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        """`arguments`: of `LocalCluster`, to change the cluster; `daemon_settings`: of all daemons."""
        settings_of = {kind: arguments.pop(f"{kind}_settings", {}) for kind in ("coordinator", "broker", "backup")}
        often = {"heartbeat_interval_ms": 200, "heartbeats_missed_max": 40}  # tests wait for what heartbeats report
        settings_of["coordinator"] = {**often, **settings_of["coordinator"]}
        authority, _ = Authority.open_or_make(directory)
        self.ca = authority.path
        one = authority.issue(HOST)
        self.secrets = {kind: directory / f"secret-of-{kind}" for kind in ("coordinator", "broker", "backup")}
        """The files of each kind of daemon, as on three hosts; their content is the same."""
        for path in self.secrets.values():
            path.write_text(SECRET)
        self.secret = self.secrets["coordinator"]
        daemon: dict[str, Any] = {
            "tls_cert": one.cert,
            "tls_key": one.key,
            "tls_ca": self.ca,
            "security": True,
            "super_users": ["user:admin", "role:boss"],
            "metrics_port": 0,
            **daemon_settings,
        }
        self.cluster = stack.enter_context(
            LocalCluster.running(
                **{"brokers": 2, "backups": 1, "replication": 1, **arguments},
                arena_bytes=64 << 20,
                backup_memory_bytes=64 << 20,
                segment_bytes=1 << 20,
                **{
                    f"{kind}_settings": {**daemon, "cluster_secret_file": secret, **settings_of.get(kind, {})}
                    for kind, secret in self.secrets.items()
                },
            )
        )

    @property
    def tls(self) -> Tls:
        return Tls(TlsFiles(ca=self.ca))

    def settings(self, **settings: Any) -> ClientSettings:
        return ClientSettings(tls_ca=self.ca, **settings)

    async def client(self, user: str, **settings: Any) -> Client:
        return await Client.connect(self.cluster.bootstrap, self.settings(user=user, password=PASSWORD, **settings))

    async def ask(self, method: Method[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """Call a method as a daemon."""
        channel = GrpcChannel(self.cluster.bootstrap, tls=self.tls, introduction=of_daemon(SECRET))
        try:
            return await call(channel, method, request, timeout_s=10)
        finally:
            await channel.close()

    async def make_user(self, name: str, *roles: str) -> None:
        request = messages.PutUserRequest(name=name, create=True, scram=verifier_for(PASSWORD))
        request.roles.names.extend(roles)
        answer = await self.ask(api.PUT_USER, request)
        assert not answer.untold.members

    async def grant(self, principal: str, resource: str, *operations: Operation) -> int:
        rule = messages.AccessRule(principal=principal, resource=resource, operations=wire(operations))
        answer = await self.ask(api.GRANT_RIGHT, messages.GrantRightRequest(rule=rule))
        assert not answer.untold.members
        return answer.rule.rule_id

    async def revoke(self, rule_id: int) -> None:
        answer = await self.ask(api.REVOKE_RIGHTS, messages.RevokeRightsRequest(rule_ids=[rule_id]))
        assert not answer.untold.members
