"""Credentials of a client over gRPC: which it shows, and how it goes on after a refusal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kera.core.access.credentials import CALL_TOKEN_CHARS_MAX, Credentials
from kera.core.access.identity import Identity
from kera.core.errors import AuthenticationFailed, Uncertain
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.grpc_strangers import SHOWN_BYTES_MAX
from kera.core.rpc.method import Call, Evidence, Handler, Method, Peer, Reply
from kera.v1 import access_pb2 as messages
from tests.examples import first_quick
from tests.unit.core.rpc.transports import (
    ECHO,
    HOST,
    UNARY,
    Closing,
    EchoRequest,
    EchoResponse,
    UnaryRequest,
    echo,
    eventually,
    numbered,
    unary_echo,
)


class Gate:
    """Admits a peer that shows the good token."""

    def __init__(self) -> None:
        self.good = "one"
        self.shown: list[str] = []
        self.peers: list[Peer] = []

    def admit(self, peer: Peer, evidence: Evidence) -> None:
        self.shown.append(evidence.token)
        self.peers.append(peer)
        if evidence.token == self.good:
            peer.identity = Identity("alice")
        elif evidence.token:
            raise AuthenticationFailed("the token expired 5 s ago; get a new one")

    async def authenticate(self, call: Call[messages.AuthenticateRequest]) -> Reply[messages.AuthenticateResponse]:
        if call.message.token != self.good:
            raise AuthenticationFailed("that is invalid")
        self.good = "a-session"
        return Reply(messages.AuthenticateResponse(session=self.good, expires_in_ms=1000))


class Running:
    def __init__(self) -> None:
        self.gate, self.token, self.closing = Gate(), "one", Closing()
        self.address = ""

    async def start(self, answering: Handler = echo) -> GrpcChannel:
        services: list[Any] = [{UNARY: unary_echo, ECHO: answering, api.AUTHENTICATE: self.gate.authenticate}]
        server = self.closing(GrpcServer(services, doorkeeper=self.gate))
        self.address = f"{HOST}:{await server.listen(HOST, 0)}"
        return self.closing(GrpcChannel(self.address, introduction=Credentials(token=lambda: self.token)))


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    running = Running()
    yield running
    await running.closing.close()


CALLS: list[tuple[Method[Any, Any], Any]] = [(UNARY, UnaryRequest()), (ECHO, numbered(1))]
KINDS = pytest.mark.parametrize(("method", "request_"), CALLS, ids=["unary", "stream"])


async def answered(channel: GrpcChannel) -> None:
    """Ask until an answer arrives: calls under way on an ended stream are lost, and no other error is raised."""
    while True:
        try:
            await channel.submit(ECHO, numbered(1), timeout_s=10)
            return
        except Uncertain:
            continue


async def test_a_client_reads_its_token_again_after_a_refusal(running: Running) -> None:
    channel = await running.start()
    await channel.submit(UNARY, UnaryRequest(), timeout_s=10)
    running.gate.good = running.token = "two"
    await channel.submit(UNARY, UnaryRequest(), timeout_s=10)
    assert running.gate.shown == ["one", "one", "two"]


async def test_a_new_stream_starts_with_the_current_token(running: Running) -> None:
    channel = await running.start()
    await channel.submit(ECHO, numbered(1), timeout_s=10)
    running.gate.good = running.token = "two"
    running.gate.peers[0].end()
    await answered(channel)
    assert running.gate.shown == ["one", "one", "two"]


async def test_a_request_on_an_ending_stream_is_uncertain_and_not_refused(running: Running) -> None:
    """The client may have a newer token. It shows it only after it learns that the stream ended."""
    handled: list[int] = []
    ends: list[Callable[[], None]] = []

    def dismissing(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        if call.peer.identity is None:
            raise AuthenticationFailed(call.peer.dismissed)
        handled.append(call.message.request_id)
        if len(handled) == 2:
            ends.append(call.peer.end)
            call.peer.end = lambda: None
            call.peer.dismiss("the token expired")
        return echo(call)

    channel = await running.start(dismissing)
    await channel.submit(ECHO, numbered(1), timeout_s=10)
    await channel.submit(ECHO, numbered(2), timeout_s=10)
    lost = channel.submit(ECHO, numbered(3), timeout_s=10)
    await channel.submit(UNARY, UnaryRequest(), timeout_s=10)  # a refusal would arrive before this answer
    ends.pop()()
    with pytest.raises(Uncertain, match="was lost"):
        await lost
    running.gate.good = running.token = "two"
    await answered(channel)
    assert handled == [1, 2, 1]


@pytest.mark.parametrize("found", [AuthenticationFailed("the token expired"), None], ids=["refused", "answered"])
async def test_a_waiting_request_on_an_ending_stream_is_uncertain_and_not_answered(
    running: Running, found: Exception | None
) -> None:
    """A late answer, also one with errors of ranges, would be for a peer without a known identity."""
    calls: list[Call[EchoRequest]] = []
    answer: asyncio.Future[Reply[EchoResponse]] = asyncio.get_running_loop().create_future()

    def handle(call: Call[EchoRequest]) -> Reply[EchoResponse] | asyncio.Future[Reply[EchoResponse]]:
        calls.append(call)
        return answer if len(calls) == 1 else echo(call)

    channel = await running.start(handle)
    lost = channel.submit(ECHO, numbered(1), timeout_s=10)
    await eventually(lambda: calls, "the server has the request")
    end, calls[0].peer.end = calls[0].peer.end, lambda: None
    calls[0].peer.dismiss("the token expired")
    if found is None:
        answer.set_result(echo(calls[0]))
    else:
        answer.set_exception(found)
    await channel.submit(UNARY, UnaryRequest(), timeout_s=10)  # the answer to the other would arrive before
    end()
    with pytest.raises(Uncertain, match="was lost"):
        await lost
    running.gate.good = running.token = "two"
    await answered(channel)


@pytest.mark.parametrize("rounds", first_quick(range(12), 4))
async def test_a_stream_can_be_ended_while_its_first_answer_is_sent(running: Running, rounds: int) -> None:
    """The status and the answer must not both carry the initial metadata: gRPC then sends no status."""

    async def end_after(rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.sleep(0)
        running.gate.peers[0].end()

    ending: list[asyncio.Task[None]] = []

    def ends(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        if not ending:
            ending.append(asyncio.create_task(end_after(rounds)))
        return echo(call)

    channel = await running.start(ends)
    with contextlib.suppress(Uncertain):  # the answer was too late
        await channel.submit(ECHO, numbered(1), timeout_s=10)
    await ending[0]
    lost: list[str] = []
    while len(running.gate.shown) < 2:
        try:
            await channel.submit(ECHO, numbered(1), timeout_s=10)
        except Uncertain as error:
            lost.append(error.message)
    assert [message for message in lost if "no answer" in message] == []


@KINDS
async def test_a_refused_token_is_retried_only_if_it_has_changed(running: Running, method: Any, request_: Any) -> None:
    channel = await running.start()
    running.gate.good = "two"
    for _ in range(2):
        before = len(running.gate.shown)
        with pytest.raises(AuthenticationFailed, match="the token expired"):
            await channel.submit(method, request_, timeout_s=10)
        assert running.gate.shown[before:] == ["one"]
    running.token = "two"
    await channel.submit(UNARY, UnaryRequest(), timeout_s=10)
    await channel.submit(method, request_, timeout_s=10)


@KINDS
async def test_an_unreadable_token_is_the_error_of_the_call(running: Running, method: Any, request_: Any) -> None:
    channel = await running.start()
    running.gate.good = "two"

    def gone() -> str:
        raise AuthenticationFailed("token_file cannot be read: No such file or directory")

    channel = running.closing(
        GrpcChannel(running.address, introduction=Credentials(token=lambda: "one" if first.pop() else gone()))
    )
    first = [False, True]
    with pytest.raises(AuthenticationFailed, match="token_file cannot be read"):
        await channel.submit(method, request_, timeout_s=10)


@KINDS
async def test_a_long_token_is_shown_once_for_a_session(running: Running, method: Any, request_: Any) -> None:
    channel = await running.start()
    running.token = running.gate.good = "x" * (CALL_TOKEN_CHARS_MAX + 1)
    for _ in range(3):
        await channel.submit(method, request_, timeout_s=10)
    assert {*running.gate.shown} == {"", "a-session"}


async def test_a_token_too_long_for_grpc_is_not_sent(running: Running) -> None:
    channel = await running.start()
    running.token = "x" * (SHOWN_BYTES_MAX + 1)
    with pytest.raises(AuthenticationFailed, match=f"{SHOWN_BYTES_MAX} for gRPC"):
        await channel.submit(UNARY, UnaryRequest(), timeout_s=20)
