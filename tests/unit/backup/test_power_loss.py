"""Random histories of a backup whose disks fail and lose power: acknowledged data survives, freed data stays gone."""

import contextlib
import errno
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kera.backup.jobs import Job, PunchJob
from kera.core.errors import KeraError
from kera.core.format.chunk import iterate_chunks
from tests.examples import examples
from tests.unit.backup.support import BROKER_ID, FakeBackup, FakeDisk, Outcome, PowerLost, Segment, placed

SIZES = st.sampled_from([192, 1024, 1984, 4096])
SLOTS = 3
PICKS = st.integers(0, 99)
"""Picks one of the existing virtual segments."""


@dataclass
class Known:
    """A virtual segment, as its broker knows it."""

    segment: Segment
    versions: list[list[bytes]] = field(default_factory=list)
    """All chunks that ever were in the segment, for each time that it began anew."""
    waiting: list[tuple[Outcome, int]] = field(default_factory=list)
    promised: int = 0
    """The length that was acknowledged as durable."""
    closed: bool = False
    failed: bool = False
    freed: Outcome | None = None


class Histories(RuleBasedStateMachine):
    """Two disks, few slots, and all actions of brokers and disks."""

    def __init__(self) -> None:
        super().__init__()
        self.disks = FakeDisk("/a/replicas.log"), FakeDisk("/b/replicas.log")
        self.backup = FakeBackup(*self.disks, slots=SLOTS)
        self.known: dict[int, Known] = {}
        self.jobs: list[Job] = []
        self.sequence = self.number = 0

    def pick(self, pick: int, *, appendable: bool = False) -> Known | None:
        """A virtual segment that was not freed."""
        candidates = [
            known
            for known in self.known.values()
            if known.freed is None and not (appendable and (known.closed or known.failed))
        ]
        return candidates[pick % len(candidates)] if candidates else None

    def chunks(self, sizes: list[int]) -> list[bytes]:
        """Chunks that all differ."""
        made = []
        for size in sizes:
            self.sequence += 1
            made.append(placed(self.sequence, size=size, fill=bytes([self.sequence % 251 + 1])))
        return made

    # -- the broker --------------------------------------------------------------------------------------------

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=3), persist=st.booleans(), close=st.booleans())
    def open(self, sizes: list[int], persist: bool, close: bool) -> None:
        self.number += 1
        known = Known(Segment(self.number), [[]])
        if self.append_to(known, sizes, persist, close):
            self.known[self.number] = known

    @rule(pick=PICKS, sizes=st.lists(SIZES, min_size=1, max_size=2), persist=st.booleans(), close=st.booleans())
    def append(self, pick: int, sizes: list[int], persist: bool, close: bool) -> None:
        known = self.pick(pick, appendable=True)
        if known is not None:
            self.append_to(known, sizes, persist, close)

    def append_to(self, known: Known, sizes: list[int], persist: bool, close: bool) -> bool:
        before = list(known.segment.chunks)
        chunks = self.chunks(sizes)
        message = known.segment.next(*chunks, close=close)
        try:
            replica = self.backup.append(message, *chunks)
        except KeraError:
            known.segment.chunks = before
            return False
        assert replica is not None
        assert replica.length == known.segment.length
        known.versions[-1] += chunks
        known.closed = close
        if persist:
            outcome = Outcome()
            known.waiting.append((outcome, replica.length))
            self.backup.store.persistence.wait(replica, replica.length, outcome)
            self.hear()
        return True

    @rule(pick=PICKS, data=st.data())
    def cut(self, pick: int, data: st.DataObject) -> None:
        known = self.pick(pick, appendable=True)
        if known is None:
            return
        count = data.draw(st.integers(1, len(known.segment.chunks)))
        self.backup.append(known.segment.end(count))
        known.closed = True
        self.hear()
        known.promised = min(known.promised, known.segment.length)

    @rule(pick=PICKS, persist=st.booleans())
    def begin_anew(self, pick: int, persist: bool) -> None:
        known = self.pick(pick)
        if known is None:
            return
        number = known.segment.number
        segment = Segment(number)
        chunks = self.chunks([192])
        try:
            self.backup.append(segment.next(*chunks), *chunks)
        except KeraError:
            return
        self.hear()
        self.known[number] = known = Known(segment, [*known.versions, chunks])
        if persist:
            known.waiting.append((Outcome(), segment.length))
            self.backup.store.persistence.wait(self.backup.get(number), segment.length, known.waiting[0][0])

    @rule(pick=PICKS)
    def free(self, pick: int) -> None:
        known = self.pick(pick)
        if known is None:
            return
        known.freed = Outcome()
        self.backup.store.free(BROKER_ID, [known.segment.number], known.freed)
        self.hear()
        self.forget_freed()

    # -- the disks ---------------------------------------------------------------------------------------------

    @rule()
    def plan(self) -> None:
        self.jobs += self.backup.store.persistence.plan()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def perform(self, data: st.DataObject) -> None:
        self.backup.perform(self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1))))
        self.hear()
        self.forget_freed()

    @rule()
    def run(self) -> None:
        while self.jobs:
            self.backup.perform(self.jobs.pop())
        self.backup.run()
        self.hear()
        self.forget_freed()

    @rule(which=st.integers(0, 1), error=st.sampled_from([0, 0, errno.EIO, errno.ENOSPC]))
    def break_or_heal(self, which: int, error: int) -> None:
        self.disks[which].write_error = error

    @rule()
    def time_goes_on(self) -> None:
        self.backup.store.persistence.tick(self.backup.store.persistence.now_ms + 10_000)

    # -- ends --------------------------------------------------------------------------------------------------

    @rule(random=st.randoms(use_true_random=False), operations=st.integers(0, 8))
    def lose_power(self, random: Any, operations: int) -> None:
        """Lose power while jobs are under way."""
        self.jobs += self.backup.store.persistence.plan()
        for disk in self.disks:
            disk.write_error, disk.operations_left = 0, operations
        with contextlib.suppress(PowerLost):
            for job in self.jobs:
                self.backup.performer.perform(job)  # no waiter hears the result any more
        for disk in self.disks:
            disk.lose_power(lambda: random.choice([0, 255, random.randrange(256)]))
        self.restart()

    @rule()
    def kill(self) -> None:
        self.restart()

    def restart(self) -> None:
        for disk in self.disks:
            disk.write_error = 0
        self.jobs.clear()
        self.backup = self.backup.restarted()
        present = set(self.backup.numbers())
        for number, known in list(self.known.items()):
            if known.freed is not None:
                if number not in present:
                    del self.known[number]
                    continue
                known.freed = None  # the free request was not answered yet
            elif known.promised:
                assert number in present, f"{number} was durable up to {known.promised}"
                assert self.backup.get(number).length >= known.promised
            if number not in present:
                del self.known[number]
                continue
            replica = self.backup.get(number)
            versions = known.versions[-1:] if known.promised else known.versions
            content = bytes(self.backup.read(number).chunks)
            assert len(content) == replica.length > 0
            assert any(b"".join(version).startswith(content) for version in versions)
            known.closed, known.failed, known.waiting = True, False, []
            known.versions = [split(content)]
            known.segment.chunks = split(content)
        assert present == set(self.known), "what was freed does not come back"
        assert self.backup.found.chunks_damaged == 0

    # -- what is checked ---------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Note the answers."""
        for known in self.known.values():
            for outcome, length in known.waiting:
                if outcome.succeeded:
                    known.promised = max(known.promised, length)
                elif outcome.calls and not known.closed:
                    known.failed = True
            known.waiting = [item for item in known.waiting if not item[0].calls]

    def forget_freed(self) -> None:
        self.known = {
            number: known for number, known in self.known.items() if known.freed is None or not known.freed.succeeded
        }

    @invariant()
    def all_that_was_answered_is_read(self) -> None:
        for number, known in self.known.items():
            if known.freed is None:
                replica = self.backup.get(number)
                assert replica.length == known.segment.length
                assert replica.durable_length >= known.promised
                assert bytes(self.backup.read(number).chunks) == known.segment.content

    @invariant()
    def nothing_leaks(self) -> None:
        store = self.backup.store
        replicas = {*store.replicas, *store.leaving}
        held = [replica.slot for replica in replicas if replica.slot is not None]
        assert len(held) == len(set(held)) == SLOTS - self.backup.slots.free
        frames = [replica.frame for replica in replicas]
        assert len(frames) == len(set(frames))
        for disk in store.persistence.disks:
            punching = [freed.room_bytes for freed in disk.to_punch]
            for job in self.jobs:
                if isinstance(job, PunchJob) and job.disk == disk.number:
                    punching += [freed.room_bytes for freed in job.freed]
            mine = [replica.disk_bytes for replica in replicas if replica.frame.disk == disk.number]
            assert disk.used_bytes == sum(mine) + sum(punching)


def split(content: bytes) -> list[bytes]:
    return [content[offset : offset + header.chunk_bytes] for header, offset in iterate_chunks(content)]


Histories.TestCase.settings = settings(max_examples=examples(400), stateful_step_count=50, deadline=None)
TestHistories = Histories.TestCase
