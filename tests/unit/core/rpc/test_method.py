"""Methods, and the peer that handlers see."""

import pytest

from kera.core.rpc import Peer
from tests.unit.core.rpc.transports import ECHO


def test_the_path_of_a_method_is_that_of_grpc() -> None:
    assert ECHO.path == "/kera.test.Echo/Echo"


def test_callbacks_of_a_closed_peer_run_once_and_in_order() -> None:
    told: list[int] = []
    peer = Peer("tcp", "")
    for number in range(3):
        peer.on_close.append(lambda number=number: told.append(number))  # type: ignore[misc]

    peer.closed()
    peer.closed()

    assert told == [0, 1, 2]


def test_a_failing_callback_does_not_stop_the_others() -> None:
    told: list[str] = []
    peer = Peer("tcp", "")

    def fail() -> None:
        raise ValueError

    peer.on_close += [lambda: told.append("first"), fail, lambda: told.append("last")]

    with pytest.raises(ValueError):  # noqa: PT011 - there is nothing to match
        peer.closed()

    assert told == ["first", "last"]
