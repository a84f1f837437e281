"""Events in a broker's log that concern other parts: made first, then handed to those that send and receive them."""

from __future__ import annotations

from kera.broker.event import Event
from kera.broker.log.entry import Entry
from kera.broker.records import Key, SegmentAddress


class Events:
    """The events of one broker."""

    def __init__(self) -> None:
        self.disk_work = Event[[]]()
        """The persistence manager may have something to plan."""
        self.backup_work = Event[[]]()
        """Replication may have something to send."""
        self.room = Event[[]]()
        """Writers that waited for memory or for backups may go on."""
        self.gone = Event[[SegmentAddress]]()
        """Nothing of a segment is left in the log, unless all of its stream goes."""
        self.awaited = Event[[Entry, Key]]()
        """A reader wants a segment that has yet to come from backups."""
