"""The loops on which the tests of this folder run."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.virtual_loop import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests of waits take no time; the others have threads, for which a virtual loop would not wait.

    See pytest-asyncio.
    """
    del config
    return {"loop": VirtualLoop if item.path.stem == "test_pacing" else asyncio.new_event_loop}
