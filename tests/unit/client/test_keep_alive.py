"""`KeepAlive`: heartbeats from a thread, against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kera.client.consuming.groups.keep_alive import KeepAlive
from kera.core.base.clock import SystemClock
from kera.core.errors import AuthenticationFailed, NotLeader, ProtocolError, Unavailable
from kera.core.rpc import Call, Reply, api
from kera.core.rpc.grpc_server import GrpcServer
from kera.v1 import consumer_group_pb2
from tests.unit.client.support import until


class Coordinator:
    """Answers heartbeats, or names the leader that does."""

    def __init__(self) -> None:
        self.leader: str | None = None
        self.member = True
        self.seen: list[consumer_group_pb2.KeepAliveRequest] = []
        self.away = False
        self.server = GrpcServer([{api.KEEP_ALIVE: self.answer}])
        self.address = ""

    async def answer(
        self, call: Call[consumer_group_pb2.KeepAliveRequest]
    ) -> Reply[consumer_group_pb2.KeepAliveResponse]:
        if self.away:
            raise Unavailable("away")
        if self.leader is not None:
            raise NotLeader("another one leads", leader=self.leader)
        self.seen.append(call.message)
        return Reply(consumer_group_pb2.KeepAliveResponse(member=self.member))


@pytest.fixture
async def coordinators() -> AsyncIterator[list[Coordinator]]:
    made = [Coordinator(), Coordinator()]
    for each in made:
        each.address = f"127.0.0.1:{await each.server.listen('127.0.0.1', 0)}"
    yield made
    await asyncio.gather(*(each.server.close() for each in made))


def keep_alive(*addresses: str, busy_ms: int = 0) -> KeepAlive:
    made = KeepAlive(
        addresses, consumer_group="app", member_id="m", interval_s=0.02, busy_ms=lambda: busy_ms, clock=SystemClock()
    )
    made.start()
    return made


async def test_heartbeats_name_the_member_and_how_long_it_has_been_busy(coordinators: list[Coordinator]) -> None:
    said = keep_alive(coordinators[0].address, busy_ms=7)
    begun_s = said.heard_s
    await until(lambda: len(coordinators[0].seen) > 2)
    said.stop()
    first = coordinators[0].seen[0]
    assert (first.consumer_group, first.member_id, first.busy_ms) == ("app", "m", 7)
    assert said.heard_s > begun_s


async def test_heartbeats_follow_the_leader_and_try_other_coordinators(coordinators: list[Coordinator]) -> None:
    one, two = coordinators
    one.leader = two.address
    said = keep_alive("127.0.0.1:1", one.address)
    await until(lambda: bool(two.seen))
    two.away, one.leader = True, None
    await until(lambda: bool(one.seen))
    said.stop()


async def test_an_answer_that_denies_the_membership_does_not_count_as_heard(coordinators: list[Coordinator]) -> None:
    coordinators[0].member = False
    said = keep_alive(coordinators[0].address)
    begun_s = said.heard_s
    await until(lambda: len(coordinators[0].seen) > 2)
    said.stop()
    assert said.heard_s == begun_s


async def test_no_heartbeats_are_sent_while_other_requests_are_answered(coordinators: list[Coordinator]) -> None:
    said = keep_alive(coordinators[0].address)
    said.answered(SystemClock().boottime_s() + 1000)
    count = len(coordinators[0].seen)
    other = keep_alive(coordinators[1].address)
    await until(lambda: len(coordinators[1].seen) > 5)
    assert len(coordinators[0].seen) <= count + 1
    said.stop()
    other.stop()


async def test_errors_do_not_end_the_heartbeats(coordinators: list[Coordinator]) -> None:
    errors = [OSError("no such file"), ProtocolError("not an answer"), AuthenticationFailed("wrong password")]

    def busy_ms() -> int:
        if errors:
            raise errors.pop()
        return 7

    said = KeepAlive(
        [coordinators[0].address],
        consumer_group="app",
        member_id="m",
        interval_s=0.02,
        busy_ms=busy_ms,
        clock=SystemClock(),
    )
    said.start()
    await until(lambda: bool(coordinators[0].seen))
    said.stop()
