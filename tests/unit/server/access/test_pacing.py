"""Users over their quota wait for their answers; others do not. The tests run in virtual time: see conftest.py."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.errors import QuotaExceeded, TooManyRequests, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.method import Call, Handler, Peer, Reply
from kera.core.rpc.taking import NOTHING, Taken
from kera.server.access import acquaintances
from kera.server.access import usage as usages
from kera.server.access.guard import Guard
from kera.v1 import access_pb2 as messages
from kera.v1 import broker_pb2, coordinator_pb2
from tests.unit.core.access.support import DAEMON, Now, guard, rule, table

RULES = [rule("user:*", "stream:*", *(each for each in Operation if each.word not in {"use", "administer"}))]
ORDERS = 7


class Connection:
    """A peer that counts its holds."""

    def __init__(self, door: Guard, user: str = "alice", address: str = "10.0.0.9:1", transport: str = "tcp") -> None:
        self.held = 0
        self.peer = Peer(transport, address, hold=self.hold, release=self.release, lasts=transport != "call")
        door.known.meet(self.peer, DAEMON if not user else door.authenticator.known(Identity(user)))

    def hold(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1
        assert self.held >= 0


def quotas(version: int = 2, default: messages.Quota | None = None, **of: messages.Quota) -> messages.AccessTable:
    users = [messages.UserRecord(name=name, quota=quota) for name, quota in of.items()]
    return table(version, users, RULES, default_quota=default)


@pytest.fixture
def door() -> Guard:
    door = guard(Now(), super_users=["user:root"])
    door.apply(quotas(), 1)
    return door


def served(door: Guard, method: Any, handler: Handler) -> Any:
    return door.guarded({method: handler})[method]


def store(_: Call[Any]) -> Reply[Any]:
    return Reply(broker_pb2.MultiWriteChunksResponse())


def write(door: Guard, connection: Connection, size: int, handler: Handler = store) -> Any:
    request = broker_pb2.MultiWriteChunksRequest()
    return served(door, api.MULTI_WRITE_CHUNKS, handler)(Call(request, memoryview(bytes(size)), connection.peer))


def read(door: Guard, connection: Connection, size: int, *, later: bool = False, bytes_max: int = 0) -> Any:
    """Read `size` bytes, or the requested maximum."""
    request = broker_pb2.MultiReadChunksRequest(bytes_max=bytes_max)
    request.ranges.add().start.stream_id = ORDERS

    def give(call: Call[Any]) -> Any:
        given = min(size, call.message.bytes_max or size)
        reply = Reply(broker_pb2.MultiReadChunksResponse(), [memoryview(bytes(given))])

        async def wait() -> Reply[Any]:
            return reply

        return wait() if later else reply

    return served(door, api.MULTI_READ_CHUNKS, give)(Call(request, memoryview(b""), connection.peer))


async def waited(result: Any, ms: float) -> Reply[Any]:
    """Await an answer that takes `ms` milliseconds."""
    assert not isinstance(result, Reply)
    begun_s = time_s()
    reply: Reply[Any] = await result
    assert 1000 * (time_s() - begun_s) == pytest.approx(ms, abs=1)
    assert reply.message.throttled_ms == pytest.approx(ms, abs=2)  # the sum of two rounded numbers
    return reply


def time_s() -> float:
    return asyncio.get_running_loop().time()


async def test_a_user_without_a_quota_does_not_wait(door: Guard) -> None:
    door.apply(quotas(3, bob=messages.Quota(bytes_in_per_s=1, bytes_out_per_s=1, requests_per_s=1)), 1)
    for connection in (Connection(door), Connection(door, "")):
        for _ in range(100):
            assert isinstance(write(door, connection, 1 << 20), Reply)
            assert isinstance(read(door, connection, 1 << 20), Reply)
        assert not connection.held


async def test_a_request_over_the_rate_is_served_at_once_and_answered_later(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=10_000)), 1)
    connection, other = Connection(door), Connection(door, "bob")
    assert isinstance(write(door, connection, 10_000), Reply)
    served: list[int] = []

    def count(call: Call[Any]) -> Reply[Any]:
        served.append(len(call.bulk))
        return store(call)

    result = write(door, connection, 1_000, count)
    assert served == [1_000]
    assert connection.held == 1
    assert isinstance(write(door, other, 1_000), Reply)
    await waited(result, 100)
    assert not connection.held
    usage = door.usages.busiest(1)[0]
    assert (usage.bytes_in, usage.requests, usage.waits) == (11_000, 2, 1)
    assert usage.waited_s == pytest.approx(0.1)


async def test_a_refusal_over_the_rate_is_answered_later_too(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(requests_per_s=20)), 1)
    connection = Connection(door)

    def refuse(_: Call[Any]) -> Reply[Any]:
        raise UnknownStream("there is none")

    for _ in range(20):
        with pytest.raises(UnknownStream):
            write(door, connection, 0, refuse)
    result = write(door, connection, 0, refuse)
    assert connection.held
    begun_s = time_s()
    with pytest.raises(UnknownStream):
        await result
    assert time_s() - begun_s == pytest.approx(0.05)
    assert not connection.held


@pytest.mark.parametrize("later", [False, True])
async def test_read_bytes_count_when_they_are_answered(door: Guard, *, later: bool) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_out_per_s=10_000)), 1)
    connection = Connection(door)
    first = read(door, connection, 1 << 20, later=later)
    first = await first if inspect.isawaitable(first) else first
    assert sum(map(len, first.bulk)) == 10_000  # the quota of one second
    assert not first.message.throttled_ms
    result = read(door, connection, 1 << 20, later=later, bytes_max=1_000)
    reply = await waited(result, 100)
    assert sum(map(len, reply.bulk)) == 1_000
    assert not connection.held
    assert door.usages.busiest(1)[0].bytes_out == 11_000


async def test_bytes_read_without_a_quota_are_counted(door: Guard) -> None:
    connection = Connection(door)
    read(door, connection, 100)
    await read(door, connection, 200, later=True)
    assert door.usages.busiest(1)[0].bytes_out == 300


async def test_a_wait_has_a_maximum(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=1)), 1)
    connection = Connection(door)
    await waited(write(door, connection, 1 << 30), 1000 * usages.WAIT_S_MAX)
    assert not connection.held


async def test_connections_of_a_user_take_turns(door: Guard) -> None:
    """Also if one of them sends much at a time."""
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=100_000)), 1)
    sizes = {"large": 20_000, "small": 1_000}
    sent = dict.fromkeys(sizes, 0)
    write(door, Connection(door), 100_000)

    async def send(name: str) -> None:
        connection = Connection(door, address=f"10.0.0.9:{name}")
        while True:
            result = write(door, connection, sizes[name])
            sent[name] += sizes[name]
            if inspect.isawaitable(result):
                await result
            assert not connection.held

    tasks = [asyncio.create_task(send(name)) for name in sizes]
    await asyncio.sleep(10)  # sleep: of virtual time
    for task in tasks:
        task.cancel()
    assert sent == {name: pytest.approx(500_000, abs=20_000) for name in sizes}


async def test_a_client_that_leaves_holds_no_connection_and_no_debt(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=10_000)), 1)
    connection = Connection(door)
    await gone(door, connection, 11_000)
    assert not connection.held
    usage = door.usages.busiest(1)[0]
    await asyncio.sleep(0.11)  # sleep: of virtual time
    assert not usage.left_behind
    assert not usage._waiting
    assert usage._timer is None


async def gone(door: Guard, connection: Connection, size: int) -> None:
    """Write, and leave before the answer."""
    task = asyncio.ensure_future(write(door, connection, size))
    await asyncio.sleep(0)
    assert connection.held
    task.cancel()
    await asyncio.wait([task])


async def test_a_new_connection_still_owes_the_debt_of_an_abandoned_one(door: Guard) -> None:
    """Otherwise a client that does not wait for its answers could write without limit."""
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=10_000)), 1)
    stored: list[bytes] = []

    def count(call: Call[Any]) -> Reply[Any]:
        stored.append(bytes(call.bulk))
        return store(call)

    await gone(door, Connection(door), 11_000)
    again, other = Connection(door), Connection(door, "bob")
    assert isinstance(write(door, other, 1_000), Reply)
    request = bytearray(b"alice")
    call = Call(broker_pb2.MultiWriteChunksRequest(), memoryview(request), again.peer)
    result = asyncio.ensure_future(served(door, api.MULTI_WRITE_CHUNKS, count)(call))
    request[:] = b"other"  # the connection reuses its memory
    await asyncio.sleep(0)
    assert not stored
    assert again.held
    await waited(result, 100)
    assert stored == [b"alice"]
    assert not again.held


async def test_a_client_that_leaves_while_it_waits_is_not_served(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=10_000)), 1)
    await gone(door, Connection(door), 11_000)
    before = door.usages.busiest(1)[0].bytes_in
    for _ in range(10):
        await gone(door, Connection(door), 1_000)
    assert door.usages.busiest(1)[0].bytes_in == before


async def test_an_abandoned_debt_is_forgiven_like_any_other(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=1)), 1)
    await gone(door, Connection(door), 1 << 20)
    await gone(door, Connection(door), 1 << 20)
    again = Connection(door)
    await waited(write(door, again, 1 << 20), 2000 * usages.WAIT_S_MAX)  # for the abandoned debts, and for its own
    await gone(door, again, 1 << 20)
    door.apply(quotas(4), 1)
    assert isinstance(write(door, again, 1 << 20), Reply)


@pytest.mark.parametrize("most", [1 << 33, 1 << 63, (1 << 64) - 1])
async def test_a_very_large_quota_does_not_limit(door: Guard, most: int) -> None:
    door.apply(
        quotas(
            3, alice=messages.Quota(bytes_in_per_s=most, bytes_out_per_s=most, requests_per_s=most, connections=most)
        ),
        1,
    )
    connection = Connection(door)
    for _ in range(10):
        assert isinstance(write(door, connection, 1 << 20), Reply)
        assert isinstance(read(door, connection, 1 << 20), Reply)


async def test_a_changed_quota_applies_at_once(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=1_000)), 1)
    connection = Connection(door)
    result = write(door, connection, 2_500)
    assert connection.held
    door.apply(quotas(4, alice=messages.Quota(bytes_in_per_s=1_000_000)), 1)
    await waited(result, 1.5)
    result = write(door, connection, 10_000_000)
    assert connection.held
    door.apply(quotas(5), 1)
    assert not connection.held
    await waited(result, 0)
    assert isinstance(write(door, connection, 10_000_000), Reply)


async def test_the_default_quota_is_for_users_without_their_own(door: Guard) -> None:
    default, own = messages.Quota(bytes_in_per_s=1), messages.Quota(connections=9)
    door.apply(quotas(3, default, alice=own), 1)
    for user, waits in (("alice", False), ("bob", True), ("root", False), ("", False)):
        connection = Connection(door, user)
        result = write(door, connection, 100)
        assert bool(connection.held) == waits
        assert isinstance(result, Reply) != waits
        if waits:
            result.close()


class Asker:
    """A connection whose requests bypass the handlers."""

    bulk_bytes_max = 1 << 20

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def answer(self, answers: bytes, requests: int) -> None:
        """Do nothing."""


async def test_requests_bypass_the_handlers_until_the_quota_is_used_up(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=1_000)), 1)
    connection = Connection(door)
    taken = Taken(2_000, 10, 0, b"answers", 1_500)
    take = door.taker(lambda *_: taken, of_daemons=False)
    frames = memoryview(b"")
    assert take(Asker(connection.peer), frames, 10) == taken
    assert not connection.held
    assert take(Asker(connection.peer), frames, 10) == NOTHING  # the handler delays the answer
    assert take(Asker(Connection(door, "bob").peer), frames, 10) == taken
    await waited(write(door, connection, 10), 510)
    alice = next(each for each in door.usages.busiest(2) if each.who.user == "alice")
    assert (alice.requests, alice.bytes_in) == (11, 1_510)


async def test_tokens_and_passwords_of_a_user_share_one_quota(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(bytes_in_per_s=1_000)), 1)
    first, second = Peer("tcp", "10.0.0.9:1"), Peer("tcp", "10.0.0.9:2")
    door.known.meet(first, Identity("alice", how="password"))
    door.known.meet(second, Identity("alice", how="token", token_id="t"))
    assert first.remembered.usage is second.remembered.usage


async def test_many_identities_of_others_do_not_renew_the_burst_of_a_user(
    door: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many identities without a connection are forgotten."""
    monkeypatch.setattr(acquaintances, "REMEMBERED_MAX", 5)
    door.apply(quotas(3, alice=messages.Quota(requests_per_s=10)), 1)
    served = 0
    for number in range(30):
        alice, *others = [Peer("grpc", f"10.0.0.9:{address}", lasts=False) for address in range(3)]
        door.known.meet(alice, Identity("alice", how="jwt", until_s=float(number)))
        served += not alice.remembered.usage.asked(alice, 0)
        alice.closed()
        del alice
        for other in others:
            door.known.meet(other, Identity("bob", how="jwt", until_s=float(number), token_id=other.address))
        for other in others:
            other.closed()
    assert len(door.known) <= 7
    assert served < 15


async def test_usages_of_many_users_are_forgotten(door: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquaintances, "REMEMBERED_MAX", 5)
    monkeypatch.setattr(usages, "KEPT_MAX", 7)
    for number in range(30):
        Connection(door, f"u{number}").peer.closed()
    assert len(door.usages) <= 5 + 7 + 2


async def test_calls_of_grpc_over_the_rate_wait_too(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(requests_per_s=10)), 1)
    request = coordinator_pb2.GetStreamIdRequest(name="orders")

    async def look(_: Call[Any]) -> Reply[Any]:
        return Reply(coordinator_pb2.GetStreamIdResponse(stream_id=ORDERS))

    serve = served(door, api.GET_STREAM_ID, look)
    begun_s = time_s()
    for _ in range(13):
        await serve(Call(request, memoryview(b""), Connection(door, transport="grpc").peer))
    assert time_s() - begun_s == pytest.approx(0.3)


class Calls:
    """Calls of gRPC, which run side by side."""

    def __init__(self, door: Guard) -> None:
        self._door = door
        self.served = 0
        self._serve = served(door, api.GET_STREAM_ID, self._look)

    def _look(self, _: Call[Any]) -> Reply[Any]:
        self.served += 1
        return Reply(coordinator_pb2.GetStreamIdResponse(stream_id=ORDERS))

    async def one(self, address: str = "10.0.0.9:1", user: str = "alice") -> Reply[Any]:
        peer = Peer("grpc", address, lasts=False)
        self._door.known.meet(peer, self._door.authenticator.known(Identity(user)))
        request = coordinator_pb2.GetStreamIdRequest(name="orders")
        result = self._serve(Call(request, memoryview(b""), peer))
        return result if isinstance(result, Reply) else await result


async def test_concurrent_calls_over_the_rate_are_served_as_they_are_paid(door: Guard) -> None:
    """Otherwise each would wait alone, and a client could make any number of calls at once."""
    door.apply(quotas(3, alice=messages.Quota(requests_per_s=20)), 1)
    calls = Calls(door)
    begun_s = time_s()
    tasks = [asyncio.ensure_future(calls.one(f"10.0.0.9:{number % 3}")) for number in range(30)]
    await asyncio.sleep(0)
    assert calls.served == 20
    await calls.one(user="bob")
    assert calls.served == 21
    tasks[-1].cancel()
    await asyncio.wait(tasks)
    assert calls.served == 30
    assert time_s() - begun_s == pytest.approx(0.45)


async def test_a_call_that_would_wait_too_long_is_refused(door: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usages, "CALL_S_MAX", 0.05)
    door.apply(quotas(3, alice=messages.Quota(requests_per_s=1)), 1)
    calls = Calls(door)
    await calls.one()
    with pytest.raises(TooManyRequests) as raised:
        await calls.one()
    assert raised.value.retriable
    assert raised.value.attributes == {"quota": "requests_per_s", "value": 1, "principal": "user:alice"}
    assert raised.value.message == (
        "user:alice asks so much that calls would wait for more than 0.05 s, and its quota of requests per s is 1; an"
        " administrator can raise it: kera quota set alice --requests-per-s MORE"
    )
    assert calls.served == 1
    door.apply(quotas(4), 1)
    await calls.one()


async def test_a_connection_over_the_quota_is_refused(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(connections=2)), 1)
    first, second = Connection(door), Connection(door, transport="grpc")
    with pytest.raises(QuotaExceeded) as raised:
        Connection(door)
    assert raised.value.message == (
        "user:alice has 2 connections to this daemon, and its quota of connections is 2; an administrator"
        " can raise it: kera quota set alice --connections MORE"
    )
    assert raised.value.attributes == {"quota": "connections", "value": 2, "principal": "user:alice"}
    for _ in range(3):
        Connection(door, transport="call")  # single calls of gRPC are not connections
        Connection(door, "bob")
    door.known.meet(first.peer, Identity("alice", how="password"))  # it authenticates again
    with pytest.raises(QuotaExceeded):
        Connection(door)
    second.peer.closed()
    third = Connection(door)
    with pytest.raises(QuotaExceeded):
        Connection(door)
    door.known.meet(first.peer, Identity("bob"))
    Connection(door)
    assert third.peer.remembered.usage.connections == 2


async def test_a_lower_quota_does_not_end_connections(door: Guard) -> None:
    connections = [Connection(door) for _ in range(3)]
    door.apply(quotas(3, alice=messages.Quota(connections=1)), 1)
    assert all(each.peer.identity is not None for each in connections)
    with pytest.raises(QuotaExceeded, match="has 3 connections to this daemon, and its quota of connections is 1"):
        Connection(door)
    for each in connections:
        each.peer.closed()
        each.peer.closed()
    assert Connection(door).peer.remembered.usage.connections == 1


async def test_ended_connections_do_not_count(door: Guard) -> None:
    """The user has another identity, so its usage outlives the ended connections."""
    door.apply(quotas(3, alice=messages.Quota(connections=2)), 1)
    kept = Connection(door)
    for number in range(3):
        ended = Peer("tcp", f"10.0.0.9:{number}")
        door.known.meet(ended, Identity("alice", how="token", token_id="t"))
        door.known.end(lambda who, _: "its time is up" if who.token_id else "")
        ended.closed()
    assert kept.peer.remembered.usage.connections == 1


async def test_a_peer_refused_by_its_quota_gets_no_identity(door: Guard) -> None:
    door.apply(quotas(3, alice=messages.Quota(connections=0)), 1)
    peer = Peer("unix", "")
    with pytest.raises(QuotaExceeded):
        door.known.meet(peer, Identity("alice"))
    assert peer.identity is None
    assert not peer.on_close
