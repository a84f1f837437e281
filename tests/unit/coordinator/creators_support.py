"""A coordinator with security on, and users who create streams."""

from __future__ import annotations

from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.access.identity import Identity
from kera.core.rpc.method import Peer
from kera.server.access.audit import Audit
from kera.server.access.authenticator import Authenticator
from kera.server.access.guard import CALLER, Guard
from kera.v1 import access_pb2 as messages
from kera.v1 import common_pb2
from tests.unit.coordinator.fake_cluster import Cluster, config

ALICE, BOB = Identity("alice"), Identity("bob")
ROOT, DAEMON = Identity("root", is_super=True), Identity("", is_daemon=True)


async def secure(cluster: Cluster, *super_users: str) -> None:
    """Start a coordinator with security on."""
    now_s = cluster.clock.boottime_s
    door = Authenticator(CertificateNames.of(DAEMONS, USERS), super_users=frozenset(super_users), now_s=now_s)
    cluster.guard = Guard(door, Audit(now_s))
    await cluster.restart()


async def limit(cluster: Cluster, name: str, **quota: int) -> None:
    """Set the quota of a user; the name "" stands for the default quota."""
    called_by(ROOT)
    access = cluster.coordinator.access
    if name and not any(each.name == name for each in access.list_users(messages.ListUsersRequest()).users):
        await access.put_user(messages.PutUserRequest(name=name, create=True))
    await access.put_user(messages.PutUserRequest(name=name, quota=messages.Quota(**quota)))


def called_by(who: Identity | None) -> None:
    """Make `who` the caller of all further requests of the test."""
    CALLER.set(None if who is None else Peer("grpc", "10.0.0.9:1", identity=who))


async def create(cluster: Cluster, who: Identity | None, name: str, **options: str) -> common_pb2.StreamInfo:
    """Create a stream as `who`."""
    called_by(who)
    return await cluster.coordinator.streams.create(name, config(1, 0, None), common_pb2.StreamSchema(), **options)
