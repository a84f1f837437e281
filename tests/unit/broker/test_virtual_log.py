"""A virtual log: batches of chunks, the order in which they complete, and failures of backups."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.virtual_log import Close, Effect, Send, VirtualLog
from kera.broker.replication.virtual_segment import Batch, Free, ReplicationTotals, VirtualSegment
from kera.core.errors import NotReplicated
from kera.core.format.chunk import chained_checksum
from tests.unit.broker.replication_support import checksum_of, extents_of, nothing_pinned
from tests.unit.broker.support import CHUNK_BYTES, SLOT_BYTES, STREAM_ID, Engine, Log, Outcome

WAIT_MS = 1000
ERROR = NotReplicated("it takes too long")


class Scenario:
    """A virtual log of one entry, opened on the first R of `backups`; it remembers the planned effects."""

    def __init__(self, engine: Engine, replication: int, limits: ReplicationLimits) -> None:
        self.engine = engine
        self.log = Log(engine, group_segments=8)
        self.log.entry.by_replicas = True
        self.backups = [1, 2, 3, 4, 5]
        self.places: list[VirtualSegment] = []
        self.closed: list[VirtualSegment] = []
        self.effects: list[Effect] = []
        self.now_ms = 0
        self.virtual = VirtualLog(
            STREAM_ID,
            0,
            replication=replication,
            limits=limits,
            on_closed=self.closed.append,
            totals=ReplicationTotals(),
        )

    def open(self, _: VirtualLog) -> VirtualSegment | None:
        wanted = self.virtual.replication
        if len(self.backups) < wanted:
            return None
        self.places.append(VirtualSegment(len(self.places) + 1, STREAM_ID, 0, self.backups[:wanted], self.now_ms))
        return self.places[-1]

    def append(self, count: int = 1, *, persist: bool = False, size: int = CHUNK_BYTES) -> Batch:
        """Append chunks; return the batch of the last one."""
        batches = []
        for appended in [self.log.append(publish=False, size=size) for _ in range(count)]:
            assert appended.segment is not None
            batches.append(
                self.virtual.append(appended.segment, appended.position, appended.end, self.now_ms, persist=persist)
            )
        return batches[-1]

    def plan(self) -> list[Effect]:
        """Plan what is to be sent or closed now."""
        return self.note(self.virtual.plan(self.now_ms, self.open))

    def note(self, effects: Iterable[Effect]) -> list[Effect]:
        """Remember effects."""
        effects = list(effects)
        self.effects += effects
        return effects

    def wait(self, batch: Batch) -> Outcome:
        """Add a waiter to a batch."""
        batch.waiters.append(outcome := Outcome())
        return outcome

    def acknowledge(self, batch: Batch, *backup_ids: int) -> list[Effect]:
        """Backups acknowledge a batch; all of its place unless some are named."""
        place = batch.place
        assert place is not None
        return [
            effect
            for backup_id in backup_ids or tuple(place.backups)
            for effect in self.note(self.virtual.acknowledged(batch, place, backup_id))
        ]

    def lose(self, *backup_ids: int) -> list[Effect]:
        """Let backups fail."""
        self.backups = [each for each in self.backups if each not in backup_ids]
        return [effect for backup_id in backup_ids for effect in self.note(self.virtual.lost(backup_id))]

    def finish(self) -> None:
        """Acknowledge everything sent, and close everything to be closed, in the order of the effects."""
        done: set[int] = set()
        while rest := [effect for effect in self.effects if id(effect) not in done] or self.plan():
            for effect in rest:
                done.add(id(effect))
                if isinstance(effect, Send):
                    self.note(self.virtual.acknowledged(effect.batch, effect.place, effect.backup_id))
                elif isinstance(effect, Close):
                    self.virtual.closed(effect.place, effect.backup_id)

    @property
    def durable(self) -> int:
        """Bytes that readers may see."""
        return sum(segment.durable_head for segment in self.log.entry.tail)


MakeScenario = Callable[..., Scenario]


@pytest.fixture
def limits() -> ReplicationLimits:
    return ReplicationLimits(SLOT_BYTES)


@pytest.fixture
def make(engine: Engine, limits: ReplicationLimits) -> MakeScenario:
    return lambda replication=2, capacity_bytes=SLOT_BYTES: Scenario(
        engine, replication, replace(limits, segment_bytes=capacity_bytes)
    )


@pytest.fixture
def pipelined(limits: ReplicationLimits) -> None:
    """Each chunk is a batch, and goes at once, up to six."""
    limits.request_bytes_max = limits.pipelined_bytes_min = CHUNK_BYTES
    limits.in_flight_bytes_max = 6 * CHUNK_BYTES


def sends(effects: Iterable[Effect]) -> list[tuple[int, int, int]]:
    """Virtual segment, bytes, and backup of each."""
    return [
        (each.place.virtual_segment_id, each.batch.length, each.backup_id) for each in effects if isinstance(each, Send)
    ]


def closes(effects: Iterable[Effect]) -> list[tuple[int, int, int]]:
    """Virtual segment, its length, and backup of each."""
    return [
        (each.place.virtual_segment_id, each.place.head, each.backup_id) for each in effects if isinstance(each, Close)
    ]


# --- group commit ------------------------------------------------------------------------------------------


def test_the_first_batch_goes_at_once_and_chunks_gathered_meanwhile_go_in_the_next(make: MakeScenario) -> None:
    scenario = make()
    first = scenario.append()
    assert sends(scenario.plan()) == [(1, CHUNK_BYTES, 1), (1, CHUNK_BYTES, 2)]

    second = scenario.append(2)
    assert second is not first
    assert scenario.plan() == []
    scenario.acknowledge(first)

    assert sends(scenario.plan()) == [(1, 2 * CHUNK_BYTES, 1), (1, 2 * CHUNK_BYTES, 2)]
    assert (second.offset, second.views()[0].nbytes) == (CHUNK_BYTES, 2 * CHUNK_BYTES)


@pytest.mark.usefixtures("pipelined")
def test_large_batches_are_in_flight_together_up_to_the_window(make: MakeScenario) -> None:
    scenario = make(1, 8 * SLOT_BYTES)
    batches = [scenario.append() for _ in range(8)]

    assert len(sends(scenario.plan())) == 6
    scenario.acknowledge(batches[0])
    assert len(sends(scenario.plan())) == 1
    assert [batch.offset for batch in batches[:7]] == [number * CHUNK_BYTES for number in range(7)]


def test_the_bytes_of_a_batch_are_limited_and_a_chunk_beyond_the_limit_goes_alone(
    make: MakeScenario, limits: ReplicationLimits
) -> None:
    limits.request_bytes_max = CHUNK_BYTES
    scenario = make(1)
    for size in (512, 512, 2048, 512, 512):
        scenario.append(size=size)
    scenario.finish()

    assert [length for _, length, _ in sends(scenario.effects)] == [1024, 2048, 1024]


def test_virtual_segments_never_exceed_their_capacity(make: MakeScenario) -> None:
    scenario = make(1)
    for _ in range(4):
        scenario.append(3)
    scenario.finish()

    assert max(place.head for place in scenario.places) <= SLOT_BYTES


# --- completion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_a_batch_is_complete_when_all_backups_have_it_and_then_readers_see_it(
    make: MakeScenario, replication: int
) -> None:
    scenario = make(replication)
    batch = scenario.append(2)
    outcome = scenario.wait(batch)
    scenario.plan()
    for backup_id in range(1, replication):
        scenario.acknowledge(batch, backup_id)
        assert (outcome.calls, scenario.durable, scenario.virtual.lag_bytes) == ([], 0, 2 * CHUNK_BYTES)
    scenario.acknowledge(batch, replication)

    assert (outcome.calls, scenario.durable, scenario.virtual.lag_bytes) == ([None], 2 * CHUNK_BYTES, 0)
    assert batch.completed
    assert nothing_pinned(scenario.engine)


@pytest.mark.usefixtures("pipelined")
def test_batches_complete_in_the_order_of_the_log_whatever_the_order_of_the_answers(make: MakeScenario) -> None:
    scenario = make()
    batches = [scenario.append() for _ in range(3)]
    scenario.plan()
    for number in (2, 1):
        scenario.acknowledge(batches[number])
    assert scenario.durable == 0
    scenario.acknowledge(batches[0], 2)
    assert scenario.durable == 0
    scenario.acknowledge(batches[0], 1)

    assert scenario.durable == 3 * CHUNK_BYTES
    assert [batch.completed for batch in batches] == [True] * 3


# --- virtual segments --------------------------------------------------------------------------------------


def test_a_full_virtual_segment_closes_when_complete_with_its_checksum_and_extents(make: MakeScenario) -> None:
    scenario = make()
    first = scenario.append(3)
    scenario.plan()
    scenario.acknowledge(first)
    second = scenario.append(2)

    effects = scenario.plan()
    assert closes(effects) == [(1, 3 * CHUNK_BYTES, 1), (1, 3 * CHUNK_BYTES, 2)]
    assert sends(effects) == [(2, 2 * CHUNK_BYTES, 1), (2, 2 * CHUNK_BYTES, 2)]
    place = scenario.places[0]
    scenario.virtual.closed(place, 1)
    assert scenario.closed == []
    scenario.virtual.closed(place, 2)

    segment = scenario.log.entry.resident[1, 1]
    assert scenario.closed == [place]
    assert place.checksum == checksum_of(segment.slot.view[: 3 * CHUNK_BYTES])
    assert [tuple(extent) for extent in extents_of(place)] == [(segment.address, 0, 3 * CHUNK_BYTES)]
    assert second.place is scenario.places[1]


def test_the_next_chunk_after_closing_an_idle_virtual_segment_opens_another(make: MakeScenario) -> None:
    scenario = make(1)
    scenario.append()
    scenario.plan()
    scenario.finish()
    effects: list[Effect] = []
    scenario.virtual.close_open(effects)
    assert closes(effects) == [(1, CHUNK_BYTES, 1)]
    scenario.note(effects)
    scenario.finish()

    assert scenario.virtual.settled
    scenario.append()
    assert sends(scenario.plan()) == [(2, CHUNK_BYTES, 1)]


def test_chunks_of_several_segments_go_in_one_batch(make: MakeScenario) -> None:
    scenario = make(1, 4 * SLOT_BYTES)
    batch = scenario.append(6)
    scenario.plan()
    scenario.finish()

    data = b"".join(batch.views())
    assert [segment.key for segment in batch.runs] == [(1, 1), (1, 2)]
    assert (len(data), scenario.places[0].checksum) == (6 * CHUNK_BYTES, checksum_of(data))


# --- failures ----------------------------------------------------------------------------------------------


def test_a_virtual_segment_whose_backup_fails_is_sealed_where_all_backups_had_it(make: MakeScenario) -> None:
    scenario = make(3)
    first, outcome = scenario.append(), Outcome()
    scenario.plan()
    scenario.acknowledge(first)
    second = scenario.append(2)
    second.waiters.append(outcome)
    scenario.plan()
    scenario.acknowledge(second, 1, 2)

    effects = scenario.lose(3)
    place = scenario.places[0]
    assert closes(effects) == [(1, CHUNK_BYTES, 1), (1, CHUNK_BYTES, 2)]
    assert place.checksum == chained_checksum(first.views()[0], 0, 0)
    scenario.backups.append(6)
    assert sends(scenario.plan()) == [(2, 2 * CHUNK_BYTES, backup_id) for backup_id in (1, 2, 4)]
    assert (second.offset, outcome.calls) == (0, [])
    assert scenario.virtual.acknowledged(second, place, 3) == []  # late, and without effect
    assert not second.complete
    scenario.finish()

    assert outcome.calls == [None]
    assert [(each.virtual_segment_id, each.backups) for each in scenario.closed] == [(1, [1, 2])]


def test_a_failed_virtual_segment_without_complete_batches_is_freed(make: MakeScenario) -> None:
    scenario = make()
    scenario.append()
    scenario.plan()

    assert scenario.lose(1) == [Free(2, (1,)), Free(1, (1,))]
    assert scenario.closed == [scenario.places[0]]
    assert scenario.places[0].head == 0
    scenario.plan()
    scenario.finish()
    assert scenario.durable == CHUNK_BYTES


@pytest.mark.usefixtures("pipelined")
def test_batches_that_are_sent_again_keep_their_order(make: MakeScenario) -> None:
    scenario = make(2, 8 * SLOT_BYTES)
    batches = [scenario.append() for _ in range(4)]
    scenario.plan()
    scenario.acknowledge(batches[0])
    scenario.acknowledge(batches[2])
    scenario.lose(2)
    scenario.plan()

    assert [batch.offset for batch in batches[1:]] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert {batch.place for batch in batches[1:]} == {scenario.places[1]}
    assert closes(scenario.effects) == [(1, CHUNK_BYTES, 1)]
    scenario.finish()
    assert scenario.durable == 4 * CHUNK_BYTES


@pytest.mark.parametrize("answered", [False, True])
def test_a_backup_that_fails_while_it_closes_is_not_waited_for(make: MakeScenario, *, answered: bool) -> None:
    scenario = make()
    scenario.append(4)
    scenario.plan()
    scenario.finish()
    scenario.virtual.close_open([])
    place = scenario.places[0]
    if answered:
        scenario.virtual.closed(place, 1)
    assert scenario.lose(1) == []
    assert scenario.closed == []
    scenario.virtual.closed(place, 2)

    assert (scenario.closed, place.backups, place.head) == ([place], [2], SLOT_BYTES)


@pytest.mark.usefixtures("pipelined")
def test_only_the_incomplete_end_of_a_full_virtual_segment_is_resent_after_a_failure(
    make: MakeScenario,
) -> None:
    scenario = make()
    batches = [scenario.append() for _ in range(5)]
    scenario.plan()
    for batch in batches[:3]:
        scenario.acknowledge(batch)
    effects = scenario.lose(2)

    assert closes(effects)[0] == (1, 3 * CHUNK_BYTES, 1)
    scenario.plan()
    assert {batch.place for batch in batches[3:]} == {scenario.places[-1]}
    scenario.finish()
    assert scenario.durable == 5 * CHUNK_BYTES


def test_a_virtual_log_leaves_closed_virtual_segments_alone_when_backups_fail(make: MakeScenario) -> None:
    scenario = make()
    scenario.append(4)
    scenario.plan()
    scenario.virtual.close_open([])
    scenario.finish()

    assert scenario.lose(1, 2) == []
    assert scenario.closed[0].backups == [1, 2]


@pytest.mark.usefixtures("pipelined")
def test_batches_of_two_virtual_segments_keep_their_order_when_a_backup_of_both_fails(make: MakeScenario) -> None:
    scenario = make()
    batches = [scenario.append() for _ in range(6)]
    scenario.plan()
    assert len(scenario.places) == 2
    scenario.lose(1)
    scenario.plan()

    order = [(batch.place.virtual_segment_id, batch.offset) for batch in batches if batch.place is not None]
    assert order == sorted(order)
    assert len(order) == 6
    scenario.lose(2)
    scenario.finish()
    assert scenario.durable == 6 * CHUNK_BYTES


@pytest.mark.usefixtures("pipelined")
def test_batches_behind_resent_ones_are_kept_when_the_next_backup_fails(make: MakeScenario) -> None:
    scenario = make(1)
    batches = [scenario.append() for _ in range(5)]
    scenario.backups = [1]
    scenario.virtual.plan(0, _on(scenario, {1: [1], 2: [2]}))
    assert [batch.place.virtual_segment_id for batch in batches if batch.place is not None] == [1, 1, 1, 1, 2]
    scenario.backups = [2, 3]
    scenario.lose(1)
    scenario.plan()
    scenario.lose(2)
    scenario.finish()

    assert scenario.durable == 5 * CHUNK_BYTES
    assert scenario.virtual.settled or scenario.virtual.open is not None
    assert not scenario.virtual.busy


def _on(scenario: Scenario, backups: dict[int, list[int]]) -> Callable[[VirtualLog], VirtualSegment | None]:
    def open_next(_: VirtualLog) -> VirtualSegment:
        number = len(scenario.places) + 1
        scenario.places.append(VirtualSegment(number, STREAM_ID, 0, list(backups[number]), 0))
        return scenario.places[-1]

    return open_next


@pytest.mark.usefixtures("pipelined")
def test_a_batch_that_waits_for_earlier_ones_is_resent_when_its_backup_fails(make: MakeScenario) -> None:
    """The batch is not acknowledged yet, and would be on fewer than R backups when it is."""
    scenario = make(1)
    batches = [scenario.append() for _ in range(5)]
    outcome = scenario.wait(batches[4])
    scenario.virtual.plan(0, _on(scenario, {1: [1], 2: [2]}))
    scenario.acknowledge(batches[4])  # on backup 2, alone
    scenario.lose(2)
    for batch in batches[:4]:
        scenario.acknowledge(batch)

    assert outcome.calls == []
    scenario.plan()
    scenario.finish()
    assert outcome.calls == [None]
    assert batches[4].place is not None
    assert batches[4].place.backups != []


def test_batches_wait_without_enough_backups_and_go_on_when_there_are_enough(make: MakeScenario) -> None:
    scenario = make()
    scenario.backups = [1]
    batch = scenario.append()
    assert scenario.plan() == []
    assert scenario.virtual.starved
    scenario.append()
    scenario.backups = [1, 2]
    scenario.plan()
    scenario.finish()

    assert batch.completed
    assert scenario.durable == 2 * CHUNK_BYTES


# --- waiters, shedding, the end ----------------------------------------------------------------------------


def test_a_waiter_that_expires_gets_one_error_and_its_chunks_are_still_replicated(make: MakeScenario) -> None:
    scenario = make()
    old = scenario.append()
    outcomes = [scenario.wait(old)]
    scenario.plan()
    scenario.now_ms = WAIT_MS
    outcomes.append(scenario.wait(scenario.append()))
    scenario.virtual.expire(0, ERROR)
    assert [outcome.calls for outcome in outcomes] == [[ERROR], []]
    scenario.finish()

    assert [outcome.calls for outcome in outcomes] == [[ERROR], [None]]
    assert scenario.durable == 2 * CHUNK_BYTES


def test_a_waiter_that_joins_an_old_batch_has_its_full_time(make: MakeScenario) -> None:
    scenario = make()
    scenario.backups = []
    scenario.append()
    scenario.plan()
    scenario.now_ms = WAIT_MS - 10
    outcome = scenario.wait(scenario.append())
    scenario.now_ms = WAIT_MS
    scenario.virtual.expire(scenario.now_ms - WAIT_MS, ERROR)

    assert outcome.calls == []


def test_only_unsent_chunks_without_waiters_are_shed(make: MakeScenario) -> None:
    scenario = make()
    sent = scenario.append()
    scenario.plan()
    scenario.append(2)
    (extent,) = scenario.virtual.shed()

    assert (extent.start, extent.end) == (CHUNK_BYTES, 3 * CHUNK_BYTES)
    assert scenario.virtual.lag_bytes == CHUNK_BYTES
    scenario.acknowledge(sent)
    assert nothing_pinned(scenario.engine)
    waited = scenario.append()
    scenario.wait(waited)
    assert scenario.virtual.shed() == []


def test_a_virtual_segment_does_not_cover_chunks_shed_between_two_of_its_runs(make: MakeScenario) -> None:
    scenario = make(1)
    scenario.append()
    scenario.plan()
    scenario.append()
    scenario.virtual.shed()
    scenario.finish()
    scenario.append()
    scenario.plan()
    scenario.finish()
    scenario.virtual.close_open(scenario.effects)
    scenario.finish()

    (place,) = scenario.closed
    assert sum(extent.end - extent.start for extent in extents_of(place)) == place.head == 2 * CHUNK_BYTES


def test_a_dropped_log_frees_everything_and_ignores_late_answers(make: MakeScenario) -> None:
    scenario = make()
    sent = scenario.append()
    outcomes = [scenario.wait(sent)]
    (send, _) = scenario.plan()
    assert isinstance(send, Send)
    outcomes.append(scenario.wait(scenario.append()))
    assert scenario.virtual.drop(ERROR) == [Free(1, (1,)), Free(2, (1,))]

    assert [outcome.calls for outcome in outcomes] == [[ERROR]] * 2
    assert scenario.virtual.acknowledged(sent, send.place, 1) == []
    assert scenario.virtual.lost(1) == []
    assert (scenario.virtual.lag_bytes, scenario.virtual.settled) == (0, True)
    assert nothing_pinned(scenario.engine)


def test_a_new_log_waits_for_the_earlier_logs_of_its_entries(make: MakeScenario) -> None:
    scenario = make()
    before = scenario.virtual
    first = scenario.append()
    scenario.plan()
    scenario.virtual = VirtualLog(
        STREAM_ID,
        1,
        replication=2,
        limits=ReplicationLimits(SLOT_BYTES),
        on_closed=scenario.closed.append,
        totals=ReplicationTotals(),
        after=[before],
    )
    second = scenario.append()
    assert scenario.plan() == []
    for backup_id in (1, 2):
        assert first.place is not None
        before.acknowledged(first, first.place, backup_id)
    assert scenario.durable == CHUNK_BYTES
    scenario.plan()
    scenario.finish()

    assert second.completed
    assert scenario.durable == 2 * CHUNK_BYTES
