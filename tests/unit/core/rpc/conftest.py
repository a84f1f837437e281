"""Every test of a transport runs on uvloop, as the daemons do, and on asyncio's own loop, as a user's program may."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.unit.core.rpc.transports import Grpc, Tcp, Unix, Wire


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    del config, item
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose name leaves room for a socket's: the kernel takes 107 bytes, and tmp_path may be longer."""
    path = Path(tempfile.mkdtemp(prefix="kera-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["grpc", "tcp", "unix"])
async def wire(request: pytest.FixtureRequest, short_path: Path) -> AsyncIterator[Wire]:
    """One of the transports; what is opened with it ends with the test."""
    kinds: dict[str, Callable[[], Wire]] = {"grpc": Grpc, "tcp": Tcp, "unix": lambda: Unix(short_path / "socket")}
    wire = kinds[request.param]()
    yield wire
    await wire.close()


def is_grpcs_own(context: dict[str, Any]) -> bool:
    """gRPC has one queue of events per process, and so tells this test's loop of a loop that ended with another."""
    return "PollerCompletionQueue" in context["message"]


@pytest.fixture(autouse=True)
async def _no_lost_exceptions() -> AsyncIterator[None]:
    """What the loop would only log (a callback that failed, a task that nobody awaited) fails the test."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    yield
    await asyncio.sleep(0)
    assert [context for context in told if not is_grpcs_own(context)] == []
