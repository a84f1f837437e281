"""Known failures of comparable systems, one by one, with written plans instead of random ones.

Each scenario is a plan of the simulation in a separate process, with faults aimed at certain moments. The checker of
all runs gives the verdict. In addition, the trace must show that the scenario met its trap.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.conftest import Simulate
from tests.simulation.world.aimed import RECEIVER, SENDER
from tests.simulation.world.disk_faults import BITS, BLACKOUT, BROKEN, FULL, MIDDLE, POWER
from tests.simulation.world.plan import Fault, Plan, draw
from tests.simulation.world.shrinking import stored

BROKERS = ("broker-1", "broker-2", "broker-3")
BACKUPS = ("backup-1", "backup-2", "backup-3")
DAEMONS = ("coordinator-1", *BROKERS, *BACKUPS)
Traced = Callable[[Plan], str]
"""Runs a plan, and returns its trace."""


def scenario(*faults: Fault, **changes: Any) -> Plan:
    """Three brokers and three backups; two producers send for twelve seconds to a stream with two replicas."""
    kept: dict[str, Any] = {
        "coordinators": 1,
        "brokers": 3,
        "backups": 3,
        "streamlets": 3,
        "entries": 1,
        "replication": 2,
        "durability": "persisted",
        "producers": 2,
        "readers": 1,
        "members": 1,
        "records": 60,
        "record_bytes": 100,
        "burst": 2,
        "delay_s": 0.0003,
        "pieces": 0.0,
        "drift": 0.0,
        "load_s": 12.0,
        "kinds": (),
    }
    return dataclasses.replace(draw(1), **kept | {"faults": tuple(sorted(faults))} | changes)


def alone(**changes: Any) -> dict[str, Any]:
    """A single broker without backups."""
    return {"brokers": 1, "backups": 0, "replication": 0} | changes


def aimed(at_s: float, moment: str, blow: str, who: str, lasts_s: float = 1.0, *, lost: bool = False) -> Fault:
    """A blow at the sender or receiver of the next message of a kind; `lost`: the message is lost, too."""
    return Fault(at_s, "aim", lasts_s, (moment, blow, who), -1.0 if lost else 1.0)


@pytest.fixture
def traced(simulate: Simulate, tmp_path: Path) -> Traced:
    """Runs a plan that must keep all promises, and returns its trace."""

    def run(plan: Plan) -> str:
        path = tmp_path / "plan"
        path.write_text(stored(plan), encoding="utf-8")
        return simulate("--trace", "--plan", str(path))

    return run


def repeats_in(trace: str) -> int:
    found = re.search(r"(\d+) of them sent again though they had come", trace)
    assert found
    return int(found[1])


@pytest.mark.parametrize("changes", [{}, pytest.param(alone(), marks=pytest.mark.slow)])
def test_acknowledged_records_survive_a_power_loss_of_all_machines(traced: Traced, changes: dict[str, Any]) -> None:
    """All machines lose power at once, several times while records are acknowledged."""
    who = ("coordinator-1", "broker-1") if changes else DAEMONS
    blackouts = [Fault(at_s, BLACKOUT, 0.5, who) for at_s in (2.0, 4.03, 6.07, 8.11, 10.0)]
    trace = traced(scenario(*blackouts, **changes))
    assert trace.count("has lost power") == len(blackouts) * len(who)


@pytest.mark.parametrize("changes", [{}, pytest.param(alone(), marks=pytest.mark.slow)])
def test_acknowledged_records_survive_failed_syncs_and_a_power_loss(traced: Traced, changes: dict[str, Any]) -> None:
    """Disks fail and work again; then a power loss shows their durable contents."""
    who = ("broker-1",) if changes else (*BROKERS, *BACKUPS)
    broken = [Fault(at_s, BROKEN, 0.7, (name,)) for at_s in (2.0, 4.0, 6.0) for name in who]
    everybody = ("coordinator-1", *who)
    dark = [Fault(at_s, BLACKOUT, 0.5, everybody) for at_s in (3.5, 5.5, 7.5)]
    trace = traced(scenario(*broken, *dark, **changes))
    assert "cannot write" in trace
    assert trace.count("has lost power") == len(dark) * len(everybody)


@pytest.mark.slow
def test_a_paused_leader_does_not_lead_after_it_wakes(traced: Traced) -> None:
    """Each coordinator pauses for long, while brokers are lost and streamlets move."""
    pauses = [Fault(2.0 + 6 * number, "pause", 12.0, (f"coordinator-{number + 1}",)) for number in range(3)]
    others = [
        Fault(5.0, POWER, 3.0, ("broker-1",)),
        Fault(11.0, POWER, 3.0, ("broker-2",)),
        *(Fault(at_s, "move", 0.0, (f"broker-{int(at_s) % 3 + 1}",), 1.0) for at_s in (3.0, 7.0, 9.0, 13.0, 16.0)),
    ]
    trace = traced(scenario(*pauses, *others, coordinators=3, load_s=24.0))
    assert len(re.findall(r"info: leading", trace)) >= 2


@pytest.mark.parametrize("durability", ["replicated", pytest.param("persisted", marks=pytest.mark.slow)])
def test_a_failover_keeps_acknowledged_records(traced: Traced, durability: str) -> None:
    """Brokers that have just acknowledged lose their memory, again and again."""
    blows = [aimed(at_s, "records are acknowledged", POWER, SENDER) for at_s in (2.0, 4.0, 6.0, 8.0, 10.0)]
    trace = traced(scenario(*blows, durability=durability))
    assert trace.count("has lost power") == len(blows)
    assert "streamlet taken over" in trace


@pytest.mark.slow
def test_a_former_owner_does_not_serve_clients_that_still_know_it(traced: Traced) -> None:
    """Streamlets move while clients cannot reach the coordinator."""
    cuts = [Fault(2.0, "cut", 8.0, ("coordinator-1", name)) for name in ("producer-1", "reader-1", "member-1")]
    moves = [Fault(2.5 + number, "move", 0.0, (BROKERS[number % 3],), 1.0 + number % 3) for number in range(8)]
    trace = traced(scenario(*cuts, *moves))
    assert "owned by another broker" in trace


@pytest.mark.parametrize("blow", [POWER, pytest.param("kill", marks=pytest.mark.slow)])
def test_records_sent_again_after_a_failover_are_stored_once(traced: Traced, blow: str) -> None:
    """Acknowledgements are lost together with their broker."""
    blows = [aimed(2.0 + 2 * number, "records are acknowledged", blow, SENDER, lost=True) for number in range(5)]
    trace = traced(scenario(*blows))
    assert repeats_in(trace) > 0


def test_a_restarted_broker_recognizes_repeats_of_producers(traced: Traced) -> None:
    """The broker has no backups; it restarts with its memory, and without."""
    kills = [aimed(2.0 + 2 * number, "records are acknowledged", "kill", SENDER, lost=True) for number in range(3)]
    power = [aimed(8.0 + 2 * number, "records are acknowledged", POWER, SENDER, lost=True) for number in range(2)]
    trace = traced(scenario(*kills, *power, **alone()))
    assert repeats_in(trace) > 0


def test_a_recovery_ignores_replicas_with_flipped_bits(traced: Traced) -> None:
    """Bits of one backup flip at rest; then the brokers are lost, and only other replicas are good."""
    flips = [Fault(at_s, BITS, 0.0, ("backup-1",), 20.0) for at_s in (4.0, 6.0)]
    lost = [Fault(6.5, POWER, 2.0, (name,)) for name in BROKERS]
    trace = traced(scenario(*flips, *lost))
    assert "has flipped bits" in trace


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (7, 14))])
def test_a_torn_index_is_not_trusted(traced: Traced, first: int) -> None:
    """Power is lost in the middle of changes of the disk, one after the other."""
    lost = [Fault(2.0 + 1.5 * number, MIDDLE, 1.0, ("broker-1",), float(first + number)) for number in range(7)]
    trace = traced(scenario(*lost, **alone(record_bytes=1000, burst=10)))
    assert trace.count("has lost power") >= 2


def test_full_disks_during_a_failover_delay_it_and_lose_no_records(traced: Traced) -> None:
    """All disks are full when a broker is lost, so its successor has no room at first."""
    full = [Fault(3.0, FULL, 5.0, (name,)) for name in DAEMONS]
    trace = traced(scenario(*full, Fault(4.0, POWER, 1.0, ("broker-1",))))
    assert "cannot write" in trace
    assert "streamlet taken over" in trace


def test_setting_wall_clocks_ends_no_lease(traced: Traced) -> None:
    """The clocks of all machines jump by a day, back and forth."""
    jumps = [
        Fault(2.0 + number, "set clock", 0.0, (name,), 86_400.0 * (-1) ** number)
        for number in range(6)
        for name in (*DAEMONS, "producer-1", "member-1")
    ]
    trace = traced(scenario(*jumps))
    assert "recovery enters phase" not in trace
    assert "consumer is gone" not in trace
    assert "lease" not in trace


@pytest.mark.parametrize(
    "moment",
    [
        "streamlets are handed over",
        *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("replicas are read", "streamlets are opened")),
    ],
)
def test_a_second_crash_during_a_recovery_loses_no_records(traced: Traced, moment: str) -> None:
    """The broker that takes over also loses its memory, and then the next one."""
    blows = [aimed(3.1 + number, moment, POWER, RECEIVER if "read" not in moment else SENDER) for number in range(3)]
    trace = traced(scenario(Fault(3.0, POWER, 1.0, ("broker-1",)), *blows))
    assert trace.count("has lost power") >= 2


@pytest.mark.slow
def test_a_broker_reports_its_lost_memory_after_the_coordinator_is_back(traced: Traced) -> None:
    """The brokers are killed again before the coordinator is back."""
    faults = [
        Fault(4.0, "kill", 4.0, ("coordinator-1",)),
        *(Fault(4.1, POWER, 0.2, (name,)) for name in BROKERS),
        *(Fault(6.0, "kill", 0.2, (name,)) for name in BROKERS),
    ]
    trace = traced(scenario(*faults, durability="replicated"))
    assert trace.count("lost_memory=True") >= 2 * len(BROKERS)


@pytest.mark.slow
def test_a_replaced_owner_acknowledges_no_more_records(traced: Traced) -> None:
    """The owner pauses with received records, and wakes after another broker has taken over its streamlets."""
    blows = [
        aimed(2.0, "records are sent", "pause", RECEIVER, 15.0),
        aimed(18.0, "records are replicated", "isolate", SENDER, 15.0),
    ]
    trace = traced(scenario(*blows, load_s=36.0))
    assert "streamlet taken over" in trace


@pytest.mark.parametrize(
    "moment",
    [
        "streamlets are sealed",
        *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("streamlets are opened", "streamlets are open")),
    ],
)
def test_a_move_interrupted_by_kills_is_completed_or_undone(traced: Traced, moment: str) -> None:
    """Senders and receivers of the messages of a move are killed in the middle."""
    moves = [Fault(3.0 + 2 * number, "move", 0.0, (BROKERS[number % 3],), 1.0 + number % 3) for number in range(4)]
    blows = [aimed(2.9 + 2 * number, moment, "kill", SENDER if number % 2 else RECEIVER) for number in range(4)]
    trace = traced(scenario(*moves, *blows))
    assert "aimed at when" in trace
