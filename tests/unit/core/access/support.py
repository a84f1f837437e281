"""Users, rules and identities for tests of access."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.access.cluster_secret import ClusterSecret
from kera.core.access.identity import Identity
from kera.core.access.passwords import ITERATIONS_MIN, verifier_for
from kera.core.access.rights import Operation, wire
from kera.core.rpc.method import Peer
from kera.server.access.audit import Audit
from kera.server.access.authenticator import Authenticator
from kera.server.access.guard import Guard
from kera.v1 import access_pb2 as messages

PASSWORD = "correct horse"
SECRET = "battery staple of a cluster"
STREAMS = {7: "orders", 8: "payments"}
DAEMON = Identity("", how="certificate", is_daemon=True)


class Now:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def rule(
    principal: str, resource: str, *operations: Operation, deny: bool = False, rule_id: int = 1
) -> messages.AccessRule:
    return messages.AccessRule(
        rule_id=rule_id, deny=deny, principal=principal, operations=wire(operations), resource=resource
    )


@cache
def _verifier(password: str) -> messages.ScramVerifier:
    """The same for each user with this password: computing it takes milliseconds."""
    return verifier_for(password, iterations=ITERATIONS_MIN)


def user(name: str, *roles: str, password: str = PASSWORD, version: int = 1) -> messages.UserRecord:
    return messages.UserRecord(
        name=name,
        roles=roles,
        scram=_verifier(password),
        password_version=version,
    )


def table(
    version: int = 1,
    users: Iterable[messages.UserRecord] = (),
    rules: Iterable[messages.AccessRule] = (),
    tokens: Iterable[messages.TokenRecord] = (),
    default_quota: messages.Quota | None = None,
) -> messages.AccessTable:
    return messages.AccessTable(version=version, users=users, rules=rules, tokens=tokens, default_quota=default_quota)


def authenticator(now: Now, *, super_users: Iterable[str] = (), secret: str = "") -> Authenticator:
    return Authenticator(
        CertificateNames.of(DAEMONS, USERS),
        now_s=now,
        super_users=frozenset(super_users),
        cluster_secret=ClusterSecret(Path("secret"), now, secrets_in=lambda _: [secret]) if secret else None,
    )


def guard(now: Now, *, super_users: Iterable[str] = (), look_s: float = 1.0) -> Guard:
    return Guard(
        authenticator(now, super_users=super_users, secret=SECRET), Audit(now), name_of=STREAMS.get, look_s=look_s
    )


def peer(who: Identity | None = None, transport: str = "tcp") -> Peer:
    return Peer(transport, "10.0.0.9:1", identity=who)
