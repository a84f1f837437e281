"""The process that keeps a driver's tokens: it is found, started once, and ends with the driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kera.core.base.settings import InvalidSettings
from kera.spark_connector.connection import Connection
from kera.spark_connector.delegation import asking
from kera.spark_connector.delegation.asking import Lease, connected
from kera.spark_connector.delegation.driver import Driver


class Child:
    """A process that stands for a driver."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        # driver_of looks for the parent of the asking process: any child of ours can stand for it.
        started = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        self.driver = Driver(self._process.pid, started)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    child = Child()
    monkeypatch.setattr(asking, "driver_of", lambda _: child.driver)
    yield child
    child.end()
    for keeper in keepers(child.driver):
        with suppress(psutil.NoSuchProcess):
            keeper.wait(30)


def keepers(driver: Driver) -> list[psutil.Process]:
    wanted = ["kera.spark_connector.delegation", str(driver.process_id), driver.started]
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.cmdline()[2:] == wanted and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


@pytest.mark.slow
def test_concurrent_requests_start_only_one_keeper(driver: Child) -> None:
    socks = []

    def ask() -> None:
        socks.append(connected(driver.driver))

    askers = [threading.Thread(target=ask) for _ in range(5)]
    for each in askers:
        each.start()
    for each in askers:
        each.join()

    assert len(socks) == 5
    for started in asking._started:
        with suppress(subprocess.TimeoutExpired):
            started.wait(0.5)  # those that find the name taken end at once
    assert len(keepers(driver.driver)) == 1
    for sock in socks:
        sock.close()


def test_the_keeper_has_a_session_of_its_own_and_ends_with_the_driver(driver: Child) -> None:
    with connected(driver.driver):
        (keeper,) = keepers(driver.driver)
        assert os.getsid(keeper.pid) == keeper.pid
        driver.end()
        keeper.wait(30)


def test_the_keepers_error_reaches_its_caller_and_a_dead_keeper_is_replaced(driver: Child) -> None:
    lease = Lease()
    for _ in range(2):
        with pytest.raises(InvalidSettings, match="user and password_file"):
            lease.for_tasks(Connection("127.0.0.1:1", (("user", "alice"),)), ["a"])
        (keeper,) = keepers(driver.driver)
        keeper.send_signal(signal.SIGKILL)
        keeper.wait(30)
    lease.close()
