"""Waiting chunks: which ones a latency report considers, and from when on they count."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.cluster.retry import RetryTime
from kera.client.consuming.fetching.arrivals import LOOK_MAX, Arrivals
from kera.client.consuming.fetching.ranges import Arrived, Range
from kera.client.consuming.latency.waiting import FADES, Came, StreamHop, Usual, Waiting, oldest
from kera.client.settings import ClientSettings
from kera.core.base.ids import EARLIEST, EntryId
from kera.core.errors import ClosedError
from kera.core.latency.hop import Hop

WORK = StreamHop(7, Hop.WORK)


def waits(stream_id: int, *, measured: bool = True, dropped: bool = False) -> Waiting:
    entry = EntryId(stream_id, 0, 0)
    item = Range(Wanted(entry, EARLIEST, None), RetryTime(ClientSettings()))
    item.dropped = dropped
    return Waiting(item, entry, Came(3, 1.0) if measured else None)


def arrives(stream_id: int) -> Arrived:
    waiting = waits(stream_id)
    return Arrived(waiting.range, Fetched(waiting.entry, EARLIEST, EARLIEST, [], 0, None))


def test_a_wait_counts_when_it_exceeds_the_interval_and_the_usual_time() -> None:
    usual = Usual()
    assert [usual.is_exceeded(WORK, us, 1_000) for us in (0, 1_000, 1_001)] == [False, False, True]
    usual.over(WORK, 8_000)
    usual.over(WORK, 10)
    assert [usual.is_exceeded(WORK, us, 1_000) for us in (7_000, 7_001)] == [False, True]
    assert usual.is_exceeded(StreamHop(7, Hop.PREFETCH), 1_001, 1_000)
    usual.keep([8])
    assert usual.is_exceeded(WORK, 1_001, 1_000)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60))
def test_long_times_fade_gradually(took_us: list[int]) -> None:
    """Compared with an exact model: each time loses an eighth of its weight with each later one."""
    usual = Usual()
    for us in took_us:
        usual.over(WORK, us)
    exact = max(us * (1 - 1 / FADES) ** age for age, us in enumerate(reversed(took_us)))
    assert usual.is_exceeded(WORK, round(exact) + FADES + 1, 0)
    assert not usual.is_exceeded(WORK, int(exact) - 1, 0)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=30), st.sets(st.integers(1, 3)))
def test_the_oldest_of_each_stream_is_its_first_measured_chunk(
    queue: list[tuple[int, bool, bool]], stream_ids: set[int]
) -> None:
    waiting = [waits(stream_id, measured=measured, dropped=dropped) for stream_id, measured, dropped in queue]
    found = oldest(waiting, stream_ids)
    for stream_id in stream_ids:
        good = [each for each, of in zip(waiting, queue, strict=True) if of == (stream_id, True, False)]
        assert found.get(stream_id) is (good[0] if good else None)
    assert found.keys() <= stream_ids


async def test_only_a_limited_number_of_waiting_chunks_is_examined() -> None:
    arrivals = Arrivals(1)
    arrivals.put(arrives(1))
    arrivals.put(ClosedError("it ends"))
    for _ in range(2 * LOOK_MAX):
        arrivals.put(arrives(2))
    found = list(arrivals.waiting())
    assert len(found) == LOOK_MAX - 1  # the error, which is not a chunk, is left out
    assert len(list(takewhile(lambda each: each.fetched is not None and each.fetched.entry.stream_id == 1, found))) == 1
