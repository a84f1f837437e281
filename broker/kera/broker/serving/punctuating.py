"""What follows when a punctuation was appended: it goes where the chunk behind it goes, and nobody waits for it."""

from __future__ import annotations

from kera.broker.log.streamlet import Appended, Streamlet
from kera.broker.ownership.stream import Stream
from kera.broker.replication.virtual_log import VirtualLog
from kera.broker.replication.virtual_logs import VirtualLogs
from kera.broker.storage.persistence import PersistenceManager
from kera.core.done import nothing
from kera.v1 import common_pb2


class Punctuating:
    """Belongs to a writer."""

    def __init__(self, logs: VirtualLogs, memory: PersistenceManager) -> None:
        self._logs = logs
        self._memory = memory

    def follow(
        self, punctuation: Appended, stream: Stream, streamlet: Streamlet, log: VirtualLog | None, *, persist: bool
    ) -> None:
        """Have it copied to backups or disk, or readers see it; the chunk behind it is not readable before it is."""
        segment = punctuation.segment
        if stream.durability == common_pb2.DURABILITY_LEADER:
            streamlet.publish(punctuation)
        if log is not None and segment is not None:
            self._logs.append(log, segment, punctuation.position, punctuation.end, persist=persist)
        elif persist and segment is not None:
            self._memory.commits.persist([(segment, punctuation.end)], nothing)
