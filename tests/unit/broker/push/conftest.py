"""A broker that pushes without sockets, a reader, and the event loops for tests of the server with sockets."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from kera.broker.serving.limits import PushLimits
from tests.unit.broker.push_support import SLOTS, PushNode, Reader
from tests.unit.broker.support import BROKER_ID, Engine, stream_info


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests of the server on uvloop, as brokers do, and on asyncio's own loop: their transports differ.

    See pytest-asyncio.
    """
    del config, item
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave tests of push domains on asyncio's own loop to `make test-all`: tests of the server have it."""
    if item.path.name == "test_push_domains.py" and item.name.partition("[")[2].startswith("asyncio"):
        item.add_marker(pytest.mark.slow)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(SLOTS)


@pytest.fixture
def limits() -> PushLimits:
    return PushLimits()


@pytest.fixture
def node(engine: Engine, limits: PushLimits) -> PushNode:
    """A node that owns streamlets 0 and 1 of stream 7, each with two entries, but not streamlet 2."""
    return PushNode(engine, stream_info(owners=(BROKER_ID, BROKER_ID, BROKER_ID + 1), entries=2), limits=limits)


@pytest.fixture
def reader(node: PushNode) -> Reader:
    return Reader(node)
