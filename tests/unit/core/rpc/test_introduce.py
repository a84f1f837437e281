"""The introduction of a client to a daemon."""

import asyncio
import threading

import pytest

from kera.core.access.credentials import Steps
from kera.core.errors import AuthenticationFailed
from kera.core.rpc.method import introduce
from kera.v1.access_pb2 import AuthenticateRequest, AuthenticateResponse

TIMEOUT_S = 30.0


async def answered(_: AuthenticateRequest) -> AuthenticateResponse:
    return AuthenticateResponse(scram=b"many iterations")


async def test_hashing_a_password_does_not_block_the_event_loop() -> None:
    begun, hashed = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def introduction(*, each_call: bool) -> Steps:
        del each_call
        yield AuthenticateRequest()
        loop.call_soon_threadsafe(begun.set)
        assert hashed.wait(TIMEOUT_S)
        yield AuthenticateRequest()
        return "a session"

    introducing = asyncio.create_task(introduce(introduction, answered, each_call=True))
    await asyncio.wait_for(begun.wait(), TIMEOUT_S)
    hashed.set()
    assert await introducing == "a session"


async def test_an_error_about_an_answer_is_raised() -> None:
    def introduction(*, each_call: bool) -> Steps:
        del each_call
        yield AuthenticateRequest()
        raise AuthenticationFailed("the server asks for too much")

    with pytest.raises(AuthenticationFailed, match="asks for too much"):
        await introduce(introduction, answered, each_call=False)
