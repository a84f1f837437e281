"""What the tests of the command line share."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logging_ends_with_the_test() -> Iterator[None]:
    """Commands log to standard error as it is in their test, where it is closed at the end."""
    yield
    structlog.reset_defaults()
