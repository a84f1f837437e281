"""The arithmetic of the costs of stages, and a run of each stage; the measurements are not tested."""

import inspect
import json
from pathlib import Path

import pytest

from bench.producer_cost import answer
from bench.stages.around import SEGMENT_BYTES, Cluster, until_sent
from bench.stages.backup import Replicas
from bench.stages.broker import Writes
from bench.stages.consuming import Pulls, Pushes
from bench.stages.costs import (
    COPY_ALONE,
    LIMITS,
    LOADS,
    SHOWN,
    WITH_COPY,
    Cost,
    byte_share,
    costs_of,
    fit,
    plain,
    quantile,
    record_table,
    reduced,
    share,
    table,
)
from bench.stages.memory import Memory
from bench.stages.part import Load, Part, Samples
from bench.stages.producing import Batches, Records
from kera.client.cluster.locality import Locality
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings

COST = Cost(10.0, 2.0, 0.05, 0.0)
EXACT = {load: COST.of(load) for load in LOADS}


def samples() -> Samples:
    """A hundred samples of each stage and load; three quarters of them were disturbed."""
    made = Samples()
    for stage in LIMITS:
        if stage != COPY_ALONE:
            extra_us = 30.0 if stage == WITH_COPY else 0.0
            for load in LOADS:
                undisturbed = 1000 * (EXACT[load] + extra_us)
                made.requests[stage][load] = [undisturbed] * 25 + [undisturbed * 3] * 75
    return made


def test_a_cost_is_the_sum_of_its_parts_per_request_chunk_and_byte() -> None:
    assert COST.of(Load(1, 1000)) == pytest.approx(10 + 2 + 0.05)
    assert COST.of(Load(4, 1_000_000)) == pytest.approx(10 + 4 * 2 + 4 * 50)


def test_a_fit_of_exact_costs_finds_them_again() -> None:
    assert fit(EXACT) == pytest.approx(COST, abs=1e-6)


def test_the_error_of_a_fit_is_relative() -> None:
    noisy = {load: cost * (1.1 if place % 2 else 0.9) for place, (load, cost) in enumerate(EXACT.items())}
    found = fit(noisy)
    assert 0.05 < found.error <= 0.1 + 1e-9
    assert found[:3] == pytest.approx(COST[:3], rel=0.3)


def test_the_error_of_a_fit_can_be_relative_to_larger_costs() -> None:
    constant = dict.fromkeys(LOADS, 30.0)
    large = Load(16, 256 << 10)
    disturbed = constant | {large: 60.0}
    assert fit(disturbed, EXACT)[:3] == pytest.approx((30.0, 0.0, 0.0), abs=5.0)
    assert fit(disturbed).error > fit(disturbed, EXACT).error


def test_no_cost_is_negative() -> None:
    falling = {load: 100.0 - load.size_bytes / 1e6 for load in LOADS}
    found = fit(falling)
    assert found.request_us == pytest.approx(100.0, rel=0.05)
    assert (found.chunk_us, found.byte_s_per_gb) == (0.0, 0.0)


def test_a_fit_of_zeros_is_zero() -> None:
    assert fit(dict.fromkeys(LOADS, 0.0))[:3] == (0.0, 0.0, 0.0)


def test_the_cost_of_a_single_chunk_per_request_counts_for_the_request() -> None:
    found = fit({load: cost for load, cost in EXACT.items() if load.chunks == 1})
    assert found == pytest.approx((12.0, 0.0, 0.05, 0.0), abs=1e-6)


def test_a_quantile_is_taken_from_the_sorted_samples() -> None:
    assert quantile([5.0, 1.0, 9.0, 7.0, 3.0], 0.0) == 1.0
    assert quantile([5.0, 1.0, 9.0, 7.0, 3.0], 0.5) == 5.0
    assert quantile([4.0]) == 4.0


def test_sockets_count_by_their_median_and_other_stages_by_a_low_quantile() -> None:
    measured = reduced(samples())
    assert list(measured) == list(LIMITS)
    assert measured["backup: frame to answer"] == pytest.approx(EXACT)
    load = SHOWN[0]
    assert measured["unix socket: send"][load] == pytest.approx(3 * EXACT[load])


def test_the_cost_of_a_copy_is_the_difference_of_a_broker_with_and_without_it() -> None:
    measured = reduced(samples())
    assert list(measured[COPY_ALONE].values()) == pytest.approx([30.0] * len(LOADS))
    assert costs_of(measured)[COPY_ALONE] == pytest.approx((30.0, 0.0, 0.0, 0.0), abs=1e-3)


def test_a_share_is_the_part_of_the_limits_in_a_stages_cost() -> None:
    measured = dict.fromkeys(LIMITS, EXACT) | {"copy": dict.fromkeys(LOADS, 1.0), "crc32c": dict.fromkeys(LOADS, 2.0)}
    load = SHOWN[0]
    assert share("broker: frame to answer", measured, load) == pytest.approx(3 / EXACT[load])
    assert share("broker: of it verify", measured, load) == pytest.approx(2 / EXACT[load])
    assert share("producer: answer to delivery", measured, load) is None
    assert share("broker: frame to answer", measured, Load(3, 5)) is None


def test_a_share_per_byte_is_that_of_the_fitted_costs() -> None:
    costs = {"copy": Cost(0, 0, 0.05, 0), "crc32c": Cost(0, 0, 0.03, 0), "broker: frame to answer": Cost(9, 9, 0.1, 0)}
    assert byte_share("broker: frame to answer", costs) == pytest.approx(0.8)
    assert byte_share("copy", costs) is None
    assert byte_share("broker: frame to answer", costs | {"broker: frame to answer": Cost(9, 9, 0, 0)}) is None


def test_limits_are_stages_themselves() -> None:
    assert {limit for limits in LIMITS.values() for limit in limits} <= set(LIMITS)


def test_the_table_has_a_row_for_each_stage() -> None:
    measured = reduced(samples())
    lines = list(table(measured, costs_of(measured)))
    assert len(lines) == 2 + len(LIMITS)
    assert len({line.count("|") for line in lines}) == 1
    row = next(line for line in lines if line.startswith("| backup"))
    assert "| 10.0 | 2.0 | 0.0500 | 0% |" in row
    assert "| copy + crc32c | 200% |" in row


def test_work_per_record_is_compared_with_its_limit() -> None:
    lines = list(record_table({"send, a value": 0.4, "records()": 0.5}, {"append_m_per_s": 10.0}))
    assert lines[2:] == ["| send, a value | 0.400 | 2.50 | 10.0 | 25% |", "| records() | 0.500 | 2.00 |  |  |"]


def test_the_figures_are_json() -> None:
    measured = reduced(samples())
    found = json.loads(json.dumps(plain(measured, costs_of(measured))))
    assert list(found) == list(LIMITS)
    backup = found["backup: frame to answer"]
    assert backup["request_us"] == pytest.approx(10.0)
    assert backup["us"]["16x1024"] == pytest.approx(EXACT[Load(16, 1024)])


@pytest.mark.parametrize("method", ["reachable", "connection"])
def test_the_fake_cluster_has_the_signatures_of_a_real_one(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(each, method)).parameters for each in (Cluster, Locality))
    assert [name.removeprefix("_") for name in ours] == list(theirs)


async def test_a_producer_works_with_the_fake_cluster() -> None:
    cluster = Cluster()
    async with Producer(cluster, ProducerSettings()) as producer:  # type: ignore[arg-type]  # it acts as one
        await producer.prepare("s")
        delivery = producer.send("s", b"x")
        await until_sent(cluster.wire)
        await answer(cluster)
        assert (await delivery).record_count == 1
    cluster.close()


async def test_each_stage_can_run_once(tmp_path: Path) -> None:
    seen, load = Samples(), Load(1, 1024)
    loads, broker, backup = [load], Writes(tmp_path, [load], memory_bytes=2 * SEGMENT_BYTES), Replicas([load])
    pushes = [Pushes(loads, verify=verify) for verify in (True, False)]
    parts: list[Part] = [Memory(loads), Batches(loads), Records(loads), backup, Pulls(loads), broker, *pushes]
    try:
        for part in parts:
            await part.rounds(load, seen)
    finally:
        await broker.close()
        backup.wire.abort()
    assert {stage for stage in LIMITS if stage != COPY_ALONE and "socket" not in stage} <= seen.requests.keys()


@pytest.mark.parametrize("load", LOADS[:5], ids=str)
async def test_each_batch_of_a_request_becomes_a_chunk(load: Load) -> None:
    seen = Samples()
    await Batches([load]).rounds(load, seen)
    assert len(seen.requests["producer: answer to delivery"][load]) == load.requests
