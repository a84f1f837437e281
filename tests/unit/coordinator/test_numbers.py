"""Numbers that are never given twice, even if the metadata are restored from an older copy."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.numbers import INSTANCE_S, SINCE_US, instances_by, next_epoch, next_id
from kera.core.base.clock import FakeClock
from kera.core.base.ids import PRODUCER_EPOCHS
from kera.core.format.schema import schema_to_bytes
from kera.v1 import common_pb2
from tests.unit.coordinator.fake_cluster import Cluster, config

DAY_US = 86_400_000_000
TODAY_US = SINCE_US + 2_500 * DAY_US


def test_numbers_before_the_start_of_their_era_only_count_up() -> None:
    assert (next_id(6, 0), next_epoch(6, SINCE_US - 1)) == (7, 7)


def test_an_epoch_fits_into_the_upper_half_of_a_virtual_segment_id() -> None:
    year_2080_us = SINCE_US + 60 * 365 * DAY_US
    assert next_epoch(1, year_2080_us) << 32 < 1 << 63
    assert next_id(1, year_2080_us) < 1 << 63


def test_the_epochs_of_a_named_producer_fit_into_32_bits() -> None:
    year_2078_us = SINCE_US + 58 * 365 * DAY_US
    assert instances_by(year_2078_us) * PRODUCER_EPOCHS < 1 << 32
    assert instances_by(TODAY_US + INSTANCE_S * 1_000_000) == instances_by(TODAY_US) + 1
    assert instances_by(0) == 0


@given(st.lists(st.integers(0, 5_000_000), min_size=2, max_size=50), st.integers(0, 1 << 21))
def test_consecutive_ids_belong_to_consecutive_append_lanes(waits_us: list[int], last: int) -> None:
    now_us, ids = TODAY_US, [next_id(last, TODAY_US)]
    for wait_us in waits_us:
        now_us += wait_us
        ids.append(next_id(ids[-1], now_us))
    for lanes in (1, 2, 4, 8):
        assert [each % lanes for each in ids] == [(ids[0] + number) % lanes for number in range(len(ids))]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1_000_000, DAY_US), st.none() | st.integers(0, 30)), max_size=30)
)
def test_no_number_is_given_twice_when_the_store_returns_to_an_earlier_state(
    history: list[tuple[int, int, int | None]],
) -> None:
    """Each step gives ids and an epoch, lets time pass, and may return the store to an earlier state."""
    now_us, ids, epochs = TODAY_US, list[int](), list[int]()
    last_id = last_epoch = 0
    copies = [(0, 0)]
    for count, passed_us, goes_back_to in history:
        for _ in range(count):
            last_id = next_id(last_id, now_us)
            ids.append(last_id)
        last_epoch = next_epoch(last_epoch, now_us)
        epochs.append(last_epoch)
        copies.append((last_id, last_epoch))
        now_us += passed_us
        if goes_back_to is not None:
            last_id, last_epoch = copies[goes_back_to % len(copies)]
    assert ids == sorted(set(ids))
    assert epochs == sorted(set(epochs))


async def test_a_start_with_an_older_copy_gives_no_number_of_the_previous_start_again(
    cluster: Cluster,
) -> None:
    """This holds however fast the metadata are restored."""
    cluster.clock = FakeClock(TODAY_US)
    await cluster.restart()
    await cluster.register("launch-1")
    typed = common_pb2.StreamSchema(arrow_schema=schema_to_bytes(pa.schema([("id", pa.int64())])), typed=True)
    await cluster.coordinator.streams.create("orders", config(), typed)
    given: list[object] = [await cluster.coordinator.producers.init("loader")]
    cluster.clock.advance(10)
    copy = cluster.store.records
    for column in ("bytes", "seconds"):
        given += [(await cluster.coordinator.producers.init())[0] for _ in range(3)]
        added = schema_to_bytes(pa.schema([(column, pa.int64())]))
        given.append((await cluster.alter("orders", add_columns=added)).schemas[-1].schema_id)
        given.append(await cluster.coordinator.producers.init("loader"))
        cluster.store = MemoryStore(copy)
        await cluster.restart()
        cluster.clock.advance(INSTANCE_S)
    assert len(set(given)) == len(given) == 11
