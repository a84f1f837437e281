"""`kera.connect.planning.outages`: the errors that a following copy survives, and its reports about them."""

from __future__ import annotations

import pytest

from kera.connect.errors import CopyElsewhere, CopyMismatch, Refused, Unreachable
from kera.connect.planning.outages import CAUSES_MAX, PAUSE_S_MAX, Failed, Outages
from kera.core.errors import Unavailable, Uncertain


def upper(_: float, high: float) -> float:
    return high


@pytest.fixture
def outages() -> Outages:
    made = Outages(draw=upper)
    made.began()
    return made


@pytest.mark.parametrize("error", [Unreachable("away"), Unavailable("away"), Uncertain("away")])
def test_a_transient_error_is_retried(outages: Outages, error: Exception) -> None:
    assert outages.failed(error, 0.0) == Failed(0.2, report=True)


@pytest.mark.parametrize("error", [Refused("no such table"), CopyMismatch("other"), CopyElsewhere("x"), ValueError()])
def test_a_permanent_error_ends_the_copy(outages: Outages, error: Exception) -> None:
    assert outages.failed(error, 0.0) is None


def test_a_copy_that_has_not_begun_ends_with_any_error() -> None:
    assert Outages().failed(Unreachable("away"), 0.0) is None


def test_pauses_double_up_to_a_bound_and_start_again_after_a_success(outages: Outages) -> None:
    pauses = [outages.failed(Unreachable("away"), 0.0) for _ in range(10)]

    assert [each.pause_s for each in pauses if each][:4] == [0.2, 0.4, 0.8, 1.6]
    assert pauses[-1] == Failed(PAUSE_S_MAX, report=False)
    outages.succeeded(1.0)
    assert outages.failed(Unreachable("away"), 2.0) == Failed(0.2, report=True)


def test_each_kind_of_error_is_reported_once_within_an_outage(outages: Outages) -> None:
    errors = [Unreachable("refused at port 1"), Unreachable("refused at port 22"), Unreachable("starting up")]
    errors += [Unreachable("refused at port 3"), Unreachable("starting up")]

    assert [found.report for error in errors if (found := outages.failed(error, 0.0))] == [True, False, True] + 2 * [
        False
    ]


def test_reports_of_an_outage_with_ever_new_errors_are_limited(outages: Outages) -> None:
    found = [outages.failed(Unreachable("x" * count), 0.0) for count in range(100)]

    assert sum(each.report for each in found if each) == CAUSES_MAX


def test_the_end_of_an_outage_is_reported_once_with_its_length(outages: Outages) -> None:
    assert outages.succeeded(1.0) is None
    outages.failed(Unreachable("away"), 2.0)
    outages.failed(Unreachable("away"), 3.0)

    assert outages.succeeded(5.0) == (3.0, 2)
    assert outages.succeeded(6.0) is None


def test_a_late_own_write_that_looks_like_another_process_is_retried_once(outages: Outages) -> None:
    outages.failed(Uncertain("no answer"), 0.0)

    assert outages.failed(CopyElsewhere("taken"), 1.0) is not None
    assert outages.failed(CopyElsewhere("taken"), 2.0) is None
