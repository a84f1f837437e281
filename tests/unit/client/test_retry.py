"""Retries: pauses, time limits, and the error in the end."""

import pytest

from kera.client.cluster.retry import (
    ROUTE_PAUSE_S_MAX,
    RetryTime,
    backoff_s,
    retrying,
    route_pause_s,
)
from kera.client.settings import ClientSettings
from kera.core.errors import (
    ArenaFull,
    InvalidCursor,
    KeraError,
    NotOwner,
    ProtocolError,
    Recovering,
    Unavailable,
    Uncertain,
    UnknownStream,
)

SETTINGS = ClientSettings(retry_timeout_ms=1000, recovery_timeout_ms=5000, retry_backoff_ms=50)


def test_pauses_after_not_owner_begin_short_and_grow_to_a_maximum() -> None:
    patience = RetryTime(SETTINGS)
    pauses = [patience.failed(NotOwner(""), 0.0) for _ in range(30)]
    assert pauses[0] == 0.005
    assert pauses[1] is not None
    assert pauses[1] <= 0.01
    assert pauses == sorted(pauses, key=float)  # type: ignore[arg-type]
    assert pauses[-1] == ROUTE_PAUSE_S_MAX


def test_pauses_after_other_errors_follow_the_settings() -> None:
    patience = RetryTime(SETTINGS)
    assert [patience.failed(ArenaFull(""), 0.0) for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert [backoff_s(SETTINGS, attempt) for attempt in (1, 2)] == [0.05, 0.1]
    assert route_pause_s(SETTINGS.model_copy(update={"retry_backoff_ms": 1}), 1) == 0.001


def test_the_retry_time_counts_from_the_first_failure_since_a_success() -> None:
    patience = RetryTime(SETTINGS)
    assert patience.failed(Unavailable(""), 10.0) is not None
    assert patience.failed(NotOwner(""), 10.9) is not None
    assert patience.failed(NotOwner(""), 11.0) is None
    patience.succeeded()
    assert patience.failed(NotOwner(""), 11.1) == 0.005
    assert patience.attempt == 1


def test_a_recovery_is_waited_for_until_its_own_timeout() -> None:
    patience = RetryTime(SETTINGS)
    assert patience.failed(Unavailable(""), 0.0) is not None
    for tenths in range(9, 50, 8):
        assert patience.failed(Recovering(""), tenths / 10) is not None
    assert patience.failed(Unavailable(""), 5.0) is not None  # time counts from the last such answer
    assert patience.failed(Recovering(""), 5.9) is None


@pytest.mark.parametrize("error", [InvalidCursor(""), UnknownStream(""), ValueError()])
def test_permanent_errors_are_not_retried(error: Exception) -> None:
    assert RetryTime(SETTINGS).failed(error, 0.0) is None


async def test_the_last_error_is_raised_with_an_earlier_uncertain_one_as_its_cause() -> None:
    settings = ClientSettings(retry_timeout_ms=10_000, retry_backoff_ms=1)
    uncertain = Uncertain("no answer")
    errors: list[KeraError] = [Unavailable("away"), uncertain, NotOwner("moved"), UnknownStream("gone")]

    async def fail() -> None:
        raise errors.pop(0)

    with pytest.raises(UnknownStream) as caught:
        await retrying(fail, settings)
    assert caught.value.__cause__ is uncertain
    assert errors == []
    errors = [Unavailable("away"), UnknownStream("gone")]
    with pytest.raises(UnknownStream) as caught:
        await retrying(fail, settings)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("wrong", [KeyError(7), IndexError("list index out of range"), ValueError("too many values")])
async def test_an_invalid_answer_is_a_protocol_error(wrong: Exception) -> None:
    async def attempt() -> None:
        raise wrong

    with pytest.raises(ProtocolError, match="invalid answer") as told:
        await retrying(attempt, ClientSettings())
    assert told.value.__cause__ is wrong
