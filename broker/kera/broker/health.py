"""The checks of this broker's health and readiness. They look at its parts, and decide nothing."""

from __future__ import annotations

from kera.broker.engine import LogEngine
from kera.broker.ownership.clock_offset import ClockOffset
from kera.broker.ownership.lease import Lease
from kera.broker.registration import BrokerRegistration
from kera.core.base.clock import Clock
from kera.core.base.health import Health, Observation, concern, well, wrong

SLOW_MS = 500
"""A backup whose answers take this long makes writers wait."""


def watch_log(health: Health, engine: LogEngine) -> None:
    """Watch an open log: its disk, recoveries, backups and replication."""

    def disk() -> Observation:
        error = engine.memory.disk.error
        return well("it takes data") if error is None else wrong(engine.memory.disk.full(error).message)

    def recovery() -> Observation:
        to_come = engine.takeovers.totals.segments_to_come
        if to_come:
            return concern(f"{to_come} segments of lost brokers are still on backups only; readers wait for those")
        return concern("recovered data are being replicated") if engine.takeovers.active else well("none is under way")

    def backups() -> Observation:
        answers = engine.replicator.answer_ms()
        slow = [f"backup {number}, which takes {ms} ms to answer" for number, ms in answers.items() if ms >= SLOW_MS]
        if slow:
            return concern(f"writers wait for {', and '.join(slow)}: look at its disk, host and network")
        return well(f"{len(answers)} can be used, and answer in time" if answers else "none can be used")

    def replication() -> Observation:
        deficient = len(engine.replication.coverage.deficient)
        backlog = len(engine.replication.backlog.extents)
        if deficient or backlog:
            return concern(
                f"{deficient} virtual segments have too few replicas, {backlog} pieces of segments have none yet:"
                " they are being made, if there are enough backups"
            )
        return well("all that is closed has its replicas")

    health.add("disk", disk)
    health.add("recovery", recovery)
    health.add("backups", backups)
    health.add("replication", replication)


def watch_clock(health: Health, offset: ClockOffset) -> None:
    """Watch the broker's clock, which its promises depend on (docs/epochs.md)."""

    def clock() -> Observation:
        off_s = offset.least_us / 1e6
        if offset.told_us is None:
            return well(f"within {abs(off_s):.1f} s of the coordinator's, as far as is known")
        direction = "ahead of" if off_s > 0 else "behind"
        return concern(
            f"it is {abs(off_s):.1f} s {direction} the coordinator's: epochs of streams with a grace of"
            f" {offset.told_us / 1e6:g} s stay open in idle entries; synchronize clocks (chrony, systemd-timesyncd)"
        )

    health.add("clock", clock)


def watch_registration(health: Health, registration: BrokerRegistration, lease: Lease, clock: Clock) -> None:
    """Watch the broker's registration at the coordinator, which is the next step of its start."""

    def coordinator() -> Observation:
        if not registration.broker_epoch:
            return wrong("this broker is not registered yet; is there a coordinator that leads?")
        silent_s = clock.boottime_s() - registration.last_sent_s
        if not lease.holds:
            return wrong(
                f"no answer of the coordinator for {silent_s:.1f} s, so no chunks are taken for replicated streams;"
                " see whether a coordinator leads, and can be reached from here"
            )
        return well(f"registered as broker {registration.broker_id}; last answer {silent_s:.1f} s ago")

    health.add("coordinator", coordinator)
    health.starting("it registers with the coordinator, and opens its streams")
