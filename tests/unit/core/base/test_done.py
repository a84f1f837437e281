import pytest

from kera.core.base.done import all_done
from kera.core.errors import KeraError, Unavailable


def test_the_callback_runs_once_with_the_first_error() -> None:
    told: list[KeraError | None] = []
    first, second = Unavailable("first"), Unavailable("second")
    one = all_done(3, told.append)
    one(first)
    one(second)
    assert told == []
    one(None)
    assert told == [first]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_callback_runs_without_an_error_when_all_are_done(count: int) -> None:
    told: list[KeraError | None] = []
    one = all_done(count, told.append)
    for _ in range(count):
        assert told == []
        one(None)
    assert told == [None]
