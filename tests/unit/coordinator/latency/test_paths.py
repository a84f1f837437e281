"""The checks of latency constraints, and the error of each mistake."""

from __future__ import annotations

import pytest

from kera.coordinator.latency import paths
from kera.coordinator.latency.paths import (
    MEAN,
    P99,
    Stage,
    check_beside,
    check_new,
    check_there,
    checked,
    stages_of,
    streams_of,
)
from kera.core.errors import InvalidArgument, LatencyConstraintExists, UnknownStream
from kera.v1 import latency_pb2 as messages

PATH = ("clicks", "group:enrich", "visits", "group:dashboard")


def constraint(
    name: str = "checkout",
    path: tuple[str, ...] = PATH,
    limit_us: int = 300_000,
    window_ms: int = 0,
    statistic: messages.LatencyStatistic.ValueType = messages.LATENCY_STATISTIC_UNSPECIFIED,
) -> messages.LatencyConstraint:
    return messages.LatencyConstraint(name=name, path=path, limit_us=limit_us, window_ms=window_ms, statistic=statistic)


class World:
    """Streams, and the consumer groups that read them."""

    def __init__(self) -> None:
        self.readers = {"clicks": {"enrich"}, "visits": {"dashboard"}}

    def has_stream(self, name: str) -> bool:
        return name in self.readers

    def has_group(self, name: str) -> bool:
        return any(name in groups for groups in self.readers.values())

    def reads(self, group: str, stream: str) -> bool:
        return group in self.readers[stream]


def test_a_constraint_gets_a_default_window_and_statistic() -> None:
    found = checked(constraint())
    assert (found.window_ms, found.statistic) == (15_000, MEAN)
    assert checked(constraint(window_ms=2_000, statistic=P99)).window_ms == 2_000


def test_a_path_consists_of_streams_and_their_consumer_groups() -> None:
    assert stages_of(PATH) == (Stage("clicks", "enrich"), Stage("visits", "dashboard"))
    assert stages_of(PATH[:3]) == (Stage("clicks", "enrich"), Stage("visits", ""))
    assert stages_of(PATH[:1]) == (Stage("clicks", ""),)
    assert streams_of(PATH) == ["clicks", "visits"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ((), "needs a path, such as: clicks"),
        (("group:enrich", "visits"), "'group:enrich' is at the beginning of the path, and a stream is required here"),
        (("clicks", "visits"), "no consumer group connects streams 'clicks' and 'visits'"),
        (("clicks", "group:a", "group:b"), "'group:b' is after 'group:a', and a stream is required here"),
        (("clicks", "group:a", "clicks"), "'clicks' is twice on the path, which would be a cycle"),
        (("a", "group:x", "b", "group:x"), "'group:x' is twice on the path"),
        (("clicks", "group:"), "'group:' on the path is neither"),
        (("click s",), "'click s' on the path is neither"),
        (("",), "'' on the path is neither"),
        (("a" * 256,), "on the path is neither"),
        (("clicks", "app:enrich"), "'app:enrich' on the path is neither the name of a stream nor group:"),
        (tuple(f"s{i // 2}" if i % 2 == 0 else f"group:g{i}" for i in range(32)), "at most 31 streams and consumer"),
    ],
)
def test_the_error_of_an_invalid_path_says_what_is_wrong(path: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words.replace("(", r"\(")):
        checked(constraint(path=path))


@pytest.mark.parametrize(("limit_us", "said"), [(0, "0"), (999, "0.999"), (3_600_000_001, "3600000.001")])
def test_a_limit_is_between_a_millisecond_and_an_hour(limit_us: int, said: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the limit of a latency constraint is 1 ms to 1 h, not {said} ms"):
        checked(constraint(limit_us=limit_us))


@pytest.mark.parametrize("window_ms", [1, 999, 3_600_001])
def test_a_window_is_between_a_second_and_an_hour(window_ms: int) -> None:
    with pytest.raises(InvalidArgument, match="the window of a latency constraint is 1 s to 1 h, not"):
        checked(constraint(window_ms=window_ms))


@pytest.mark.parametrize("name", ["", "a b", "..", "a/b", "é", "a" * 101])
def test_an_invalid_name_of_a_constraint_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="a latency constraint cannot be called"):
        checked(constraint(name))


def test_an_unknown_statistic_is_refused() -> None:
    message = constraint()
    message.statistic = 7  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="statistic 7 is not known to this version"):
        checked(message)


def test_all_streams_and_groups_of_a_path_must_exist() -> None:
    world = World()
    check_there(PATH, world)
    with pytest.raises(UnknownStream, match="no stream 'orders', which is on the path"):
        check_there(("orders",), world)
    with pytest.raises(InvalidArgument, match="no consumer group 'nobody', which is on the path"):
        check_there(("clicks", "group:nobody"), world)
    with pytest.raises(InvalidArgument, match="'dashboard' does not read 'clicks', which is before it on the path"):
        check_there(("clicks", "group:dashboard"), world)


def test_a_second_constraint_of_the_same_path_window_and_statistic_is_refused() -> None:
    known = checked(constraint())
    with pytest.raises(InvalidArgument, match="'checkout' is about the same path, window and statistic, with a limit"):
        check_beside(checked(constraint("other", limit_us=5_000)), [known])
    check_beside(checked(constraint(limit_us=5_000)), [known])  # the constraint replaces the known one of its name
    check_beside(checked(constraint("other", statistic=P99)), [known])
    check_beside(checked(constraint("other", window_ms=60_000)), [known])


def test_the_numbers_of_constraints_and_of_their_streams_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CONSTRAINTS_MAX", 2)
    others = [checked(constraint(f"c{i}", (f"s{i}",))) for i in range(2)]
    with pytest.raises(InvalidArgument, match="there are 2 latency constraints, which is the limit"):
        check_beside(checked(constraint()), others)
    check_beside(others[0], others)
    monkeypatch.setattr(paths, "CONSTRAINTS_MAX", 3)
    monkeypatch.setattr(paths, "STREAMS_MAX", 3)
    with pytest.raises(InvalidArgument, match="would be about 4 streams, and the limit is 3"):
        check_beside(checked(constraint()), others)


def test_the_number_of_paths_with_a_stream_is_limited() -> None:
    others = [checked(constraint(f"other-{number}", window_ms=1000 + number)) for number in range(16)]
    with pytest.raises(InvalidArgument, match="stream 'clicks' is on the paths of 16 latency constraints"):
        check_beside(checked(constraint()), others)
    check_beside(others[0], others)
    check_beside(checked(constraint(path=("others",))), others)
    check_beside(checked(constraint()), others[1:])


def test_a_repeated_constraint_is_accepted_and_a_different_one_of_its_name_is_refused() -> None:
    known = checked(constraint())
    assert check_new(known, None)
    assert not check_new(checked(constraint()), known)
    with pytest.raises(LatencyConstraintExists, match="there is a latency constraint 'checkout' already: alter it"):
        check_new(checked(constraint(limit_us=1_000)), known)
