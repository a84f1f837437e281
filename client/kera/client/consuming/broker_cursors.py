"""Brokers are told how far a consumer group is, besides the coordinator: retention by consumption goes by that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kera.client.cluster.cluster import Cluster
from kera.client.tasks import Tasks
from kera.client.types import StreamDescription, position_of
from kera.core.base.ids import EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError
from kera.v1 import common_pb2

log = get_logger("kera.consumer")


class BrokerCursors:
    """Cursors of a consumer group that brokers are to be told."""

    def __init__(
        self, cluster: Cluster, consumer_group: str, streams: Mapping[int, StreamDescription], tasks: Tasks
    ) -> None:
        self._cluster = cluster
        self._consumer_group = consumer_group
        self._streams = streams
        self._tasks = tasks
        self._moved: dict[EntryId, Position] = {}
        self._sending = False

    def note(self, moved: Iterable[common_pb2.Cursor]) -> None:
        """These have moved."""
        for cursor in moved:
            self._moved[EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry)] = position_of(cursor)

    def send_soon(self) -> None:
        """Tell the brokers in the background."""
        if self._moved and not self._sending:
            self._sending = True
            self._tasks.start(self._send_in_background())

    async def _send_in_background(self) -> None:
        try:
            await self.send()
        finally:
            self._sending = False

    async def send(self) -> None:
        """Tell the brokers."""
        while self._moved:
            moved, self._moved = self._moved, {}
            for stream_id, stream in self._streams.items():
                positions = {entry: position for entry, position in moved.items() if entry.stream_id == stream_id}
                if not positions:
                    continue
                try:
                    await self._cluster.commit(self._consumer_group, stream.name, positions)
                except KeraError as error:  # the next move tells more
                    log.info("brokers do not know a cursor", consumer_group=self._consumer_group, error=error.message)
