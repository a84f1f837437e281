"""The registration with several coordinators; tests of brokers and backups cover their use of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from kera.core.base.clock import boottime_s
from kera.core.base.settings import InvalidSettings
from kera.core.data_dir import DataDirectory
from kera.core.errors import KeraError, NotLeader, StaleEpoch, StartError, Unavailable
from kera.core.rpc import Call, Reply, api
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from kera.server.registration import CoordinatorUnreachable, Registration, RegistrationTiming
from kera.v1 import coordinator_pb2 as messages

WAIT_S = 20.0


class NewDirectory:
    """A data directory without an identity."""

    path = Path("nowhere")

    def load(self) -> tuple[int, str]:
        return 0, ""


class FakeCoordinator:
    def __init__(self) -> None:
        self.address = ""
        self.error: KeraError | None = None
        self.beats = 0
        self.answering = asyncio.Event()
        self.answering.set()

    async def heartbeat(self, _: Call[messages.HeartbeatRequest]) -> Reply[messages.HeartbeatResponse]:
        self.beats += 1
        await self.answering.wait()
        if self.error is not None:
            raise self.error
        return Reply(messages.HeartbeatResponse())


@asynccontextmanager
async def serving(count: int, **timing: float) -> AsyncIterator[tuple[Registration, list[FakeCoordinator]]]:
    found, servers = [FakeCoordinator() for _ in range(count)], []
    for fake in found:
        servers.append(GrpcServer([{api.HEARTBEAT: fake.heartbeat}]))
        fake.address = f"127.0.0.1:{await servers[-1].listen('127.0.0.1', 0)}"
    registration = registering(",".join(fake.address for fake in found), **timing)
    registration.heartbeat_interval_s = 0.005
    try:
        yield registration, found
    finally:
        await registration.close()
        for server in servers:
            await server.close(0)


def registering(addresses: str, **timing: float) -> Registration:
    return Registration(addresses, cast("DataDirectory", NewDirectory()), timing=RegistrationTiming(**timing))


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def beating(registration: Registration) -> "asyncio.Task[None]":
    return asyncio.create_task(registration.beat(api.HEARTBEAT, messages.HeartbeatRequest))


async def test_heartbeats_follow_the_leading_coordinator() -> None:
    async with serving(2) as (registration, (one, two)):
        one.error = NotLeader("no", leader=two.address)
        task = beating(registration)
        await until(lambda: two.beats > 2)
        assert one.beats == 1

        one.error, two.error = None, NotLeader("no", leader="")
        await until(lambda: one.beats > 3)

        one.error = StaleEpoch("gone")
        with pytest.raises(StaleEpoch):
            await asyncio.wait_for(task, WAIT_S)


async def test_heartbeats_leave_a_hanging_coordinator_for_another() -> None:
    async with serving(2, beat_timeout_s=0.05) as (registration, (one, two)):
        one.answering.clear()
        task = beating(registration)
        await until(lambda: two.beats > 2)

        assert one.beats == 1
        task.cancel()
        one.answering.set()


async def test_last_sent_is_the_time_of_the_last_answered_request() -> None:
    async with serving(1) as (registration, (one,)):
        assert registration.last_sent_s == 0
        one.answering.clear()
        before = boottime_s()
        task = beating(registration)
        await until(lambda: one.beats)
        assert registration.last_sent_s == 0, "nothing was answered yet"

        one.error = Unavailable("not now")
        one.answering.set()
        await until(lambda: one.beats > 3)
        assert registration.last_sent_s == 0, "an error is not an answer"

        one.answering.clear()
        one.error = None
        beats = one.beats
        await until(lambda: one.beats > beats)
        arrived = boottime_s()
        registration.heartbeat_interval_s = WAIT_S  # this heartbeat is the last
        one.answering.set()
        await until(lambda: registration.last_sent_s)
        assert before < registration.last_sent_s <= arrived
        task.cancel()


async def test_a_request_waits_for_a_leader_and_then_fails() -> None:
    async with serving(2, retry_interval_s=0.005) as (registration, coordinators):
        for fake in coordinators:
            fake.error = NotLeader("no", leader="")
        with pytest.raises(CoordinatorUnreachable, match="no coordinator that leads at"):
            await registration.ask(api.HEARTBEAT, messages.HeartbeatRequest(), 0.05)

        asking = asyncio.create_task(registration.ask(api.HEARTBEAT, messages.HeartbeatRequest(), WAIT_S))
        beats = coordinators[1].beats
        await until(lambda: coordinators[1].beats > beats)
        coordinators[1].error = None
        await asyncio.wait_for(asking, WAIT_S)


async def test_the_error_has_the_reason_of_a_coordinator_that_refuses(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("127.0.0.1")
    server = GrpcServer([], tls=Tls(TlsFiles(one.cert, one.key, authority.path)))
    registration = registering(f"127.0.0.1:{await server.listen('127.0.0.1', 0)}", retry_interval_s=0.001)
    told = "if it speaks TLS, set tls_ca"
    try:
        with capture_logs() as lines, pytest.raises(CoordinatorUnreachable, match=told) as caught:
            await registration.ask(api.HEARTBEAT, messages.HeartbeatRequest(), 0.1)
    finally:
        await registration.close()
        await server.close(0)
    assert "has let this daemon in within 0.1 s" in caught.value.message
    assert "start one" not in caught.value.message
    assert [told in line["reason"] for line in lines if line["event"] == "waiting for the coordinator"] == [True]


@pytest.mark.parametrize("addresses", ["", "host", "a:1,b"])
async def test_a_wrong_coordinator_address_is_a_start_error(addresses: str) -> None:
    with pytest.raises(InvalidSettings, match="coordinator: ") as error:
        registering(addresses)
    assert isinstance(error.value, StartError)


async def test_waiting_for_the_coordinator_is_logged_once_and_at_its_end() -> None:
    async with serving(1, retry_interval_s=0.001) as (registration, (one,)):
        one.error = NotLeader("not yet", leader="")
        with capture_logs() as lines:
            request = messages.HeartbeatRequest()
            asked = asyncio.create_task(registration.ask(api.HEARTBEAT, request, WAIT_S))
            await until(lambda: one.beats > 20)
            one.error = None
            await asked

    assert [line["event"] for line in lines] == ["waiting for the coordinator", "coordinator is there"]
