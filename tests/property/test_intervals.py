"""Groups change their broker only on request, and each is at exactly one broker."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.cluster.intervals import broker_of_group, emptied, intervals_of, moved, taken_over
from kera.v1.common_pb2 import StreamletAssignment

GROUPS = 40
BROKERS = st.integers(1, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 3)),
        st.tuples(st.just("move"), BROKERS),
        st.tuples(st.just("lose"), BROKERS, BROKERS),
        st.tuples(st.just("truncate"), st.integers(1, GROUPS)),
    ),
    max_size=25,
)


class Model:
    """A simple version: the broker of each group, one by one."""

    def __init__(self) -> None:
        self.assignment = StreamletAssignment(broker_id=1, broker_epoch=1, first_group_id=1)
        self.holder: dict[int, int] = {}
        self.owner = 1
        self.next_group_id = 1

    def act(self, action: str, *arguments: Any) -> None:
        match action, *arguments:
            case "write", count:
                for _ in range(count):
                    self.holder[self.next_group_id] = self.owner
                    self.next_group_id += 1
            case "move", broker_id if broker_id != self.owner:
                self.owner = broker_id
                self.assignment = moved(
                    self.assignment, broker_id, 7, next_group_id=self.next_group_id, first_records=[self.next_group_id]
                )
            case "lose", lost, successor:
                new_owner = successor if lost == self.owner else self.owner
                if lost == new_owner:
                    return
                self.assignment = taken_over(self.assignment, lost, new_owner, 8, next_group_id=self.next_group_id)
                self.owner = new_owner
                self.holder = {group: new_owner if one == lost else one for group, one in self.holder.items()}
            case "truncate", group_id:
                self.holder = {group: one for group, one in self.holder.items() if group >= group_id}
                self.tell_empty()

    def tell_empty(self) -> None:
        """Brokers report their closed intervals without groups."""
        begins = [interval.first_group_id for interval in intervals_of(self.assignment)]
        for interval, end in zip(intervals_of(self.assignment), begins[1:], strict=False):
            if not any(interval.first_group_id <= group < end for group in self.holder):
                self.assignment = emptied(self.assignment, interval.broker_id, interval.first_group_id, end)

    def check(self) -> None:
        assert self.assignment.broker_id == self.owner
        for group, holder in self.holder.items():
            assert broker_of_group(self.assignment, group) == holder
        intervals = intervals_of(self.assignment)
        assert intervals[-1].broker_id == self.owner
        begins = [interval.first_group_id for interval in intervals]
        assert begins == sorted(set(begins))
        assert all(one.broker_id != other.broker_id for one, other in itertools.pairwise(intervals))
        assert len(self.assignment.intervals) != 1
        assert self.assignment.first_group_id <= self.next_group_id


@given(STEPS)
def test_each_group_is_at_the_broker_of_the_model(steps: list[tuple[str, int]]) -> None:
    model = Model()
    for step in steps:
        before = StreamletAssignment()
        before.CopyFrom(model.assignment)
        model.act(*step)
        model.check()
    assert broker_of_group(model.assignment, 0) == intervals_of(model.assignment)[0].broker_id
