from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.ids import StreamletId
from kera.coordinator.operations.rebalancing import (
    LOAD_BYTES_PER_S_MIN,
    LOAD_RATIO,
    MOVES_MAX,
    BrokerShare,
    Placed,
    PlannedMove,
    rebalancing,
    spread,
)
from kera.core.base.turns import at_once

MB = 10**6
Where = dict[StreamletId, Placed]


def placed(*loads: tuple[int, int], may_move: bool = True) -> Where:
    """The streamlets of one stream, given by broker and load."""
    return {
        StreamletId(1, number): Placed(broker_id, bytes_per_s, may_move)
        for number, (broker_id, bytes_per_s) in enumerate(loads)
    }


def shares(broker_ids: Iterable[int], now: Where) -> dict[int, BrokerShare]:
    there = {one: [each for each in now.values() if each.broker_id == one] for one in broker_ids}
    return {one: BrokerShare(sum(each.bytes_per_s for each in mine), len(mine)) for one, mine in there.items()}


def after(now: Where, moves: Iterable[PlannedMove]) -> Where:
    then = dict(now)
    for move in moves:
        one = then[move.streamlet]
        then[move.streamlet] = replace(one, broker_id=move.to_broker_id)
    return then


def rebalanced(broker_ids: Collection[int], now: Mapping[StreamletId, Placed]) -> list[PlannedMove]:
    return at_once(rebalancing(broker_ids, now)).moves


def where(moves: list[PlannedMove]) -> list[tuple[int, int, int]]:
    return [(one.streamlet.streamlet_id, one.from_broker_id, one.to_broker_id) for one in moves]


def test_the_busiest_broker_gives_the_idlest_a_streamlet_that_evens_them_out() -> None:
    busy = placed((1, 30 * MB), (1, 20 * MB), (1, 10 * MB), (2, 5 * MB))

    (move,) = rebalanced([1, 2], busy)

    assert where([move]) == [(0, 1, 2)]
    assert move.reason == (
        "broker 1 carries 60.0 MB/s, 1.8 times the mean of 32.5 MB/s, broker 2 carries 5.0 MB/s;"
        " this streamlet makes 30.0 MB/s of it"
    )
    assert shares([1, 2], after(busy, [move])) == {1: BrokerShare(30 * MB, 2), 2: BrokerShare(35 * MB, 2)}


def loops(*parts: tuple[int, int, int]) -> Where:
    """The streamlets of one stream, given by broker, load and per mille of the loop's time."""
    return {
        StreamletId(1, number): Placed(broker_id, bytes_per_s, busy_ppm=busy * 1000)
        for number, (broker_id, bytes_per_s, busy) in enumerate(parts)
    }


def test_a_broker_with_a_busy_loop_gives_streamlets_though_others_carry_more_bytes() -> None:
    """Small chunks and many readers cost more time than their bytes suggest."""
    now = loops((1, 4 * MB, 400), (1, 3 * MB, 300), (1, 2 * MB, 200), (2, 80 * MB, 100))

    (move,) = rebalanced([1, 2], now)

    assert where([move]) == [(0, 1, 2)]
    assert move.reason == (
        "broker 1 carries 90 % of a loop, 1.8 times the mean of 50 % of a loop, broker 2 carries 10 % of a loop;"
        " this streamlet makes 40 % of a loop of it"
    )
    then = after(now, [move])
    assert rebalanced([1, 2], then) == [], "it does not go back for the bytes"


def test_bytes_count_while_no_loop_is_busy_and_no_move_makes_a_loop_busy() -> None:
    assert where(rebalanced([1, 2], loops((1, 40 * MB, 200), (1, 30 * MB, 150), (2, MB, 100)))) == [(1, 1, 2)]
    costly = loops((1, 40 * MB, 100), (1, 30 * MB, 80), (2, MB, 420))
    assert where(rebalanced([1, 2], costly)) == [], "broker 2 would be busy then, and give it back"


def test_small_differences_move_nothing() -> None:
    assert rebalanced([1, 2], placed((1, 24 * MB), (2, 20 * MB))) == []
    little = LOAD_BYTES_PER_S_MIN // 4
    assert rebalanced([1, 2], placed((1, little), (1, little), (2, 0))) == []


def test_a_streamlet_that_makes_all_the_load_stays() -> None:
    assert rebalanced([1, 2], placed((1, 60 * MB), (2, 0))) == []


def test_a_new_broker_gets_its_share_of_many_small_streamlets() -> None:
    for count, rate in [(40, 5 * MB), (1000, MB // 10), (100, 5000)]:
        now = placed(*[(1, rate)] * count)
        for _ in range(count):
            now = after(now, rebalanced([1, 2], now))
        found = shares([1, 2], now)
        assert found[1].bytes_per_s < LOAD_RATIO * found[2].bytes_per_s * LOAD_RATIO, (count, rate, found)


def test_a_new_broker_gets_streamlets_of_others_if_the_busiest_cannot_give_any() -> None:
    giant = placed((1, 200 * MB), *[(2, 5 * MB)] * 8)

    moves = rebalanced([1, 2, 3], giant)

    assert {(one.from_broker_id, one.to_broker_id) for one in moves} == {(2, 3)}
    assert shares([1, 2, 3], after(giant, moves)) == {
        1: BrokerShare(200 * MB, 1),
        2: BrokerShare(20 * MB, 4),
        3: BrokerShare(20 * MB, 4),
    }


def test_idle_streamlets_do_not_leave_the_broker_of_a_busy_one() -> None:
    assert rebalanced([1, 2], placed((1, 60 * MB), *[(1, 1000)] * 2, *[(2, 0)] * 3)) == []


def test_idle_streamlets_do_not_go_to_a_busy_broker_to_even_out_numbers() -> None:
    assert rebalanced([1, 2], placed((1, 60 * MB), *[(2, 1000)] * 9)) == []


def test_streamlets_that_may_not_or_cannot_move_stay() -> None:
    assert rebalanced([1, 2], placed((1, 30 * MB), (1, 30 * MB), (1, 0), may_move=False)) == []
    assert rebalanced([1], placed((1, 30 * MB), (1, 30 * MB))) == []
    assert rebalanced([], placed((1, 30 * MB))) == []


def test_idle_streamlets_go_to_the_brokers_with_the_fewest() -> None:
    moves = rebalanced([1, 2, 3], placed(*[(1, 0)] * 6))

    assert where(moves) == [(0, 1, 2), (1, 1, 3), (2, 1, 2), (3, 1, 3)]
    assert moves[0].reason == "broker 1 has 6 streamlets, broker 2 0; this one carries 0.0 MB/s"


def test_streamlets_of_brokers_outside_the_plan_are_left_alone() -> None:
    assert rebalanced([1, 2], placed((3, 90 * MB), (3, 90 * MB), (1, 0), (2, 0))) == []


def test_the_number_of_moves_in_a_plan_is_limited() -> None:
    assert len(rebalanced([1, 2], placed(*[(1, 0)] * (4 * MOVES_MAX)))) == MOVES_MAX


LOADS = st.one_of(st.integers(0, 50).map(lambda load: load * MB), st.integers(0, 3 * MB), st.integers(0, 10_000))


@given(
    st.lists(st.tuples(st.integers(1, 5), LOADS), max_size=40),
    st.sets(st.integers(1, 4), min_size=1),
)
def test_rebalancing_never_raises_the_highest_load_and_comes_to_rest(
    loads: list[tuple[int, int]], brokers: set[int]
) -> None:
    now = placed(*loads)
    moves = rebalanced(brokers, now)

    assert len({one.streamlet for one in moves}) == len(moves)
    for one in moves:
        assert now[one.streamlet].broker_id == one.from_broker_id
        assert {one.from_broker_id, one.to_broker_id} <= brokers
    then = after(now, moves)
    before, behind = shares(brokers, now), shares(brokers, then)
    assert max(one.bytes_per_s for one in behind.values()) <= max(
        LOAD_BYTES_PER_S_MIN, *(one.bytes_per_s for one in before.values())
    )
    for _ in range(10):  # a streamlet moves at most once at a time
        then = after(then, rebalanced(brokers, then))
    assert rebalanced(brokers, then) == []


# --- spreading a stream ------------------------------------------------------------------------------------------


def test_a_stream_spreads_to_the_brokers_with_the_fewest_streamlets() -> None:
    moves = spread(placed(*[(1, 0)] * 4), {1: 4, 2: 9, 3: 0}, 2)

    assert where(moves) == [(2, 1, 3), (3, 1, 3)]
    assert moves[0].reason == "the stream is spread over 2 brokers"


def test_a_stream_shrinks_to_the_brokers_that_have_most_of_its_streamlets() -> None:
    assert where(spread(placed((1, 0), (2, 0), (2, 0)), {1: 1, 2: 2}, 1)) == [(0, 1, 2)]


def test_streamlets_leave_brokers_that_may_not_have_any() -> None:
    assert where(spread(placed((9, 0), (1, 0)), {1: 1, 2: 0}, 2)) == [(0, 9, 2)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.integers(1, 5), st.data())
def test_a_spread_stream_is_even_over_the_given_number_of_brokers(
    owners: list[int], count: int, data: st.DataObject
) -> None:
    brokers = data.draw(st.dictionaries(st.integers(1, 6), st.integers(0, 9), min_size=count))
    count = min(count, len(owners))
    now = placed(*((owner, 0) for owner in owners))

    moves = spread(now, brokers, count)

    found = shares(brokers, after(now, moves))
    used = [one.streamlets for one in found.values() if one.streamlets]
    assert len(used) == count
    assert max(used) - min(used) <= 1
    assert sum(used) == len(owners)
    assert all(one.from_broker_id != one.to_broker_id for one in moves)
    assert spread(after(now, moves), brokers, count) == []
