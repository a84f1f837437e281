"""These tests run on uvloop, as brokers do, and on asyncio's own loop: their transports are not the same."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """See pytest-asyncio."""
    del config, item
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
