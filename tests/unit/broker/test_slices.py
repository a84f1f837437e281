"""Background work is done in slices: in turn, a little in each round of the loop."""

import pytest

from kera.broker.slices import Slices
from tests.unit.broker.push_support import FakeLoop


class Work:
    """Work of a number of steps."""

    def __init__(self, name: str, steps: int, done: list[str]) -> None:
        self.name, self.left, self.done = name, steps, done

    def step(self) -> bool:
        self.left -= 1
        self.done.append(self.name)
        return self.left > 0


def test_a_round_does_only_what_fits_into_a_slice_and_all_work_takes_turns() -> None:
    loop = FakeLoop()
    done: list[str] = []
    slices = Slices(loop, slice_s=0.0)
    for work in (Work("a", 3, done), Work("b", 1, done), Work("c", 2, done)):
        slices.add(work.step)
    assert done == [], "nothing before the next round"
    for number in range(1, 7):
        assert loop.round() == 1
        assert len(done) == number
    assert done == ["a", "b", "c", "a", "c", "a"]
    assert loop.round() == 0


def test_each_piece_of_work_takes_one_step_per_round_however_long_the_slice() -> None:
    loop = FakeLoop()
    done: list[str] = []
    slices = Slices(loop, slice_s=60.0)
    work = Work("a", 2, done)
    slices.add(work.step)
    slices.add(work.step)
    slices.add(Work("b", 2, done).step)
    loop.round()
    assert done == ["a", "b"]
    loop.round()
    assert done == ["a", "b", "a", "b"]


def test_a_failing_step_does_not_stop_other_work() -> None:
    loop = FakeLoop()
    done: list[str] = []
    slices = Slices(loop, slice_s=60.0)

    def fails() -> bool:
        raise ValueError("a defect")

    slices.add(fails)
    slices.add(Work("b", 1, done).step)
    with pytest.raises(ValueError, match="a defect"):
        loop.round()
    loop.round()
    assert done == ["b"]
