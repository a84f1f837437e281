"""Consumer groups in any history of joins, crashes, restarts, lost answers and retention.

Each group, or part of one, has one holder at most, and no group is left out: every record is processed, or reported
as lost, exactly once. Members that do not understand parts may process records again when they take over from others.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.examples import examples
from tests.property.consumer_group_world import PROGRESS_MS, SESSION_MS, World

NAMES = st.sampled_from("abcde")
STREAMLETS = st.integers(0, 1)
ENTRIES = st.integers(0, 2)
SHARES = st.sampled_from([0.0, 0.3, 1.0])


class ConsumerGroups(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.cursors = self.world.cursors()

    @initialize(whole=st.sampled_from(["", "", "e", "ae", "abcde"]), ordered=st.booleans())
    def versions(self, whole: str, ordered: bool) -> None:
        """Some members do not understand parts of groups; some consumer groups read in order."""
        self.world.splitting = {*"abcde", "last"} - set(whole)
        self.world.in_order = ordered

    @rule(streamlet=STREAMLETS, entry=ENTRIES, count=st.integers(1, 50), skipped=st.sampled_from([0, 0, 5]))
    def append(self, streamlet: int, entry: int, count: int, skipped: int) -> None:
        self.world.append(streamlet, entry, count, skipped)

    @rule(streamlet=STREAMLETS, entry=ENTRIES)
    def close(self, streamlet: int, entry: int) -> None:
        self.world.close(streamlet, entry)

    @rule(streamlet=STREAMLETS, entry=ENTRIES, count=st.integers(1, 3))
    def expire(self, streamlet: int, entry: int, count: int) -> None:
        self.world.expire(streamlet, entry, count)

    @rule(streamlet=STREAMLETS, entry=ENTRIES, groups=st.integers(1, 4), expired=st.integers(0, 6))
    def hurry(self, streamlet: int, entry: int, groups: int, expired: int) -> None:
        """Groups come and go faster than members look."""
        for number in range(groups):
            self.world.append(streamlet, entry, 10 + number)
            self.world.close(streamlet, entry)
        self.world.expire(streamlet, entry, expired)

    @rule(name=NAMES, share=SHARES, lost=st.booleans())
    def round(self, name: str, share: float, lost: bool) -> None:
        """A round, also of a member that was taken for dead or forgotten."""
        self.world.round(self.world.join(name), share, answer_lost=lost)

    @rule(share=SHARES)
    def rounds_of_all(self, share: float) -> None:
        for member in self.world.members.values():
            self.world.round(member, share)

    @rule(name=NAMES)
    def crash(self, name: str) -> None:
        """The member disappears; a new one may come under the same name, which the coordinator cannot tell apart."""
        self.world.members.pop(name, None)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        member = self.world.members.pop(name, None)
        if member is not None:
            self.world.consumer_group.leave(name, [], self.world.now_s)
            self.world.store()

    @rule(name=NAMES, stuck=st.booleans())
    def stick(self, name: str, stuck: bool) -> None:
        self.world.join(name).busy_ms = PROGRESS_MS + 1 if stuck else 0

    @rule(name=NAMES)
    def keep_alive(self, name: str) -> None:
        member = self.world.join(name)
        self.world.consumer_group.keep_alive(name, member.busy_ms, self.world.now_s)
        self.world.store()

    @rule(seconds=st.sampled_from([0.1, 1.0, SESSION_MS / 1000 + 1]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def all_is_well(self) -> None:
        self.world.check()
        before, self.cursors = self.cursors, self.world.cursors()
        assert all(self.cursors[entry] >= position for entry, position in before.items()), "cursors never go back"

    def teardown(self) -> None:
        for member in self.world.members.values():
            member.busy_ms = 0
        self.world.join("last")
        self.world.finish()


TestConsumerGroups = ConsumerGroups.TestCase
TestConsumerGroups.settings = settings(
    max_examples=examples(400), print_blob=False, stateful_step_count=40, deadline=None
)
