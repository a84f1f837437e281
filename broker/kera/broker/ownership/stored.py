"""How much this broker stores of the streams that each principal has created, and whose streams are full.

Appended data counts with the next heartbeat. Removed data, and data from before the start, is found bit by bit: each
heartbeat looks at some streamlets, round and round. Before the first round is complete, the report is marked as
incomplete. This costs nothing per record or request.

The coordinator adds up the reports of brokers, and names the principals that have reached their quota
(``stored_bytes``). From then on, writes to their streams are refused, whoever writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING

from kera.broker.event import Event
from kera.server.access.totals import exceeded
from kera.v1 import coordinator_pb2

if TYPE_CHECKING:
    from kera.broker.ownership.stream import Stream
    from kera.broker.ownership.streams import Streams

STREAMLETS_AT_ONCE = 200
"""Streamlets that a heartbeat looks at, which takes about 1 ms."""
PRINCIPALS_MAX = 1000
"""Maximum number of principals in a heartbeat: those with the most data."""


class Full:
    """The principals whose streams take no more data."""

    def __init__(self) -> None:
        self._by_name: dict[str, coordinator_pb2.FullPrincipal] = {}
        self.changed = Event[[]]()

    def note(self, answer: coordinator_pb2.HeartbeatResponse) -> None:
        """Take the principals that the coordinator names; if its list is incomplete, keep the known ones, too."""
        before = self._by_name
        named = {each.principal: each for each in answer.full_principals}
        self._by_name = before | named if answer.full_principals_incomplete else named
        if self._by_name.keys() != before.keys():
            self.changed()

    def check(self, stream: Stream) -> None:
        """Raise `QuotaExceeded` if a stream takes no more data."""
        known = self._by_name.get(stream.created_by)
        if known is not None:
            has = f"has stored {known.stored_bytes} bytes in its streams, as {stream.name!r}"
            raise exceeded(known.principal, "stored_bytes", known.quota_bytes, has)


class StoredBytes:
    """Counts the bytes that this broker stores for each creator of streams."""

    def __init__(self, streams: Streams, streamlets_at_once: int = STREAMLETS_AT_ONCE) -> None:
        self._streams = streams
        self._at_once = streamlets_at_once
        self._of_stream: dict[int, tuple[str, int]] = {}
        """The owner and size of each stream: as of the last look, with later appends added."""
        self._totals: Counter[str] = Counter()
        self._creators: Counter[str] = Counter()
        """The number of streams in `_totals`, by creator."""
        self._complete = False
        self._walk = self._walking()
        streams.dropped.listen(self._forget)

    def appended(self, stream: Stream, size: int) -> None:
        """Add bytes that were appended to a stream."""
        if stream.created_by:
            _, before = self._of_stream.get(stream.stream_id, ("", 0))
            self._note(stream.stream_id, stream.created_by, before + size)

    def fill(self, request: coordinator_pb2.HeartbeatRequest) -> None:
        """Look at some more streamlets, and put the counts into a heartbeat."""
        for all_seen in islice(self._walk, self._at_once):
            if all_seen:
                self._complete = True
                break
        request.stored_incomplete = not self._complete
        for principal in nlargest(PRINCIPALS_MAX, self._creators, key=self._totals.__getitem__):
            request.stored.add(principal=principal, bytes=self._totals[principal])

    def _walking(self) -> Generator[bool, None, None]:
        """Look at all streamlets in rounds; yield False after each streamlet, and True after each round."""
        while True:
            for stream in [each for each in self._streams if each.created_by]:
                size = 0
                for streamlet in list(stream.streamlets.values()):
                    size += streamlet.length_bytes
                    yield False
                if stream.stream_id in self._streams:
                    self._note(stream.stream_id, stream.created_by, size)
            yield True

    def _note(self, stream_id: int, principal: str, size: int) -> None:
        self._forget(stream_id)
        self._of_stream[stream_id] = principal, size
        self._creators[principal] += 1
        self._totals[principal] += size

    def _forget(self, stream_id: int) -> None:
        principal, size = self._of_stream.pop(stream_id, ("", 0))
        if not principal:
            return
        self._totals[principal] -= size
        self._creators[principal] -= 1
        if not self._creators[principal]:
            del self._creators[principal], self._totals[principal]
