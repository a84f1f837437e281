"""Whether this coordinator can do its work: it leads, or stands by. Reads the state of the parts, decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from kera.coordinator.store.leadership import Leadership
from kera.coordinator.store.lmdb_store import LmdbStore
from kera.core.base.health import Health, Observation, concern, well, wrong


def watch_leadership(health: Health, leadership: Leadership, catching_up: Callable[[], str]) -> None:
    """Report whether the coordinator leads. `catching_up` returns what a leader's metadata wait for, or nothing.

    A leader that waits for brokers is ready: where only ready ones get calls, the brokers could not reach it otherwise.
    """

    def role() -> Observation:
        if leadership.leading:
            waits = catching_up()
            return concern(f"leads, and {waits}") if waits else well("leads")
        if leadership.problem:
            return wrong(f"does not lead: {leadership.problem}")
        if leadership.leader:
            return well(f"stands by; the coordinator at {leadership.leader} leads")
        return wrong("no coordinator is known to lead; if this lasts, see the logs of all of them, and the store")

    health.add("leadership", role)


def watch_records(health: Health, changed_by_others: Callable[[], str]) -> None:
    """Report whether somebody else changed the records that coordinators share in ZooKeeper."""

    def as_written() -> Observation:
        changed = changed_by_others()
        return concern(changed) if changed else well("are as coordinators wrote them")

    health.add("records", as_written)


def watch_metadata(health: Health, store: LmdbStore) -> None:
    """Report whether metadata can be written. If not, the coordinator still serves requests that do not change them."""
    health.add("metadata", lambda: concern(store.problem) if store.problem else well("can be written"))
