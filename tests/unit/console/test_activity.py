"""The activity of brokers, computed from their counters."""

import pytest

from kera.client import BrokerDescription
from kera.client.admin.daemons import DaemonFigures
from kera.console.watching import activity
from kera.console.watching.activity import Activities, activity_of
from kera.core.errors import KeraError, NotAllowed, Unavailable


def figures(uptime_s: float, written: float = 0.0, *, launch: str = "one", **values: float) -> DaemonFigures:
    found: dict[str, dict[tuple[str, ...], float]] = {
        "kera_broker_bytes_appended_total": {("stream", "a"): written, ("stream", "b"): 5.0},
        "kera_processor_seconds_total": {("of", "loop"): values.pop("loop", 0.0), ("of", "all"): 9.0},
    }
    found |= {name: {(): value} for name, value in values.items()}
    return DaemonFigures(launch, round(uptime_s * 1e6), found, {})


def test_a_rate_needs_two_answers_of_the_same_launch() -> None:
    before, now = figures(10, 1000, loop=1), figures(12, 3000, loop=2)
    assert activity_of(before, now)[:4] == (1000.0, 0.0, 0.0, 0.5)
    assert activity_of(None, now)[:4] == (None,) * 4
    assert activity_of(figures(10, launch="other"), now)[:4] == (None,) * 4
    assert activity_of(now, now)[:4] == (None,) * 4
    assert activity_of(now, before)[:4] == (None,) * 4


def test_a_rate_is_never_negative() -> None:
    assert activity_of(figures(10, 1000), figures(12, 10)).bytes_in_per_s == 0


def test_memory_and_lag_come_from_the_latest_answer_or_are_unknown() -> None:
    now = figures(
        1,
        kera_broker_arena_slots=10,
        kera_broker_arena_slots_free=4,
        kera_broker_arena_slot_bytes=100,
        kera_broker_replication_lag_ms=7,
    )
    found = activity_of(None, now)
    assert (found.memory_bytes, found.lag_ms) == (600, 7)
    assert activity_of(None, figures(1))[4:] == (None, None)


class Line:
    def __init__(self, address: str, closed: list[str]) -> None:
        self.address = address
        self._closed = closed

    async def close(self) -> None:
        self._closed.append(self.address)


def broker(number: int, *, alive: bool = True) -> BrokerDescription:
    return BrokerDescription(number, "node", f"host:{number}", "", "", 1, 1, alive)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, DaemonFigures | KeraError]:
    known: dict[str, DaemonFigures | KeraError] = {}

    async def read_figures(channel: Line, **_: object) -> DaemonFigures:
        found = known[channel.address]
        if isinstance(found, KeraError):
            raise found
        return found

    monkeypatch.setattr(activity, "read_figures", read_figures)
    return known


async def test_each_live_broker_is_asked_over_one_connection(
    answers: dict[str, DaemonFigures | KeraError],
) -> None:
    closed: list[str] = []
    opened: list[str] = []

    def channel(address: str) -> Line:
        opened.append(address)
        return Line(address, closed)

    activities = Activities(channel)  # type: ignore[arg-type]
    answers |= {"host:1": figures(1, 0), "host:2": Unavailable("away")}
    found = await activities.ask([broker(1), broker(2), broker(3, alive=False)])
    assert found.keys() == {1}
    answers |= {"host:1": figures(3, 500), "host:2": NotAllowed("no")}
    found = await activities.ask([broker(1), broker(2)])
    assert found[1].bytes_in_per_s == 250
    assert opened == ["host:1", "host:2"]
    await activities.ask([broker(1)])
    assert closed == ["host:2"]
    answers["host:1"] = NotAllowed("no")
    with pytest.raises(NotAllowed):
        await activities.ask([broker(1)])
    assert await activities.ask([]) == {}
    await activities.close()
    assert closed == ["host:2", "host:1"]
