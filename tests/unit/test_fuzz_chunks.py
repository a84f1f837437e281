"""A short run of ``make fuzz-chunks``: in children, so that what ends a process is found."""

from __future__ import annotations

import random

import pytest

from kera.core.errors import KeraError
from tests.chaos.chunks import mutated, open_as_reader, opened, run, too_large, use, whole

EXAMPLES = 1_000


@pytest.mark.timeout(120)
def test_no_chunk_ends_a_reader_and_each_is_read_or_refused_by_its_name() -> None:
    told: list[str] = []
    outcomes, ended = run(EXAMPLES, 7, tell=told.append)
    assert (ended, told) == ([], [])
    assert set(outcomes) == {"read", "corrupt_chunk"}
    assert outcomes.total() == EXAMPLES
    assert min(outcomes.values()) > EXAMPLES // 50, "some are still whole, and some are not"


def test_what_is_not_changed_is_read() -> None:
    for source in whole():
        found = opened(source, source.payload)
        assert found.equals(source.batch)
        assert use(found) == "read"
    for source in too_large():
        assert open_as_reader(source, source.payload) == "corrupt_chunk"


def test_a_seed_gives_the_same_chunk_again() -> None:
    for source in (whole()[0], whole()[-1]):
        assert mutated(source, random.Random(5)) == mutated(source, random.Random(5)) != source.payload
        with pytest.raises(KeraError):
            opened(source, source.payload[:60])
