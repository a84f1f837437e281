"""The state that all parts of the persistence manager share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kera.broker.log.entry import Entry
from kera.broker.log.events import Events
from kera.broker.storage.disk_health import DiskHealth
from kera.broker.storage.jobs import DiskTotals
from kera.broker.storage.physical_ids import PhysicalIds


@dataclass(slots=True)
class Books:
    """The state that the parts of the persistence manager share: file ids, disk health, events, totals and locks."""

    ids: PhysicalIds
    disk: DiskHealth
    events: Events
    totals: DiskTotals = field(default_factory=DiskTotals)
    locked: set[Entry] = field(default_factory=set)
    """Entries with a change of their records under way; each has at most one."""
