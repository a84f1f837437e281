"""Numbers that never come again, whatever copy of the metadata they are counted in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.ledger import Ledger, number
from kera.coordinator.memory_store import MemoryStore
from kera.coordinator.numbers import SINCE_US, epoch_floor, id_floor

DAY_US = 86_400_000_000


def test_before_the_time_from_which_they_count_it_is_the_counter_alone() -> None:
    assert (id_floor(0), epoch_floor(SINCE_US - 1)) == (0, 0)


def test_an_epoch_of_today_leaves_room_for_the_lower_half_of_a_virtual_segments_id() -> None:
    year_2080_us = SINCE_US + 60 * 365 * DAY_US
    assert epoch_floor(year_2080_us) << 32 < 1 << 63
    assert id_floor(year_2080_us) < 1 << 63


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1_000, DAY_US), st.booleans()), max_size=30))
async def test_no_id_comes_again_when_the_store_goes_back_to_any_earlier_state(
    history: list[tuple[int, int, bool]],
) -> None:
    """Each step gives some ids, then time goes by, and perhaps the store is what it was at some time before."""
    store = MemoryStore()
    ledger = await Ledger.load(store)
    now_us, given_ids, copies = SINCE_US, list[int](), [0]
    last = 0
    for count, passed_us, goes_back in history:
        for _ in range(count):
            last = ledger.next_number("last/stream_id", floor=id_floor(now_us))
            await ledger.write({"last/stream_id": number(last)})
            given_ids.append(last)
        copies.append(last)
        now_us += passed_us
        if goes_back:
            await ledger.write({"last/stream_id": number(copies[count % len(copies)])})
    assert len(set(given_ids)) == len(given_ids)
    assert given_ids == sorted(given_ids)
