"""Files of unit tests need to survive only the test."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _files_are_not_synced() -> Iterator[None]:
    """A sync of a real disk takes milliseconds. Tests of failing syncs have functions of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
