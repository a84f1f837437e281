from __future__ import annotations

import asyncio
import os
from typing import Any, cast

import pytest

from kera.core.access.accounts import Accounts
from kera.core.access.identity import Identity
from kera.core.access.passwords import EXCHANGES_MAX, Login
from kera.core.access.rights import CLUSTER, Operation
from kera.core.errors import AuthenticationFailed, NotAllowed, StaleEpoch, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.method import Call, Evidence, Peer, Reply
from kera.core.rpc.taking import NOTHING, Taken
from kera.server.access.acquaintances import RESOURCE_CHARS_MAX
from kera.server.access.guard import CALLER, FAILURES_MAX, Guard
from kera.server.access.requirements import Need
from kera.v1 import access_pb2 as messages
from kera.v1 import broker_pb2, coordinator_pb2
from tests.unit.core.access.support import DAEMON, PASSWORD, Now, guard, peer, rule, table, user

READ, WRITE = Operation.READ, Operation.WRITE
ORDERS, PAYMENTS, MISSING = 7, 8, 9
RULES = [rule("user:alice", "stream:orders", READ, WRITE)]


class Connection:
    """A peer that counts its ends."""

    def __init__(self, who: Identity | None = None, transport: str = "tcp") -> None:
        self.ended = 0
        self.peer = Peer(transport, "10.0.0.9:1", identity=who, end=self.end)

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def door(now: Now) -> Guard:
    door = guard(now)
    door.apply(table(users=[user("alice")], rules=RULES), 1)
    return door


async def authenticate(door: Guard, connection: Connection, password: str = PASSWORD) -> messages.AuthenticateResponse:
    served: Any = door.guarded(door.service())[api.AUTHENTICATE]
    login = Login("alice", password)
    answer = await served(Call(messages.AuthenticateRequest(scram=login.first()), memoryview(b""), connection.peer))
    request = messages.AuthenticateRequest(
        scram=login.final(answer.message.scram), exchange_id=answer.message.exchange_id
    )
    answer = await served(Call(request, memoryview(b""), connection.peer))
    login.check(answer.message.scram)
    return answer.message  # type: ignore[no-any-return]


async def test_a_password_authenticates_a_connection_of_frames(door: Guard) -> None:
    connection = Connection()
    answer = await authenticate(door, connection)
    assert answer.principal == "user:alice"
    assert not answer.session
    door.check(connection.peer, Need(READ, ORDERS))


async def test_many_logins_from_one_host_do_not_end_those_of_another(door: Guard) -> None:
    served: Any = door.guarded(door.service())[api.AUTHENTICATE]
    alone, many, login = Connection(), Connection(), Login("alice", PASSWORD)
    many.peer.address = "10.0.0.8:1"
    first = messages.AuthenticateRequest(scram=login.first())
    answer = await served(Call(first, memoryview(b""), alone.peer))
    for _ in range(EXCHANGES_MAX):
        await served(Call(first, memoryview(b""), many.peer))
    final = login.final(answer.message.scram)
    second = messages.AuthenticateRequest(scram=final, exchange_id=answer.message.exchange_id)
    assert (await served(Call(second, memoryview(b""), alone.peer))).message.principal == "user:alice"


async def test_a_login_over_grpc_gives_a_session_for_calls(door: Guard) -> None:
    connection, call = Connection(transport="grpc"), Connection(transport="grpc")
    answer = await authenticate(door, connection)
    assert connection.peer.identity is None
    door.admit(call.peer, Evidence(token=answer.session))
    assert call.peer.identity is not None
    assert call.peer.identity.user == "alice"


async def test_failed_authentications_are_refused_and_counted(door: Guard) -> None:
    with pytest.raises(AuthenticationFailed):
        await authenticate(door, Connection(), "wrong horse")
    with pytest.raises(AuthenticationFailed):
        door.admit(Connection().peer, Evidence(token="kera_a_b"))
    served: Any = door.guarded(door.service())[api.AUTHENTICATE]
    with pytest.raises(AuthenticationFailed, match="the request has no credentials"):
        await served(Call(messages.AuthenticateRequest(), memoryview(b""), Connection().peer))
    assert door.audit.failed == 3


def test_a_process_of_the_daemons_own_user_is_a_daemon(door: Guard) -> None:
    connection = Connection(transport="unix")
    door.admit(connection.peer, Evidence(user_id=os.geteuid()))
    assert connection.peer.identity is not None
    assert connection.peer.identity.is_daemon


def test_a_refusal_names_the_command_that_grants_the_right(door: Guard) -> None:
    alice = Connection(Identity("alice")).peer
    door.check(alice, Need(READ, ORDERS))
    door.check(alice, Need(READ, "stream:orders"))
    with pytest.raises(NotAllowed, match="kera acl grant user:alice delete stream:orders") as raised:
        door.check(alice, Need(Operation.DELETE, ORDERS))
    assert raised.value.attributes == {"principal": "user:alice", "operation": "delete", "resource": "stream:orders"}


def test_a_stream_that_a_user_may_not_see_looks_unknown(door: Guard) -> None:
    alice = Connection(Identity("alice")).peer
    for wanted in (PAYMENTS, "stream:payments"):
        with pytest.raises(UnknownStream) as raised:
            door.check(alice, Need(READ, wanted))
        assert "payments" not in raised.value.message or wanted != PAYMENTS
    with pytest.raises(NotAllowed):
        door.check(alice, Need(Operation.CREATE, "stream:payments"))  # a user who creates streams needs the reason
    assert door.audit.denied == 3
    with pytest.raises(UnknownStream) as missing:
        door.check(alice, Need(READ, MISSING))
    with pytest.raises(UnknownStream) as unseen:
        door.check(alice, Need(READ, PAYMENTS))
    assert str(missing.value).replace(str(MISSING), "?") == str(unseen.value).replace(str(PAYMENTS), "?")


def changed(door: Guard, *rules: messages.AccessRule, version: int = 2, users: bool = True) -> None:
    door.apply(table(version, [user("alice")] if users else [], rules), 1)


def met(door: Guard, who: Identity) -> Connection:
    connection = Connection()
    door.known.meet(connection.peer, who)
    return connection


def test_losing_a_used_right_ends_the_connections_of_a_user(door: Guard) -> None:
    alice, other = Identity("alice"), Identity("bob")
    first, second, bob = met(door, alice), met(door, alice), met(door, other)
    door.check(first.peer, Need(READ, ORDERS))
    changed(door, rule("user:alice", "stream:orders", WRITE))
    assert (first.ended, second.ended, bob.ended) == (1, 1, 0)
    with pytest.raises(NotAllowed):
        door.check(met(door, alice).peer, Need(READ, ORDERS))


def test_used_rights_are_remembered_despite_unrelated_changes(door: Guard, now: Now) -> None:
    """A waiting request was checked once: an unrelated change, or an expired identity, must not hide the check."""
    connection, guest = met(door, Identity("alice")), met(door, Identity("guest", until_s=now.s + 1))
    door.check(connection.peer, Need(READ, ORDERS))
    changed(door, *RULES, rule("user:bob", "stream:payments", READ), version=2)
    now.s += 1
    door.known.end(lambda who, _: "its time is up" if now.s >= who.until_s else "")
    assert (connection.ended, guest.ended) == (0, 1)
    assert (connection.peer.dismissed, guest.peer.dismissed) == ("", "its time is up")
    changed(door, version=3)
    assert connection.ended == 1


def test_a_user_that_lost_a_right_is_refused_until_its_connection_ends(door: Guard) -> None:
    """The user keeps another right, and its running requests must not use that one."""
    connection = met(door, Identity("alice"))
    served = door.guarded({api.DESCRIBE_STREAMLETS: lambda _: pytest.fail("it was asked")})[api.DESCRIBE_STREAMLETS]
    door.check(connection.peer, Need(READ, ORDERS))
    changed(door, rule("user:alice", "stream:orders", WRITE))
    with pytest.raises(AuthenticationFailed, match="your rights have changed"):
        door.check(connection.peer, Need(WRITE, ORDERS))
    with pytest.raises(AuthenticationFailed, match="your rights have changed"):
        served(Call(broker_pb2.DescribeStreamletsRequest(stream_id=ORDERS), memoryview(b""), connection.peer))
    connection.peer.closed()
    assert door.known.peers == 0


async def test_a_used_connection_keeps_its_identity(door: Guard) -> None:
    """Requests under way on the connection were allowed to its first identity, and end with its rights."""
    connection = met(door, Identity("bob"))
    await authenticate(door, connection)  # before the first request: like a client with a certificate and a password
    served = door.guarded({api.LIST_STREAMS: lambda _: Reply(coordinator_pb2.ListStreamsResponse())})[api.LIST_STREAMS]
    await cast(Any, served(Call(coordinator_pb2.ListStreamsRequest(), memoryview(b""), connection.peer)))
    await authenticate(door, connection)
    known = connection.peer.identity
    changed(door, *RULES, users=True)
    door.authenticator.accounts = Accounts(table(3, [user("alice", version=2)], RULES), 1, 0.0)
    with pytest.raises(AuthenticationFailed, match="another identity has authenticated on this connection"):
        await authenticate(door, connection)
    assert connection.peer.identity == known


def test_losing_a_right_found_by_allows_ends_the_connection(door: Guard) -> None:
    connection = met(door, Identity("alice"))
    assert not door.allows(connection.peer, Operation.ADMINISTER, CLUSTER)
    changed(door, rule("user:alice", CLUSTER, Operation.ADMINISTER))
    assert door.allows(connection.peer, Operation.ADMINISTER, CLUSTER)
    changed(door, version=3)
    assert connection.ended == 1
    assert not door.allows(connection.peer, Operation.ADMINISTER, CLUSTER)


def test_losing_an_unused_right_keeps_the_connections(door: Guard) -> None:
    connection = met(door, Identity("alice"))
    door.check(connection.peer, Need(READ, ORDERS))
    changed(door, rule("user:alice", "stream:orders", READ))
    assert not connection.ended
    door.check(connection.peer, Need(READ, ORDERS))


def test_a_user_with_too_many_used_rights_loses_its_connections_at_any_change(door: Guard) -> None:
    connection = met(door, Identity("alice"))
    changed(door, rule("user:alice", "group:*", Operation.USE))
    for number in range(5000):
        door.check(connection.peer, Need(Operation.USE, f"group:{number}"))
    changed(door, rule("user:alice", "group:4*", Operation.USE), version=3)
    assert connection.ended == 1


async def test_a_user_that_is_deleted_loses_its_connections(door: Guard) -> None:
    connection = Connection()
    await authenticate(door, connection)
    changed(door, *RULES, users=False)
    assert connection.ended == 1


async def test_only_the_next_change_ends_the_connection_that_made_one(door: Guard) -> None:
    """It still gets the answer to its own change."""
    connection = Connection()
    await authenticate(door, connection)
    CALLER.set(connection.peer)
    changed(door, *RULES, users=False)
    assert (connection.ended, door.known.peers) == (0, 1)
    CALLER.set(None)
    changed(door, *RULES, users=False, version=3)
    assert (connection.ended, door.known.peers) == (1, 0)


async def test_an_expired_identity_is_dismissed_after_a_while(now: Now) -> None:
    with guard(now, look_s=0.001) as door:
        connection = met(door, Identity("alice", until_s=now.s + 5))
        await asyncio.sleep(0.01)  # sleep: the guard has looked meanwhile, and has found nothing
        assert not connection.ended
        now.s += 5
        async with asyncio.timeout(30):
            while not connection.peer.dismissed:
                await asyncio.sleep(0.001)
        with pytest.raises(AuthenticationFailed, match="the token, or"):
            door.check(connection.peer, Need(READ, ORDERS))


def test_closed_connections_are_forgotten(door: Guard) -> None:
    for number in range(10_000):
        connection = met(door, Identity(f"u{number}"))
        connection.peer.closed()
    assert door.known.peers == 0
    assert len(door.known) < 5000


def test_a_table_of_a_former_leader_is_refused(door: Guard) -> None:
    door.apply(table(5), 3)
    with pytest.raises(StaleEpoch):
        door.apply(table(9), 2)
    door.apply(table(4), 3)  # overtaken on its way
    assert door.version == 5
    door.apply(table(1), 4)  # of older metadata, but from the present leader
    assert door.version == 1


def test_a_change_of_rights_calls_the_forgotten_callbacks(door: Guard) -> None:
    forgotten: list[int] = []
    door.known.forgotten.append(lambda: forgotten.append(1))
    met(door, Identity("alice"))
    changed(door, *RULES)
    assert forgotten


@pytest.mark.parametrize(
    ("who", "of_daemons", "taken"),
    [(None, False, False), (Identity("alice"), False, True), (Identity("alice"), True, False), (DAEMON, True, True)],
)
def test_only_permitted_peers_bypass_the_handlers(
    door: Guard, who: Identity | None, *, of_daemons: bool, taken: bool
) -> None:
    class Asker:
        bulk_bytes_max = 1
        peer = globals()["peer"](who)

        def answer(self, answers: bytes, requests: int) -> None:
            """Do nothing."""

    done = Taken(1, 1, 0, b"x")
    take = door.taker(lambda *_: done, of_daemons=of_daemons)
    assert take(Asker(), memoryview(b""), 1) == (done if taken else NOTHING)


def test_a_repeated_denial_is_logged_once(door: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    alice = peer(Identity("alice"))
    for _ in range(100):
        with pytest.raises(NotAllowed):
            door.check(alice, Need(Operation.DELETE, ORDERS))
    assert door.audit.denied == 100
    assert capsys.readouterr().err.count("denied") <= 1


def test_metrics_need_the_right_to_describe_the_cluster(now: Now) -> None:
    door = guard(now)
    assert not door.may_watch(Evidence())
    assert door.may_watch(Evidence(user_id=os.geteuid()))
    door.apply(table(rules=[rule("user:daemon", CLUSTER, Operation.DESCRIBE)]), 1)
    assert door.may_watch(Evidence(user_id=1))
    door.apply(table(2), 1)
    assert not door.may_watch(Evidence(user_id=1))
    with pytest.raises(AuthenticationFailed):
        door.may_watch(Evidence(token="kera_a_b"))


async def test_too_many_wrong_passwords_end_the_connection(door: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kera.server.access.guard.FAILED_S", 0.0)
    connection = Connection()
    for _ in range(FAILURES_MAX):
        with pytest.raises(AuthenticationFailed):
            await authenticate(door, connection, "wrong horse")
    assert not connection.ended
    with pytest.raises(AuthenticationFailed):
        await authenticate(door, connection, "wrong horse")
    assert connection.ended


def test_used_rights_on_overlong_names_are_not_remembered() -> None:
    door = guard(Now())
    door.apply(table(users=[user("bob")], rules=[rule("user:bob", "stream:pay*", Operation.DESCRIBE)]), 1)
    bob = Identity("bob")
    for name in ("payments", f"pay{'x' * RESOURCE_CHARS_MAX}"):
        door.check(peer(bob), Need(Operation.DESCRIBE, f"stream:{name}"))

    assert door.known.of(bob).resources == {(Operation.DESCRIBE, "stream:payments")}
