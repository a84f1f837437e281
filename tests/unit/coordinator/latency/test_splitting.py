"""The split of a limit over measured and unmeasured hops."""

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


def test_hops_are_in_the_order_of_the_path_and_a_final_stream_has_no_reader_hops() -> None:
    assert [hop.hop for hop in hops_of([(CLICKS, "enrich")])] == [GATHER, SEND, REPLICATE, HAND_OVER, PREFETCH, WORK]
    assert [hop.hop for hop in hops_of([(CLICKS, "")])] == [GATHER, SEND, REPLICATE]
    assert hops_of([(CLICKS, "enrich")])[3] == Hop(CLICKS, HAND_OVER, "enrich")


def test_each_hop_gets_the_time_that_it_needs_and_writers_get_the_rest() -> None:
    found = split(HOPS, LIMIT_US, everything())
    assert found.is_feasible
    assert all(part.need_us == 1_000 for part in found.parts.values())
    rest_us = LIMIT_US * 9 // 10 - 12 * 1_000
    assert found.granted_us(Hop(CLICKS, GATHER)) == found.granted_us(Hop(VISITS, GATHER)) == rest_us // 2
    assert found.granted_us(Hop(CLICKS, HAND_OVER, "enrich")) == found.granted_us(Hop(CLICKS, REPLICATE)) == 0


def test_granted_waiting_time_of_a_buffer_does_not_count_as_need() -> None:
    measured = everything() | {Hop(CLICKS, GATHER): took(90_000, granted_us=100_000)}
    found = split(HOPS, LIMIT_US, measured)
    assert found.parts[Hop(CLICKS, GATHER)].need_us == 0
    late = everything() | {Hop(CLICKS, GATHER): took(104_000, granted_us=100_000)}
    assert split(HOPS, LIMIT_US, late).parts[Hop(CLICKS, GATHER)].need_us == 4_000
    unknown = everything() | {Hop(CLICKS, GATHER): took(104_000, granted_us=math.inf)}
    assert split(HOPS, LIMIT_US, unknown).parts[Hop(CLICKS, GATHER)].need_us == 0


def test_a_p99_limit_is_split_by_99th_percentiles() -> None:
    measured = {hop: took(1_000, 10_000) for hop in HOPS}
    assert split(HOPS, LIMIT_US, measured, by_p99=True).parts[Hop(CLICKS, SEND)].need_us == 10_000
    assert split(HOPS, LIMIT_US, measured).parts[Hop(CLICKS, SEND)].need_us == 1_000


def test_a_stream_with_more_open_chunks_gets_more_time() -> None:
    """With 64 open chunks against 4, chunks are fewest when one stream waits four times as long as the other."""
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


def test_time_that_one_stream_cannot_use_goes_to_the_other() -> None:
    early = Measured(100, 5_000, 6_000, WINDOW_MS, 100_000, 12_000)
    found = split(HOPS, LIMIT_US, everything() | {Hop(CLICKS, GATHER): early})
    assert found.granted_us(Hop(CLICKS, GATHER)) == 12_000
    assert found.granted_us(Hop(VISITS, GATHER)) == LIMIT_US * 9 // 10 - 11_000 - 12_000


def test_time_that_writers_cannot_use_goes_to_handover_or_without_readers_to_replication() -> None:
    early = {Hop(stream, GATHER): Measured(9, 5_000, 6_000, WINDOW_MS, 0, 12_000) for stream in (CLICKS, VISITS)}
    found = split(HOPS, LIMIT_US, everything() | early)
    assert found.granted_us(Hop(CLICKS, HAND_OVER, "enrich")) > 50_000
    assert sum(part.allowed_us for part in found.parts.values()) <= LIMIT_US * 9 // 10
    alone = hops_of([(CLICKS, "")])
    found = split(alone, LIMIT_US, {hop: took(1_000) for hop in alone} | early)
    assert found.granted_us(Hop(CLICKS, REPLICATE)) > 200_000


def test_caps_of_other_constraints_limit_a_grant() -> None:
    caps = {Hop(CLICKS, GATHER): 10_000.0}
    found = split(HOPS, LIMIT_US, everything(), caps=lambda hop: caps.get(hop, UNLIMITED))
    assert found.granted_us(Hop(CLICKS, GATHER)) == 10_000
    assert found.granted_us(Hop(VISITS, GATHER)) == LIMIT_US * 9 // 10 - 12_000 - 10_000


def test_unmeasured_hops_get_a_reserved_share() -> None:
    found = split(HOPS, LIMIT_US, {})
    assert {part.need_us for part in found.parts.values()} == {LIMIT_US // 24}
    assert found.is_feasible
    # A stream without replicas reports no replication time, and a group that does not read reports no times at all.
    writes = {Hop(CLICKS, GATHER): took(100), Hop(CLICKS, SEND): took(200)}
    found = split(HOPS, LIMIT_US, writes)
    assert found.parts[Hop(CLICKS, REPLICATE)].need_us == 0
    assert found.parts[Hop(CLICKS, HAND_OVER, "enrich")].need_us == LIMIT_US // 24


def test_an_infeasible_split_names_the_slowest_hop_and_the_least_limit() -> None:
    measured = everything() | {Hop(CLICKS, WORK, "enrich"): took(400_000)}
    found = split(HOPS, LIMIT_US, measured)
    assert not found.is_feasible
    assert found.slowest == Hop(CLICKS, WORK, "enrich")
    assert found.least_limit_us == math.ceil(411_000 / 0.9)
    assert split(HOPS, found.least_limit_us, measured).is_feasible


def test_buffers_do_not_wait_when_the_margin_is_used_up() -> None:
    found = split(HOPS, LIMIT_US, everything() | {Hop(CLICKS, WORK, "enrich"): took(280_000)})
    assert not found.is_feasible
    assert all(part.grant_us == 0 for part in found.parts.values())


def test_a_much_too_slow_hop_does_not_take_the_waiting_time_of_buffers() -> None:
    """When an application is too slow, chunks without a wait would only be more chunks."""
    found = split(HOPS, LIMIT_US, everything() | {Hop(CLICKS, WORK, "enrich"): took(40_000_000)})
    assert not found.is_feasible
    granted_us = found.granted_us(Hop(CLICKS, GATHER))
    assert granted_us == (LIMIT_US * 9 // 10 - 11_000 - LIMIT_US // 12) // 2
    everywhere = split(HOPS, LIMIT_US, {hop: took(100_000) for hop in HOPS})
    assert all(part.grant_us == 0 for part in everywhere.parts.values())


def test_buffers_do_not_wait_when_99th_percentiles_add_up_to_more_than_the_limit() -> None:
    measured = {hop: took(1_000, 40_000) for hop in HOPS}
    found = split(HOPS, LIMIT_US, measured, by_p99=True)
    assert not found.is_feasible
    assert all(part.grant_us == 0 for part in found.parts.values())
    late = measured | {Hop(CLICKS, WORK, "enrich"): took(40_000_000)}
    assert split(HOPS, LIMIT_US, late, by_p99=True).parts[Hop(CLICKS, WORK, "enrich")].need_us == 40_000_000


def test_shares_are_by_weight_up_to_the_maximum_of_each() -> None:
    assert shared(90, [1, 2], [UNLIMITED, UNLIMITED]) == [30, 60]
    assert shared(90, [1, 2], [UNLIMITED, 20]) == [70, 20]
    assert shared(90, [1, 2], [10, 20]) == [10, 20]
    assert shared(90, [1, 1, 1], [10, 35, UNLIMITED]) == [10, 35, 45]
    assert shared(90, [1], [0]) == [0]
    assert shared(0, [1, 1], [5, 5]) == [0, 0]


def test_hand_over_and_replication_wait_for_at_most_half_a_second() -> None:
    full_early = {Hop(stream, GATHER): took(1_000)._replace(most_us=5_000) for stream in (CLICKS, VISITS)}
    found = split(HOPS, 3_600_000_000, everything() | full_early)
    grants = {hop.hop: part.grant_us for hop, part in found.parts.items() if part.grant_us}
    assert grants == {GATHER: 5_000, HAND_OVER: 500_000, REPLICATE: 500_000}
