"""The cases of a lane that have a name; see also tests/property/test_client_lane.py."""

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
    """Epoch and sequence, as they are sent."""
    header = read_header(chunk.header)
    assert header.sequence == chunk.sequence
    return header.producer_epoch, header.sequence


async def test_chunks_count_from_0_in_the_order_in_which_they_are_added(lane: Lane) -> None:
    added = [await chunk(lane) for _ in range(3)]
    assert [lane.take() for _ in added] == added
    assert [identity(each) for each in added] == [(1, 0), (1, 1), (1, 2)]


async def test_a_lane_sends_nothing_new_until_all_have_come_back(lane: Lane) -> None:
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


async def test_the_first_attempt_of_a_chunk_may_be_answered_after_the_second_chunks(lane: Lane) -> None:
    first, second = [await chunk(lane) for _ in range(2)]
    assert (lane.take(), lane.take()) == (first, second)
    lane.refused(first, Uncertain("no answer"), now_s=0)
    lane.acknowledged(second)
    assert lane.take() is first
    assert identity(first) == (1, 0)  # as before: the broker knows it as a repeat
    assert lane.acknowledged(first) == []
    assert lane.idle


async def test_a_chunk_that_is_given_up_begins_a_new_epoch_for_those_behind_it(lane: Lane) -> None:
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
    """In the new one, a repeat of the first would be a second chunk."""
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


async def test_with_a_chunk_that_may_be_stored_those_behind_it_are_given_up_that_may_be_stored(lane: Lane) -> None:
    first, second, third = await chunk(lane), await chunk(lane, LATE_S + 1), await chunk(lane)
    assert (lane.take(), lane.take()) == (first, second)
    lane.refused(second, Uncertain("no answer"), now_s=0)
    failures = lane.refused(first, Uncertain("no answer"), now_s=LATE_S)
    assert [given_up for given_up, _ in failures] == [first, second]
    assert all(isinstance(error, Uncertain) for _, error in failures)
    assert lane.take() is third
    assert identity(third) == (2, 0)


async def test_a_chunk_that_may_be_stored_fails_as_uncertain_whatever_its_last_error(lane: Lane) -> None:
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


async def test_a_broker_that_has_forgotten_the_producer_gets_a_new_epoch(lane: Lane) -> None:
    first, second = [await chunk(lane) for _ in range(2)]
    lane.take()
    lane.acknowledged(first)
    lane.take()
    assert lane.refused(second, OutOfSequence("expected 0"), now_s=0) == []
    assert lane.take() is second
    assert identity(second) == (2, 0)


async def test_a_chunk_that_is_not_on_enough_backups_goes_again_as_it_was(lane: Lane) -> None:
    first = await chunk(lane)
    lane.take()
    assert lane.refused(first, NotReplicated("1 of 2 backups"), now_s=0) == []
    assert lane.take() is first
    assert identity(first) == (1, 0)


async def test_the_error_of_a_chunk_whose_last_attempt_got_no_answer_names_the_last_cause(lane: Lane) -> None:
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


async def test_a_chunk_that_may_be_stored_stays_uncertain_whatever_the_cause(lane: Lane) -> None:
    first = await chunk(lane)
    lane.take()
    lane.refused(first, TooFewBackups("1 of 2 backups"), now_s=0)
    lane.take()

    ((_, error),) = lane.refused(first, Uncertain("no answer within 0.1 s"), now_s=LATE_S)

    assert type(error) is Uncertain
    assert error.message == "no answer within 0.1 s; before that: 1 of 2 backups"


async def test_a_chunk_that_is_refused_to_the_end_fails_with_the_refusal(lane: Lane) -> None:
    first, second = [await chunk(lane) for _ in range(2)]
    assert (lane.take(), lane.take()) == (first, second)

    ((_, error),) = lane.refused(first, TooFewBackups("1 of 2 backups"), now_s=LATE_S)
    assert (type(error), error.message) == (TooFewBackups, "1 of 2 backups")

    ((_, error),) = lane.refused(second, OutOfSequence("1 comes after 0"), now_s=LATE_S)
    assert (type(error), error.message) == (OutOfSequence, "1 comes after 0; before that: 1 of 2 backups")
