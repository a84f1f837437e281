"""The part of a group of segments that a consumer keeps, by the pace of its caller."""

from __future__ import annotations

import pytest

from kera.client.consuming.groups.work_pace import LARGEST, PART_MAX_S, PART_MIN_S, RECENT_BYTES, WorkPace
from kera.core.base.settings import MIB


def pace_of(bytes_per_s: float, seconds: float = 2.0) -> WorkPace:
    pace = WorkPace()
    for step in range(1, 101):
        pace.processed(round(bytes_per_s * seconds * step / 100), seconds * step / 100)
    return pace


@pytest.mark.parametrize(
    ("bytes_per_s", "kept_bytes"),
    [
        (MIB / 100, PART_MAX_S * MIB / 100),
        (5 * MIB, MIB),
        (40 * MIB, PART_MIN_S * 40 * MIB),
        (10_000 * MIB, LARGEST * MIB),
    ],
)
def test_a_fast_caller_keeps_more_and_a_slow_one_less(bytes_per_s: float, kept_bytes: float) -> None:
    assert pace_of(bytes_per_s).part_bytes(MIB) == pytest.approx(kept_bytes, rel=0.01)


def test_a_caller_of_unknown_pace_keeps_the_part_that_the_coordinator_suggests() -> None:
    assert WorkPace().part_bytes(MIB) == MIB


def test_the_part_is_0_when_the_coordinator_asks_for_no_split() -> None:
    assert pace_of(MIB).part_bytes(0) == 0


def test_a_caller_that_does_no_work_keeps_the_largest_part() -> None:
    pace = WorkPace()
    pace.processed(1000, 0.0)
    assert pace.part_bytes(MIB) == LARGEST * MIB


def test_time_before_the_first_processed_bytes_does_not_count() -> None:
    pace = WorkPace()
    pace.processed(0, 3600.0)
    pace.processed(40 * MIB, 3601.0)
    assert pace.part_bytes(MIB) == pytest.approx(PART_MIN_S * 40 * MIB, rel=0.01)


def test_a_caller_that_becomes_slow_keeps_less_within_seconds() -> None:
    pace = WorkPace()
    pace.processed(100 * RECENT_BYTES, 0.01)
    for second in range(1, 11):
        pace.processed(100 * RECENT_BYTES + second * MIB // 4, second)
    assert pace.part_bytes(MIB) < MIB
