"""Lanes: named cases of order, retries and epochs; see also tests/property/test_client_lane.py."""

import pyarrow as pa
import pytest

from kera.client.producing.encoding.payloads import Payload
from kera.client.producing.lanes.lane import Lane, LaneIdentity, PendingChunk
from kera.client.producing.lanes.lane_columns import LaneColumns
from kera.client.producing.outcomes.outcome import Outcome
from kera.core.errors import (
    ArenaFull,
    CorruptChunk,
    InternalError,
    NotReplicated,
    OutOfSequence,
    TooFewBackups,
    Unavailable,
    Uncertain,
)
from kera.core.format.chunk import Codec, read_header

DEADLINE_S = 10.0
LATE_S = 11.0


@pytest.fixture
def lane() -> Lane:
    return Lane(LaneIdentity("s", 1, 0, 7, Codec.NONE, typed=False), LaneColumns(1, producer_epoch=1))


async def chunk(lane: Lane, deadline_s: float = DEADLINE_S) -> PendingChunk:
    payload = Payload(pa.py_buffer(b"x" * 8), 1, 0, 0, 1)
    added = PendingChunk(lane, payload, 0, deadline_s, Outcome())
    lane.add(added)
    return added


def identity(chunk: PendingChunk) -> tuple[int, int]:
    """The epoch and the sequence that are sent."""
    header = read_header(chunk.header)
    assert header.sequence == chunk.sequence
    return header.producer_epoch, header.sequence


async def test_sequences_count_from_0_in_the_order_of_the_chunks(lane: Lane) -> None:
    added = [await chunk(lane) for _ in range(3)]
    assert [lane.take() for _ in added] == added
    assert [identity(each) for each in added] == [(1, 0), (1, 1), (1, 2)]


async def test_a_lane_sends_no_chunk_between_a_refusal_and_the_last_answer(lane: Lane) -> None:
    first, second, third = [await chunk(lane) for _ in range(3)]
    assert (lane.take(), lane.take()) == (first, second)
    assert lane.refused(first, ArenaFull("no room"), now_s=0) == []
    assert lane.next is None
    assert lane.ready_count == 0
    with pytest.raises(InternalError):
        lane.take()
    assert lane.refused(second, OutOfSequence("a gap"), now_s=0) == []
    assert [lane.take() for _ in range(lane.ready_count)] == [first, second, third]
    assert [identity(each) for each in (first, second, third)] == [(1, 0), (1, 1), (1, 2)]


async def test_an_uncertain_chunk_is_retried_unchanged_after_a_later_one_was_acknowledged(lane: Lane) -> None:
    first, second = [await chunk(lane) for _ in range(2)]
    assert (lane.take(), lane.take()) == (first, second)
    lane.refused(first, Uncertain("no answer"), now_s=0)
    lane.acknowledged(second)
    assert lane.take() is first
    assert identity(first) == (1, 0)  # unchanged, so the broker recognizes the repeat
    assert lane.acknowledged(first) == []
    assert lane.idle


async def test_giving_up_a_chunk_begins_a_new_epoch_for_later_chunks(lane: Lane) -> None:
    before, first, second = [await chunk(lane) for _ in range(3)]
    assert (lane.take(), lane.take(), lane.take()) == (before, first, second)
    assert lane.acknowledged(before) == []
    ((given_up, error),) = lane.refused(first, CorruptChunk("a flipped bit"), now_s=0)
    assert given_up is first
    assert isinstance(error, CorruptChunk)
    assert lane.refused(second, OutOfSequence("a gap"), now_s=0) == []
    assert lane.take() is second
    assert identity(second) == (2, 0)


async def test_chunks_before_a_gap_end_in_the_old_epoch(lane: Lane) -> None:
    """In the new epoch, a repeat of the first chunk would become a second chunk."""
    first, second, third = await chunk(lane), await chunk(lane, deadline_s=1), await chunk(lane)
    assert (lane.take(), lane.take()) == (first, second)
    lane.refused(first, Uncertain("no answer"), now_s=2)
    ((given_up, _),) = lane.refused(second, Unavailable("nobody listens"), now_s=2)
    assert given_up is second
    assert lane.ready_count == 1
    assert lane.take() is first
    assert identity(first) == (1, 0)
    assert lane.next is None
    lane.acknowledged(first)
    assert lane.take() is third
    assert identity(third) == (2, 0)


async def test_giving_up_an_uncertain_chunk_gives_up_later_uncertain_chunks_too(lane: Lane) -> None:
    first, second, third = await chunk(lane), await chunk(lane, LATE_S + 1), await chunk(lane)
    assert (lane.take(), lane.take()) == (first, second)
    lane.refused(second, Uncertain("no answer"), now_s=0)
    failures = lane.refused(first, Uncertain("no answer"), now_s=LATE_S)
    assert [given_up for given_up, _ in failures] == [first, second]
    assert all(isinstance(error, Uncertain) for _, error in failures)
    assert lane.take() is third
    assert identity(third) == (2, 0)


async def test_a_chunk_that_may_be_stored_fails_as_uncertain_despite_a_later_error(lane: Lane) -> None:
    first = await chunk(lane)
    lane.take()
    assert lane.refused(first, Uncertain("no answer"), now_s=0) == []
    lane.take()
    ((_, error),) = lane.refused(first, Unavailable("nobody listens"), now_s=LATE_S)
    assert isinstance(error, Uncertain)
    assert "nobody listens" in error.message


async def test_a_chunk_that_was_never_sent_fails_as_not_accepted(lane: Lane) -> None:
    first = await chunk(lane)
    lane.take()
    ((_, error),) = lane.refused(first, Unavailable("nobody listens"), now_s=LATE_S)
    assert isinstance(error, Unavailable)
    assert lane.idle


async def test_a_lane_begins_a_new_epoch_when_the_broker_forgot_the_producer(lane: Lane) -> None:
    first, second = [await chunk(lane) for _ in range(2)]
    lane.take()
    lane.acknowledged(first)
    lane.take()
    assert lane.refused(second, OutOfSequence("expected 0"), now_s=0) == []
    assert lane.take() is second
    assert identity(second) == (2, 0)


async def test_a_chunk_without_enough_backups_is_retried_unchanged(lane: Lane) -> None:
    first = await chunk(lane)
    lane.take()
    assert lane.refused(first, NotReplicated("1 of 2 backups"), now_s=0) == []
    assert lane.take() is first
    assert identity(first) == (1, 0)


async def test_a_chunk_without_a_last_answer_fails_with_the_cause_before_it(lane: Lane) -> None:
    first = await chunk(lane)
    for number in (1, 2):
        lane.take()
        lane.refused(first, NotReplicated(f"{number} of 3 backups", stream="s"), now_s=0)
    lane.take()

    ((given_up, error),) = lane.refused(first, Uncertain("no answer within 0.1 s"), now_s=LATE_S)

    assert given_up is first
    assert type(error) is NotReplicated
    assert error.message == "no answer within 0.1 s; before that: 2 of 3 backups"
    assert error.attributes == {"stream": "s"}


async def test_a_chunk_without_a_last_answer_stays_uncertain_after_too_few_backups(lane: Lane) -> None:
    first = await chunk(lane)
    lane.take()
    lane.refused(first, TooFewBackups("1 of 2 backups"), now_s=0)
    lane.take()

    ((_, error),) = lane.refused(first, Uncertain("no answer within 0.1 s"), now_s=LATE_S)

    assert type(error) is Uncertain
    assert error.message == "no answer within 0.1 s; before that: 1 of 2 backups"


async def test_a_chunk_refused_to_the_end_fails_with_the_refusal(lane: Lane) -> None:
    first, second = [await chunk(lane) for _ in range(2)]
    assert (lane.take(), lane.take()) == (first, second)

    ((_, error),) = lane.refused(first, TooFewBackups("1 of 2 backups"), now_s=LATE_S)
    assert (type(error), error.message) == (TooFewBackups, "1 of 2 backups")

    ((_, error),) = lane.refused(second, OutOfSequence("1 comes after 0"), now_s=LATE_S)
    assert (type(error), error.message) == (OutOfSequence, "1 comes after 0; before that: 1 of 2 backups")
