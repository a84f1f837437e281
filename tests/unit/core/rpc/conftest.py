"""Every test of a transport runs on uvloop, as the daemons do, and on asyncio's own loop, as a user's program may.

gRPC reads and writes in threads of its own, and knows of a loop only to wake it: `make test` runs its tests on uvloop.

A test that waits too long fails after `TEST_S`. pytest-timeout alone is not enough: its signal raises an exception
that uvloop takes for one of a callback and reports; then uvloop waits on.
"""

import asyncio
import functools
import inspect
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from tests.unit.core.rpc.transports import HOST, Closing, Grpc, Tcp, Unix, Wire

HERE = Path(__file__).parent
TEST_S = 40
LARGE = (
    "test_a_server_takes_a_limited_number_of_waiting_calls",
    "test_all_replies_of_a_large_burst_arrive",
    "test_calls_of_a_method_arrive_in_the_order",
    "test_many_calls_in_flight",
    "test_many_large_calls",
    "test_the_server_stops_reading",
    "test_untaken_deferred_replies",
)
"""Tests that take long on each transport."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    del config, item
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave combinations of loop and transport that repeat others to `make test-all`."""
    if item.path.is_relative_to(HERE / "conformance"):
        repeated: tuple[str, ...] = ("asyncio-unix", "asyncio-grpc", "asyncio-tcp_tls", "uvloop-grpc_tls")
        if item.name.startswith(LARGE):
            repeated += ("uvloop-tcp_tls", "uvloop-unix")
    elif item.path.is_relative_to(HERE) and (item.path.name.startswith("test_grpc") or item.name.startswith(LARGE)):
        repeated = ("asyncio",)
    else:
        return
    if item.name.partition("[")[2].startswith(repeated):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound each test of this directory."""
    for item in items:
        if item.path.is_relative_to(HERE) and isinstance(item, pytest.Function):
            if inspect.iscoroutinefunction(item.obj):
                item.obj = bounded(item.obj)
            # For code that hangs outside of a test's coroutine: ends the process after it has printed all stacks.
            item.add_marker(pytest.mark.timeout(3 * TEST_S, method="thread"))


def bounded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    @functools.wraps(test)
    async def in_time(*arguments: Any, **fixtures: Any) -> None:
        async with asyncio.timeout(TEST_S):
            await test(*arguments, **fixtures)

    return in_time


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a short path for sockets: the kernel takes 107 bytes, and tmp_path may be longer."""
    path = Path(tempfile.mkdtemp(prefix="kera-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    """Takes a server or a channel, and closes it after the test, also after a failure."""
    closing = Closing()
    yield closing
    await closing.close()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """TLS for both ends; each asks the other for its certificate."""
    authority, _ = Authority.open_or_make(tmp_path_factory.mktemp("certificates"))
    one = authority.issue(HOST)
    return Tls(TlsFiles(one.cert, one.key, authority.path, "required"))


@pytest.fixture(params=["grpc", "grpc_tls", "tcp", "tcp_tls", "unix"])
async def wire(request: pytest.FixtureRequest, short_path: Path, tls: Tls) -> AsyncIterator[Wire]:
    """One of the transports; its servers and channels end with the test."""
    kinds: dict[str, Callable[[], Wire]] = {
        "grpc": Grpc,
        "grpc_tls": lambda: Grpc(tls),
        "tcp": Tcp,
        "tcp_tls": lambda: Tcp(tls),
        "unix": lambda: Unix(short_path / "socket"),
    }
    wire = kinds[request.param]()
    yield wire
    await wire.close()


def is_grpcs_own(context: dict[str, Any]) -> bool:
    """gRPC has one queue of events per process, and reports to this test's loop a loop that ended with another test."""
    return "PollerCompletionQueue" in context["message"]


@pytest.fixture(autouse=True)
async def _no_lost_exceptions() -> AsyncIterator[None]:
    """Fail the test for errors that the loop would only log: a failed callback, a task that was never awaited."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    yield
    await asyncio.sleep(0)
    assert [context for context in told if not is_grpcs_own(context)] == []
