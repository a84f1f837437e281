"""A repeated chunk is distinguished from another chunk with its sequence, also when the first has left memory."""

import shutil
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.broker.log.digests import digest_of, digests_in, digests_of, joined
from kera.broker.records import DIGEST_BYTES, DIGESTS_MAX, Digests
from kera.broker.storage.index_format import PRODUCER_KEY, put_digests
from kera.core.base.ids import PRODUCER_IDS
from kera.core.errors import ProducerFenced
from kera.core.format.chunk import verify_header
from kera.core.format.header_table import table
from tests.unit.broker.restart_support import SEGMENT, Launches
from tests.unit.broker.support import SLOT_BYTES, STREAM_ID, Log, chunk

CHOSEN = PRODUCER_IDS[7]


def append_many(launches: Launches, producer: int = 1) -> None:
    """Append more chunks than have digests, and make room between them."""
    log = launches.begin()
    for _ in range(DIGESTS_MAX + 3):
        log.append(producer, size=192)
        if log.entry.tail[-1].head > SLOT_BYTES // 2:
            launches.engine.run()


def stopped(launches: Launches) -> Log:
    """The broker stops and starts again."""
    launches.stop()
    return launches.begin()


def without_index(launches: Launches) -> Log:
    """The broker stops, its index is lost, and it starts again."""
    launches.stop()
    shutil.rmtree(launches.root / "index")
    return launches.begin()


def killed(launches: Launches) -> Log:
    """The process dies and starts again."""
    launches.kill()
    return launches.begin()


@pytest.mark.parametrize("happens", [stopped, without_index, killed])
def test_another_chunk_with_a_stored_sequence_is_refused(
    launches: Launches, happens: Callable[[Launches], Log]
) -> None:
    launches.begin().append_many(2 * SEGMENT)
    log = happens(launches)

    for sequence in range(2 * SEGMENT):
        assert log.append(sequence=sequence).duplicate
        with pytest.raises(ProducerFenced, match="another writer uses producer id 1"):
            log.append(sequence=sequence, fill=b"other")
        with pytest.raises(ProducerFenced, match="another writer"):
            log.append(sequence=sequence, created_us=6)
    assert not log.append().duplicate


def test_a_chunk_that_only_the_disk_has_is_compared_without_reading_it(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2 * SEGMENT)
    launches.engine.run()
    launches.engine.fill_memory()
    launches.engine.memory.slots.allocate()
    assert [segment.key for segment in log.segments()] == [(1, 2)]
    for path in launches.root.rglob("*.segment"):
        path.unlink()

    assert log.append(sequence=0).duplicate
    with pytest.raises(ProducerFenced, match="another writer"):
        log.append(sequence=0, fill=b"other")


def test_a_chunk_that_retention_has_removed_is_compared(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT + 1)
    first = log.entry.tail[0]
    log.entry.move_start(log.entry.start._replace(group_id=1, segment_id=2), SEGMENT)
    log.engine.memory.removals.collect(log.entry)
    log.engine.run()
    assert first not in log.segments()

    assert log.append(sequence=0).duplicate
    with pytest.raises(ProducerFenced, match="another writer"):
        log.append(sequence=0, fill=b"other")


def test_the_last_chunks_of_a_producer_are_compared_and_older_ones_are_refused(launches: Launches) -> None:
    append_many(launches)
    log = stopped(launches)

    assert log.append(sequence=3, size=192).duplicate
    with pytest.raises(ProducerFenced, match=f"not among its last {DIGESTS_MAX} chunks"):
        log.append(sequence=2, size=192)


def test_any_chunk_with_a_sequence_stored_by_an_earlier_version_is_a_repeat(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT)
    launches.stop()
    index = launches.engine.index
    index = type(index).open(launches.root / "index", durable=False)
    index.commit([(PRODUCER_KEY.pack(b"q", STREAM_ID, 0, 1), None)])
    index.close()
    log = launches.begin()

    assert log.append(sequence=0, fill=b"other").duplicate, "no version has ever known better"
    assert not log.append(sequence=SEGMENT).duplicate
    with pytest.raises(ProducerFenced):
        log.append(sequence=SEGMENT, fill=b"other")


def test_a_writer_that_chose_its_id_learns_whether_its_payload_is_stored(launches: Launches) -> None:
    append_many(launches, CHOSEN)
    last = DIGESTS_MAX + 2

    log = stopped(launches)
    found = [log.append(CHOSEN, sequence, **fields) for sequence, fields in (
        (last, {"size": 192}),
        (last, {"size": 192, "created_us": 99}),
        (last, {"size": 192, "fill": b"other"}),
        (0, {"size": 192}),
    )]  # fmt: skip
    assert all(each.duplicate for each in found)
    assert [each.same for each in found] == [True, True, False, None]


def test_digests_of_a_segment_are_those_of_its_headers(launches: Launches) -> None:
    log = launches.begin()
    for producer in (3, CHOSEN, 3, 5, CHOSEN):
        log.append(producer, size=192)
    log.append(5, 0, size=192, producer_epoch=2)
    segment = log.entry.tail[0]
    headers = [segment.header_at(at) for at in (0, *segment.chunk_ends[:-1])]

    found = digests_in(segment)
    assert found == digests_of(table(headers))
    assert {producer: each[:2] for producer, each in found.items()} == {3: (0, 2), 5: (2, 1), CHOSEN: (0, 2)}
    assert found[3].of(0, 1) == digest_of(headers[2])
    assert found[CHOSEN].of(0, 1) == digest_of(headers[4])
    assert found[5].of(0, 0) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=8), st.data())
def test_digests_joined_in_any_order_are_never_wrong(runs: list[tuple[int, int, int]], data: st.DataObject) -> None:
    def digest(epoch: int, sequence: int) -> bytes:
        return bytes([epoch, sequence]) * (DIGEST_BYTES // 2)

    known = None
    for epoch, first, count in data.draw(st.permutations(runs)):
        digests = b"".join(digest(epoch, sequence) for sequence in range(first, first + count))
        known = joined(known, Digests(epoch, first + count, digests))
    assert known is not None
    assert known[:2] == max((epoch, first + count) for epoch, first, count in runs)
    for epoch in range(3):
        for sequence in range(30):
            assert known.of(epoch, sequence) in {None, digest(epoch, sequence)}


def test_digests_are_added_to_those_in_the_index(launches: Launches) -> None:
    launches.begin()
    index = launches.engine.index
    for first in (0, 200, 150):
        digests = np.arange(first, first + 200, dtype="<u8").tobytes()
        index.commit(put_digests(STREAM_ID, 0, {1: Digests(1, first + 200, digests)}))

    known = index.digests(STREAM_ID, 0, 1)
    assert known is not None
    assert (known.first_sequence, known.next_sequence) == (400 - DIGESTS_MAX, 400)
    assert known.digests == np.arange(400 - DIGESTS_MAX, 400, dtype="<u8").tobytes()


def test_a_digest_covers_the_whole_chunk_of_a_producer() -> None:
    first = verify_header(chunk())
    for field in ({"created_us": 6}, {"fill": b"y"}, {"record_count": 2}, {"max_timestamp_us": 21}):
        assert digest_of(verify_header(chunk(**field))) != digest_of(first)
