"""Gaps and removals in intervals: they follow from how the streamlet went on elsewhere."""

from kera.broker.log.intervals import NO_END, Interval
from kera.broker.ownership.handover import HandedOver
from kera.broker.ownership.opener import removed_between, still_missing, until
from kera.broker.records import Gap
from kera.core.base.ids import Position
from tests.unit.broker.restart_support import SEGMENT, Launches


def test_a_whole_older_interval_has_no_gaps_after_a_loss_of_memory(launches: Launches) -> None:
    """A start without memory assumes a loss behind the stored part; the next owner's start may disprove the loss."""
    log = launches.begin()
    log.append_many(SEGMENT + 1)
    launches.engine.run()
    for _ in range(2):
        launches.lose_host()
        log = launches.begin()
    gaps, end = log.entry.gaps, log.entry.stored_end
    assert [gap.start for gap in gaps] == [end, end]

    whole = Interval(0, 2, end_records=(SEGMENT,))
    assert still_missing(log.entry, [whole]) == []
    more = whole._replace(end_records=(SEGMENT + 1,))
    assert still_missing(log.entry, [more]) == [Gap(end, more.following)] * 2
    later = Interval(7, leads=False)
    assert still_missing(log.entry, [whole, later]) == [Gap(later.start, gap.end) for gap in gaps]
    by_disk = still_missing(log.entry, [whole, later], persisted=True)
    assert all(gap.start > later.start for gap in by_disk), "who is where it begins has seen all that was visible"
    assert still_missing(log.entry, [Interval(0)]) == gaps
    assert still_missing(log.entry, until([Interval(0)], HandedOver(2, (SEGMENT,)))) == [], "handed over just now"
    missing = still_missing(log.entry, until([Interval(0)], HandedOver(2, (SEGMENT + 1,))))
    assert missing == [Gap(end, Position(2, 1, 0))] * 2


def test_the_part_between_two_merged_intervals_was_removed() -> None:
    before = (Interval(3, 4, (8, 1), (12, 1)), Interval(5, first_records=(15, 1), leads=False))
    assert removed_between(0, before, [Interval(0)]) == (Position(5, 1, 0), 15)
    assert removed_between(1, before, [Interval(0)]) is None, "the entry had nothing there"
    assert removed_between(0, before, before) is None
    assert removed_between(0, before[1:], [Interval(0)]) == (Position(5, 1, 0), 15), "nothing is left before it"
    assert removed_between(0, before[1:], before[1:]) is None


def test_an_interval_whose_end_has_grown_was_removed_up_to_its_new_end() -> None:
    before = (Interval(3, 4, (8, 1), (12, 1)), Interval(5, 7, (15, 1), (20, 1), leads=False))
    grown = before[1]._replace(end_group_id=9, end_records=(26, 1))
    assert removed_between(0, before, [before[0], grown]) == (Position(9, 1, 0), 26)
    assert removed_between(1, before, [before[0], grown]) is None, "the entry had nothing there"
    assert removed_between(0, before, [Interval(3, 9, (8, 1), (26, 1))]) == (Position(9, 1, 0), 26)
    owned = before[1]._replace(end_group_id=NO_END, end_records=())
    assert removed_between(0, before, [before[0], owned]) is None, "it has come back to its owner"
