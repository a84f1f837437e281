"""A short run of ``make fuzz-chunks``: in children, so that what ends a process is found."""

from __future__ import annotations

import random

import pytest

from kera.core.errors import KeraError
from kera.core.record_batch import decode_payload
from tests.chaos.chunks import ROWS, mutated, open_as_reader, run, sources, use
from tests.chaos.growing import GROWING

EXAMPLES = 3_000


@pytest.mark.timeout(120)
def test_no_chunk_ends_a_reader_and_each_is_read_or_refused_by_its_name() -> None:
    told: list[str] = []
    outcomes, ended = run(EXAMPLES, 7, tell=told.append)
    assert (ended, told) == ([], [])
    assert set(outcomes) == {"read", "corrupt_chunk"}
    assert outcomes.total() == EXAMPLES
    assert min(outcomes.values()) > EXAMPLES // 50, "some are still whole, and some are not"


def test_what_is_not_changed_is_read() -> None:
    for batch, payload in sources()[: -len(GROWING)]:
        found = decode_payload(payload, batch.schema, records=ROWS)
        assert found.equals(batch)
        assert use(found) == "read"
    for batch, payload in sources()[-len(GROWING) :]:
        assert open_as_reader(payload, batch.schema, batch.num_rows) == "corrupt_chunk"


def test_a_seed_gives_the_same_chunk_again() -> None:
    (_, payload), *_ = sources()
    assert mutated(payload, random.Random(5)) == mutated(payload, random.Random(5)) != payload
    with pytest.raises(KeraError):
        decode_payload(payload[:100], sources()[0][0].schema)
