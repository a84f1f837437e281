"""Connections after a fork: nothing that a child does reaches the connections of its parent."""

import os
import socket
from collections.abc import Callable

import pytest

from kera.core.base.forks import Origin, cut_off, leave_to_parent
from kera.core.errors import ClosedError


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a child, and return its exit code: 0 after success."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_an_origin_tells_a_child_from_its_parent() -> None:
    origin = Origin()
    origin.check()

    def refused() -> None:
        with pytest.raises(ClosedError, match="forked"):
            origin.check()

    assert in_child(refused) == 0
    assert origin.is_here


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid = os.getpid()

    def forked(self) -> None:
        cut_off(self.sock)
        self.pid = os.getpid()


def test_a_child_gets_the_callback_and_cannot_send_on_its_parents_connection() -> None:
    ours, other = socket.socketpair()
    connection = Connection(ours)
    leave_to_parent(connection)

    def sends() -> None:
        assert connection.pid == os.getpid()
        with pytest.raises(OSError, match="Broken pipe"):
            ours.send(b"of the child")

    with ours, other:
        assert in_child(sends) == 0
        ours.send(b"of the parent")
        assert other.recv(100) == b"of the parent"
    assert connection.pid == os.getpid()
