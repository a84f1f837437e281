"""Short runs of ``make fuzz-chunks`` and ``make fuzz-structures``, in child processes to find crashes."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from kera.core.errors import KeraError
from kera.core.format.chunk import ARROW_CODECS, ARROW_VERSION
from tests.chaos.arrow_structures import Message
from tests.chaos.chunks import mutated, open_as_reader, opened, run, sources_of, too_large, use, whole
from tests.examples import examples

EXAMPLES = 500
QUICK = 200


@pytest.mark.timeout(120)
@pytest.mark.parametrize("structure", [False, True], ids=["bytes", "structure"])
def test_mutated_chunks_are_read_or_refused_and_crash_no_reader(structure: bool) -> None:
    count = examples(EXAMPLES, QUICK)
    report = run(count, 7, structure=structure)
    assert report.defects == []
    outcomes = report.outcomes
    assert set(outcomes) == {"read", "corrupt_chunk"}
    assert outcomes.total() == count
    assert min(outcomes.values()) > count // 100, "some are still whole, and some are not"


def test_unchanged_chunks_are_read_and_too_large_ones_refused() -> None:
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


def test_a_decomposed_message_can_be_reassembled() -> None:
    for source in sources_of(ARROW_VERSION):
        message = Message(source.payload, source.batch.schema, ARROW_CODECS.get(source.codec))
        assert len(message.fields) == len(message.nodes)
        assert sum(len(field.buffers) for field in message.fields) == len(message.buffers)
        found = pa.ipc.read_record_batch(message.to_bytes(), source.batch.schema)
        found.validate()
        if source.batch.nbytes < 1 << 20:
            assert found.equals(source.batch)
