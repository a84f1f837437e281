"""The loops of the producer's tests."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.virtual_loop import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return a loop with virtual time, as the fake broker has no sockets: a slow machine lets no time run out.

    See pytest-asyncio.
    """
    del config
    return {"loop": asyncio.new_event_loop if item.name.endswith("_on_a_real_loop") else VirtualLoop}
