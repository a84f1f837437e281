"""Events in a broker's log that concern other parts: created first, then passed to their emitters and listeners."""

from __future__ import annotations

from kera.broker.event import Event
from kera.broker.log.entry import Entry
from kera.broker.records import Key, SegmentAddress


class Events:
    """The events of one broker."""

    def __init__(self) -> None:
        self.disk_work = Event[[]]()
        """Emitted when the persistence manager may have work to plan."""
        self.backup_work = Event[[]]()
        """Emitted when replication may have data to send."""
        self.room = Event[[]]()
        """Emitted when writers that waited for memory or for backups may go on."""
        self.gone = Event[[SegmentAddress]]()
        """Emitted when a segment was removed from the log completely, but not when its whole stream is dropped."""
        self.awaited = Event[[Entry, Key]]()
        """Emitted when a reader wants a segment that still has to come from backups."""
