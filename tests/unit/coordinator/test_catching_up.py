"""Metadata that are older than the cluster: how the coordinator notices, and what it waits for."""

import pytest

from kera.coordinator.operations.catching_up import (
    CatchingUp,
    KnownNumbers,
    Phase,
    is_later_coordinator,
    is_later_launch,
    is_later_version,
)
from kera.server.lineage import CHANGES_BITS

GIVEN = KnownNumbers(coordinator_epoch=10, launch_epoch=100)
OURS = 20


def phase_of(one: CatchingUp) -> Phase:
    return one.phase


@pytest.mark.parametrize(
    ("epoch", "current", "later"),
    [
        (101, 90, True),
        (101, 0, True),  # a member that joined since
        (100, 90, False),  # these metadata gave this epoch, and a later launch replaced it
        (101, 105, False),  # a launch that registered under this coordinator replaced it
        (201, 90, False),  # above every epoch that can exist by now
    ],
)
def test_a_launch_is_later_than_the_metadata_if_its_epoch_is_higher_than_any_they_gave(
    epoch: int, current: int, later: bool
) -> None:
    assert is_later_launch(GIVEN, epoch, current, 200) == later


@pytest.mark.parametrize(("epoch", "later"), [(0, False), (10, False), (11, True), (OURS, False), (OURS + 1, False)])
def test_a_coordinator_epoch_after_the_last_known_one_shows_that_the_metadata_are_older(
    epoch: int, later: bool
) -> None:
    assert is_later_coordinator(GIVEN, epoch, OURS) == later


@pytest.mark.parametrize(("epoch", "later"), [(9, False), (10, True), (15, True), (OURS, False)])
def test_assignments_are_later_than_the_metadata_unless_an_earlier_coordinator_made_them(
    epoch: int, later: bool
) -> None:
    assert is_later_version(GIVEN, epoch << CHANGES_BITS | 3, OURS) == later


def test_taking_up_begins_when_all_brokers_have_answered_and_the_minimum_wait_is_over() -> None:
    one = CatchingUp(0.0, least_s=5.0, grace_s=60.0)
    one.advance(6.0, {1, 2}, [])
    assert phase_of(one) is Phase.ASKING
    assert "broker 1, broker 2 to say what they hold, 54 s at most" in one.describe(6.0)

    one.advance(7.0, set(), ["stream 'orders'"])

    assert phase_of(one) is Phase.TAKING_UP

    early = CatchingUp(0.0, least_s=5.0, grace_s=60.0)
    early.advance(1.0, set(), [])
    assert phase_of(early) is Phase.ASKING
    assert "brokers that are not in the metadata to say what they hold, 4 s at most" in early.describe(1.0)
    early.advance(5.0, set(), [])
    assert phase_of(early) is not Phase.ASKING


def test_catching_up_ends_when_everything_is_taken_up() -> None:
    one = CatchingUp(0.0, least_s=0.0, grace_s=60.0)
    one.advance(0.0, set(), [])
    one.advance(1.0, set(), ["stream 'orders'"])
    assert "stream 'orders' to go on as brokers know them, 59 s at most" in one.describe(1.0)

    one.advance(2.0, {7}, [])

    assert phase_of(one) is Phase.OVER
    assert one.describe(2.0) == ""


def test_each_of_the_two_waits_ends_after_the_grace() -> None:
    one = CatchingUp(0.0, least_s=1.0, grace_s=60.0)
    one.advance(60.0, {1}, ["stream 'orders'"])
    assert phase_of(one) is Phase.TAKING_UP
    one.advance(119.0, {1}, ["stream 'orders'"])
    assert phase_of(one) is Phase.TAKING_UP

    one.advance(120.0, {1}, ["stream 'orders'"])

    assert phase_of(one) is Phase.OVER


def test_a_grace_shorter_than_the_minimum_wait_is_prolonged() -> None:
    one = CatchingUp(0.0, least_s=5.0, grace_s=0.0)
    one.advance(4.0, {1}, [])

    assert phase_of(one) is Phase.ASKING


def test_a_description_names_only_some_of_many_awaited_brokers() -> None:
    one = CatchingUp(0.0, least_s=5.0, grace_s=60.0)
    one.advance(0.0, set(range(1, 10)), [])

    assert "broker 5, 4 more to say" in one.describe(0.0)
