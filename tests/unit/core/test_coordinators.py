import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kera.core.coordinators import CONVERSATIONS_MAX, LEARNED_MAX, Coordinators
from kera.core.errors import InvalidArgument, KeraError, NotLeader, Unavailable, Uncertain, UnknownStream
from kera.core.rpc import Call, Reply, api
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from kera.v1 import coordinator_pb2 as messages

TIMEOUT_S = 10.0


class FakeCoordinator:
    """Answers with its own address, or with an error."""

    def __init__(self) -> None:
        self.address = ""
        self.error: KeraError | None = None
        self.silent = False
        self.asked = 0
        self.waiting = 0

    async def describe(self, _: Call[messages.DescribeClusterRequest]) -> Reply[messages.DescribeClusterResponse]:
        self.asked += 1
        if self.silent:
            self.waiting += 1
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return Reply(messages.DescribeClusterResponse(cluster_id=self.address))


@asynccontextmanager
async def serving(count: int) -> AsyncIterator[list[FakeCoordinator]]:
    found, servers = [FakeCoordinator() for _ in range(count)], []
    for fake in found:
        servers.append(GrpcServer([{api.DESCRIBE_CLUSTER: fake.describe}], connection_calls_max=CONVERSATIONS_MAX))
        fake.address = f"127.0.0.1:{await servers[-1].listen('127.0.0.1', 0)}"
    try:
        yield found
    finally:
        for server in servers:
            await server.close(0)


@asynccontextmanager
async def knowing(*addresses: str) -> AsyncIterator[Coordinators]:
    coordinators = Coordinators(" , ".join(addresses))
    try:
        yield coordinators
    finally:
        await coordinators.close()


@pytest.mark.parametrize(
    ("addresses", "text"),
    [
        ("", "no address of a coordinator"),
        (" , ", "no address"),
        ("http://localhost:7400", "without 'http://'"),
        ("localhost:7400,kera://other:7400", "without 'kera://'"),
        ("localhost", "it has no port"),
        ("a:1,b", "it has no port"),
        ("localhost:port", "a port is a number from 0 to 65535"),
        (":1", "it has no host"),
        ("localhost:7400;other:7400", "separated by commas"),
        ("localhost:0", "port 0"),
        ("a b:7400", "spaces"),
        (None, "text"),
        (["localhost:7400"], "text"),
    ],
)
def test_the_error_about_an_address_says_what_is_wrong(addresses: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Coordinators(addresses)


@pytest.mark.parametrize("address", ["localhost:7400", "[::1]:7400", "10.0.0.1:1", "a.example.org:65535"])
def test_valid_addresses_are_accepted(address: str) -> None:
    assert Coordinators(f" {address} , other:1,").addresses == [address, "other:1"]


async def ask(coordinators: Coordinators, timeout_s: float = TIMEOUT_S) -> str:
    answer = await coordinators.ask(api.DESCRIBE_CLUSTER, messages.DescribeClusterRequest(), timeout_s=timeout_s)
    return answer.cluster_id


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_named_leader_is_asked_at_once_and_from_then_on() -> None:
    async with serving(3) as (one, two, three), knowing(one.address, two.address, three.address) as coordinators:
        one.error = two.error = NotLeader("no", leader=three.address)

        assert await ask(coordinators) == await ask(coordinators) == three.address
        assert (one.asked, two.asked, three.asked) == (1, 0, 2)


async def test_the_leader_may_have_an_address_that_was_not_given() -> None:
    async with serving(2) as (one, two), knowing(one.address) as coordinators:
        one.error = NotLeader("no", leader=two.address)

        assert await ask(coordinators) == two.address
        one.error, two.error = None, NotLeader("no", leader="")
        assert await ask(coordinators) == one.address


@pytest.mark.parametrize("leader", ["", "nonsense", "not there"])
async def test_each_coordinator_is_asked_once_without_a_usable_leader(leader: str) -> None:
    async with serving(2) as (one, two), knowing(one.address, nobody(), two.address) as coordinators:
        one.error = NotLeader("no", leader=nobody() if leader == "not there" else leader)

        assert await ask(coordinators) == two.address
        two.error = one.error
        with pytest.raises(NotLeader):
            await ask(coordinators)
        assert (one.asked, two.asked) == (2, 2)


async def test_coordinators_that_name_each_other_are_asked_once_each() -> None:
    async with serving(2) as (one, two), knowing(one.address, two.address) as coordinators:
        one.error, two.error = NotLeader("no", leader=two.address), NotLeader("no", leader=one.address)

        with pytest.raises(NotLeader):
            await ask(coordinators)
        assert (one.asked, two.asked) == (1, 1)


async def test_the_error_says_that_no_coordinator_can_be_reached() -> None:
    async with knowing(nobody(), nobody()) as coordinators:
        with pytest.raises(Unavailable, match=r"no coordinator can be reached .*; is the cluster running") as caught:
            await ask(coordinators)
        assert "refused" not in caught.value.attributes


@pytest.mark.parametrize("first", [True, False])
async def test_the_error_has_the_reason_of_a_coordinator_that_refuses(tmp_path: Path, *, first: bool) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("127.0.0.1")
    server = GrpcServer([], tls=Tls(TlsFiles(one.cert, one.key, authority.path)))
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    try:
        async with knowing(*([address, nobody()] if first else [nobody(), address])) as coordinators:
            with pytest.raises(Unavailable) as caught:
                await ask(coordinators)
    finally:
        await server.close(0)
    assert caught.value.message == (
        f"no coordinator can be reached (cannot connect to {address}: it closes the connection at once; if it speaks"
        " TLS, set tls_ca)"
    )


async def test_a_coordinator_that_timed_out_is_not_asked_first_again() -> None:
    async with serving(2) as (one, two), knowing(one.address, two.address) as coordinators:
        one.silent = True

        with pytest.raises(Uncertain):
            await ask(coordinators, timeout_s=0.05)
        assert await ask(coordinators) == two.address
        assert one.asked == 1


@pytest.mark.parametrize("error", [UnknownStream("s"), Unavailable("too few brokers")])
async def test_an_error_of_the_leader_is_raised_without_asking_others(error: KeraError) -> None:
    async with serving(2) as (one, two), knowing(one.address, two.address) as coordinators:
        one.error = error

        with pytest.raises(type(error)):
            await ask(coordinators)
        assert two.asked == 0


async def test_the_number_of_learned_leaders_is_limited() -> None:
    async with serving(1) as (one,), knowing(one.address) as coordinators:
        for _ in range(LEARNED_MAX + 3):
            one.error = NotLeader("no", leader=nobody())
            with pytest.raises(NotLeader):
                await ask(coordinators)

        assert len(coordinators._learned) == LEARNED_MAX


async def test_waiting_calls_do_not_delay_others_or_each_other() -> None:
    async with serving(1) as (fake,), knowing(fake.address) as coordinators:
        fake.silent = True
        waiting = [
            asyncio.ensure_future(
                coordinators.ask(
                    api.DESCRIBE_CLUSTER,
                    messages.DescribeClusterRequest(),
                    timeout_s=TIMEOUT_S,
                    conversation=str(number),
                )
            )
            for number in range(2 * CONVERSATIONS_MAX + 1)
        ]
        async with asyncio.timeout(TIMEOUT_S):
            while fake.waiting < len(waiting):
                await asyncio.sleep(0.001)
        fake.silent = False
        request = messages.DescribeClusterRequest()
        answer = await coordinators.ask(api.DESCRIBE_CLUSTER, request, timeout_s=TIMEOUT_S)
        assert answer.cluster_id == fake.address
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
