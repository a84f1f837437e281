"""Who may write to which streams: found out once, and remembered until users or rules change.

What the native core appends goes to streams that it finds in a dictionary. Without security that has all there are;
with it, each identity has one of its own, with those that it may write to. So what may be written costs a request
nothing.
"""

from __future__ import annotations

from typing import Any

from kera.broker.ownership.stream import Stream
from kera.broker.ownership.streams import Streams
from kera.core.access.guard import Guard
from kera.core.access.identity import Identity
from kera.core.access.requirements import Need
from kera.core.access.rights import Operation
from kera.core.rpc.method import Peer

Door = tuple[Any, ...]
"""Of the native core: the first thing in it are the streams."""
IDENTITIES_MAX = 4096


class WriteAccess:
    """See the head of this module. Belongs to an event loop."""

    def __init__(self, guard: Guard, streams: Streams) -> None:
        self._guard = guard
        self._streams = streams
        self._writable: dict[Identity, dict[int, Stream]] = {}
        guard.known.forgotten.append(self._writable.clear)
        streams.full.changed.listen(self._writable.clear)
        streams.dropped.listen(self._forget)

    def streams_of(self, peer: Peer) -> dict[int, Stream]:
        """Those that a peer is known to be allowed to write to, and perhaps others later."""
        who = peer.identity
        if who is None:
            return {}
        if who.is_daemon:
            return self._streams.by_id
        known = self._writable.get(who)
        if known is None:
            if len(self._writable) >= IDENTITIES_MAX:
                self._writable.clear()
            known = self._writable[who] = {}
        return known

    def check(self, peer: Peer, stream: Stream) -> None:
        """Raises `NotAllowed`, `UnknownStream` if the peer may not even know that it is there, and `QuotaExceeded`."""
        known = self.streams_of(peer)
        if stream.stream_id not in known:
            self._guard.check(peer, Need(Operation.WRITE, stream.stream_id))
            self._streams.full.check(stream)
            known[stream.stream_id] = stream

    def _forget(self, stream_id: int) -> None:
        for known in self._writable.values():
            known.pop(stream_id, None)
