"""How a limit is split over hops that were measured, and over those that were not."""

from __future__ import annotations

import math

from kera.coordinator.latency.splitting import (
    GATHER,
    HAND_OVER,
    PREFETCH,
    REPLICATE,
    SEND,
    UNLIMITED,
    WORK,
    Hop,
    Measured,
    hops_of,
    shared,
    split,
)

CLICKS, VISITS = "clicks", "visits"
HOPS = hops_of([(CLICKS, "enrich"), (VISITS, "dashboard")])
LIMIT_US = 300_000
WINDOW_MS = 10_000


def took(mean_us: int, p99_us: int = 0, chunks: int = 100, granted_us: float = 0) -> Measured:
    return Measured(chunks, mean_us, p99_us or mean_us, WINDOW_MS, granted_us)


def everything(mean_us: int = 1_000) -> dict[Hop, Measured]:
    return {hop: took(mean_us) for hop in HOPS}


def test_hops_come_in_the_order_of_the_path_and_nobody_reads_at_its_end() -> None:
    assert [hop.hop for hop in hops_of([(CLICKS, "enrich")])] == [GATHER, SEND, REPLICATE, HAND_OVER, PREFETCH, WORK]
    assert [hop.hop for hop in hops_of([(CLICKS, "")])] == [GATHER, SEND, REPLICATE]
    assert hops_of([(CLICKS, "enrich")])[3] == Hop(CLICKS, HAND_OVER, "enrich")


def test_each_hop_gets_what_it_needs_and_writers_the_rest() -> None:
    found = split(HOPS, LIMIT_US, everything())
    assert found.is_feasible
    assert all(part.need_us == 1_000 for part in found.parts.values())
    rest_us = LIMIT_US * 9 // 10 - 12 * 1_000
    assert found.granted_us(Hop(CLICKS, GATHER)) == found.granted_us(Hop(VISITS, GATHER)) == rest_us // 2
    assert found.granted_us(Hop(CLICKS, HAND_OVER, "enrich")) == found.granted_us(Hop(CLICKS, REPLICATE)) == 0


def test_what_a_buffer_was_allowed_to_wait_is_nothing_that_it_needs() -> None:
    measured = everything() | {Hop(CLICKS, GATHER): took(90_000, granted_us=100_000)}
    found = split(HOPS, LIMIT_US, measured)
    assert found.parts[Hop(CLICKS, GATHER)].need_us == 0
    late = everything() | {Hop(CLICKS, GATHER): took(104_000, granted_us=100_000)}
    assert split(HOPS, LIMIT_US, late).parts[Hop(CLICKS, GATHER)].need_us == 4_000
    unknown = everything() | {Hop(CLICKS, GATHER): took(104_000, granted_us=math.inf)}
    assert split(HOPS, LIMIT_US, unknown).parts[Hop(CLICKS, GATHER)].need_us == 0


def test_of_p99_the_99th_percentiles_count() -> None:
    measured = {hop: took(1_000, 10_000) for hop in HOPS}
    assert split(HOPS, LIMIT_US, measured, by_p99=True).parts[Hop(CLICKS, SEND)].need_us == 10_000
    assert split(HOPS, LIMIT_US, measured).parts[Hop(CLICKS, SEND)].need_us == 1_000


def test_a_stream_of_which_more_chunks_are_filled_at_a_time_gets_more() -> None:
    """64 at a time against 4: chunks of both together are fewest when one waits four times as long as the other."""
    measured = everything() | {
        Hop(CLICKS, GATHER): took(100_000, chunks=6_400, granted_us=100_000),
        Hop(VISITS, GATHER): took(100_000, chunks=400, granted_us=100_000),
    }
    found = split(HOPS, LIMIT_US, measured)
    clicks, visits = (found.granted_us(Hop(stream, GATHER)) for stream in (CLICKS, VISITS))
    assert abs(clicks - 4 * visits) <= 4
    chunks_per_s = 64 / clicks + 4 / visits
    for other in range(10_000, clicks + visits, 10_000):
        assert chunks_per_s <= 64 / other + 4 / (clicks + visits - other) + 1e-9


def test_what_is_of_no_use_to_one_stream_goes_on_to_the_other() -> None:
    early = Measured(100, 5_000, 6_000, WINDOW_MS, 100_000, 12_000)
    found = split(HOPS, LIMIT_US, everything() | {Hop(CLICKS, GATHER): early})
    assert found.granted_us(Hop(CLICKS, GATHER)) == 12_000
    assert found.granted_us(Hop(VISITS, GATHER)) == LIMIT_US * 9 // 10 - 11_000 - 12_000


def test_what_writers_have_no_use_for_goes_to_hand_over_and_without_readers_to_replication() -> None:
    early = {Hop(stream, GATHER): Measured(9, 5_000, 6_000, WINDOW_MS, 0, 12_000) for stream in (CLICKS, VISITS)}
    found = split(HOPS, LIMIT_US, everything() | early)
    assert found.granted_us(Hop(CLICKS, HAND_OVER, "enrich")) > 50_000
    assert sum(part.allowed_us for part in found.parts.values()) <= LIMIT_US * 9 // 10
    alone = hops_of([(CLICKS, "")])
    found = split(alone, LIMIT_US, {hop: took(1_000) for hop in alone} | early)
    assert found.granted_us(Hop(CLICKS, REPLICATE)) > 200_000


def test_other_constraints_may_allow_less() -> None:
    caps = {Hop(CLICKS, GATHER): 10_000.0}
    found = split(HOPS, LIMIT_US, everything(), caps=lambda hop: caps.get(hop, UNLIMITED))
    assert found.granted_us(Hop(CLICKS, GATHER)) == 10_000
    assert found.granted_us(Hop(VISITS, GATHER)) == LIMIT_US * 9 // 10 - 12_000 - 10_000


def test_hops_that_nobody_has_measured_have_a_part_set_aside() -> None:
    found = split(HOPS, LIMIT_US, {})
    assert {part.need_us for part in found.parts.values()} == {LIMIT_US // 24}
    assert found.is_feasible
    # Of a stream without replicas no time of replication is told; of a group that does not read nothing at all.
    writes = {Hop(CLICKS, GATHER): took(100), Hop(CLICKS, SEND): took(200)}
    found = split(HOPS, LIMIT_US, writes)
    assert found.parts[Hop(CLICKS, REPLICATE)].need_us == 0
    assert found.parts[Hop(CLICKS, HAND_OVER, "enrich")].need_us == LIMIT_US // 24


def test_of_what_cannot_be_held_it_is_said_which_hop_takes_longest_and_what_could() -> None:
    measured = everything() | {Hop(CLICKS, WORK, "enrich"): took(400_000)}
    found = split(HOPS, LIMIT_US, measured)
    assert not found.is_feasible
    assert found.slowest == Hop(CLICKS, WORK, "enrich")
    assert found.least_limit_us == math.ceil(411_000 / 0.9)
    assert split(HOPS, found.least_limit_us, measured).is_feasible


def test_without_room_for_the_margin_no_buffer_waits() -> None:
    found = split(HOPS, LIMIT_US, everything() | {Hop(CLICKS, WORK, "enrich"): took(280_000)})
    assert not found.is_feasible
    assert all(part.grant_us == 0 for part in found.parts.values())


def test_what_is_late_in_any_case_is_not_made_later_by_many_small_chunks() -> None:
    """As of an application that is too slow: chunks that do not wait would only be more of them."""
    found = split(HOPS, LIMIT_US, everything() | {Hop(CLICKS, WORK, "enrich"): took(40_000_000)})
    assert not found.is_feasible
    granted_us = found.granted_us(Hop(CLICKS, GATHER))
    assert granted_us == (LIMIT_US * 9 // 10 - 11_000 - LIMIT_US // 12) // 2
    everywhere = split(HOPS, LIMIT_US, {hop: took(100_000) for hop in HOPS})
    assert all(part.grant_us == 0 for part in everywhere.parts.values())


def test_99th_percentiles_that_add_up_to_more_than_a_limit_may_be_within_it() -> None:
    measured = {hop: took(1_000, 40_000) for hop in HOPS}
    found = split(HOPS, LIMIT_US, measured, by_p99=True)
    assert not found.is_feasible
    assert all(part.grant_us == 0 for part in found.parts.values())
    late = measured | {Hop(CLICKS, WORK, "enrich"): took(40_000_000)}
    assert split(HOPS, LIMIT_US, late, by_p99=True).parts[Hop(CLICKS, WORK, "enrich")].need_us == 40_000_000


def test_shares_are_by_weight_until_one_has_enough() -> None:
    assert shared(90, [1, 2], [UNLIMITED, UNLIMITED]) == [30, 60]
    assert shared(90, [1, 2], [UNLIMITED, 20]) == [70, 20]
    assert shared(90, [1, 2], [10, 20]) == [10, 20]
    assert shared(90, [1, 1, 1], [10, 35, UNLIMITED]) == [10, 35, 45]
    assert shared(90, [1], [0]) == [0]
    assert shared(0, [1, 1], [5, 5]) == [0, 0]


def test_brokers_hold_nothing_back_for_longer_than_half_a_second() -> None:
    full_early = {Hop(stream, GATHER): took(1_000)._replace(most_us=5_000) for stream in (CLICKS, VISITS)}
    found = split(HOPS, 3_600_000_000, everything() | full_early)
    grants = {hop.hop: part.grant_us for hop, part in found.parts.items() if part.grant_us}
    assert grants == {GATHER: 5_000, HAND_OVER: 500_000, REPLICATE: 500_000}
