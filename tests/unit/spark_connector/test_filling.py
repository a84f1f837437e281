"""How long a task may fill a chunk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.spark_connector.writing.task import LATEST, Filling


def test_the_fill_time_is_the_latency_target_minus_the_storing_time() -> None:
    filling = Filling(1.0)
    assert filling.fills_s == pytest.approx(0.9)
    filling.stored(0.1)
    filling.stored(0.3)
    filling.stored(0.2)

    assert filling.fills_s == pytest.approx(0.6)
    assert not filling.is_due(10.0, 10.5)
    assert filling.is_due(10.0, 10.6)
    for _ in range(LATEST):
        filling.stored(0.05)
    assert filling.fills_s == pytest.approx(0.85)


@given(st.floats(0.01, 1e5), st.lists(st.floats(0, 1e6), max_size=100))
def test_the_fill_time_is_from_half_of_the_target_to_less_than_all_of_it(target_s: float, took_s: list[float]) -> None:
    filling = Filling(target_s)
    for each in took_s:
        filling.stored(each)

    assert target_s / 2 <= filling.fills_s < target_s
    assert filling.fills_s + max(took_s[-LATEST:], default=0.0) < target_s or filling.fills_s == target_s / 2
