"""The health checks of a backup, which decide whether it is ready. They only look at its parts."""

from __future__ import annotations

from kera.backup.engine import Engine
from kera.backup.registration import BackupRegistration
from kera.core.base.clock import Clock
from kera.core.base.health import Health, Observation, concern, well, wrong


def watch_disks(health: Health, engine: Engine) -> None:
    """Add checks of the disks and the memory, once the disks are open."""

    def disks() -> Observation:
        every = engine.store.persistence.disks
        failing = [f"{disk.name}: {disk.error}" for disk in every if disk.error is not None]
        full = [disk.name for disk in every if disk.error is None and disk.room_bytes < disk.layout.frame_bytes]
        troubles = [*failing, *(f"{name}: no room" for name in full)]
        if len(troubles) == len(every):
            return wrong(f"no disk takes replicas ({'; '.join(troubles)}); make room, or replace it")
        if troubles:
            return concern(f"{len(troubles)} of {len(every)} disks take no replicas: {'; '.join(troubles)}")
        return well("all take replicas")

    def memory() -> Observation:
        slots = engine.store.slots
        return well(f"{slots.free} of {slots.count} replicas' worth is free")

    health.add("disks", disks)
    health.add("memory", memory)


def watch_registration(health: Health, registration: BackupRegistration, clock: Clock) -> None:
    """Add a check of the registration with the coordinator, which is the next step of the start.

    Brokers use a backup even while the coordinator is away.
    """

    def coordinator() -> Observation:
        if not registration.backup_epoch:
            return wrong("this backup is not registered yet; is there a coordinator that leads?")
        silent_s = clock.boottime_s() - registration.last_sent_s
        return well(f"registered as backup {registration.backup_id}; last answer {silent_s:.1f} s ago")

    health.add("coordinator", coordinator)
    health.starting("it registers with the coordinator")
