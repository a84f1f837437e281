"""Rights to write to streams and to use producer ids: checked once, and remembered until the rules change.

The native core looks up the stream of a chunk in a dictionary. Without security, that dictionary holds all streams;
with it, each identity has its own dictionary with the streams that it may write to, so access checks cost a request
nothing. Likewise, each identity has, by stream, the producer ids that it may use: one lookup for each run of chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from kera.broker.ownership.producer_owners import ProducerOwners
from kera.broker.ownership.stream import Stream
from kera.broker.ownership.streams import Streams
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.errors import NotAllowed, Unavailable
from kera.core.rpc.method import Peer
from kera.server.access.guard import Guard
from kera.server.access.requirements import Need

IDENTITIES_MAX = 4096
PRODUCERS_MAX = 100_000
"""Maximum number of producer ids that are remembered for an identity in a stream."""


class AppendRules(NamedTuple):
    """Rules for chunks that the native core may append without Python. C reads the fields in order (``append.c``)."""

    streams: dict[int, Stream]
    """The streams that the caller may write to, by id."""
    gate: Callable[..., Any]
    """Called once for a run of chunks of a replicated stream; returns its virtual log and the room there, or None."""
    replicate: Callable[..., None]
    """Called with each run of chunks that was appended to a segment of a replicated stream."""
    record_type: type
    """The type of a producer's record."""
    run_bytes_max: int
    check_payloads: bool
    producers: dict[int, set[int]] | None = None
    """The ids of producers that the caller may use, by stream; None: all of them."""


class WriteAccess:
    """Remembers, for each identity, the streams and producer ids it may write to, until the rules change.

    Belongs to an event loop.
    """

    def __init__(self, guard: Guard, streams: Streams, owners: ProducerOwners) -> None:
        """`owners`: the owners of producer ids."""
        self._guard = guard
        self._streams = streams
        self._owners = owners
        self._writable: dict[Identity, dict[int, Stream]] = {}
        self._producers: dict[Identity, dict[int, set[int]]] = {}
        """The producer ids that an identity may use, by stream."""
        self._asked = owners.asks
        """Whether a coordinator was asked for the owners of these ids."""
        guard.known.forgotten += [self._writable.clear, self._producers.clear]
        streams.full.changed.listen(self._writable.clear)
        streams.dropped.listen(self._forget)

    def streams_of(self, peer: Peer) -> dict[int, Stream]:
        """Return the streams that a peer is known to be allowed to write to; `check` may add others later."""
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

    def rules_for(self, peer: Peer, rules: AppendRules) -> AppendRules:
        """Return `rules`, restricted to the streams and producer ids that a peer is known to be allowed to use."""
        return AppendRules(self.streams_of(peer), *rules[1:-1], self.producers_of(peer))  # quicker than _replace

    def check(self, peer: Peer, stream: Stream) -> None:
        """Check that a peer may write to a stream.

        Raises `NotAllowed`, `UnknownStream` if the peer may not know that the stream exists, and `QuotaExceeded`.
        """
        known = self.streams_of(peer)
        if stream.stream_id not in known:
            self._guard.check(peer, Need(Operation.WRITE, stream.stream_id))
            self._streams.full.check(stream)
            known[stream.stream_id] = stream

    def producers_of(self, peer: Peer) -> dict[int, set[int]] | None:
        """Return, by stream, the producer ids that a peer is known to be allowed to use; None: it may use all."""
        who = peer.identity
        if who is None:
            return {}
        if who.is_daemon or who.is_super:
            return None
        if self._asked != self._owners.asks:
            self._asked = self._owners.asks
            self._producers.clear()
        known = self._producers.get(who)
        if known is None:
            if len(self._producers) >= IDENTITIES_MAX:
                self._producers.clear()
            known = self._producers[who] = {}
        return known

    def check_producer(self, peer: Peer, stream: Stream, producer_id: int) -> None:
        """Check that a peer may use a producer id.

        Raises `NotAllowed` if the id belongs to another principal, and `Unavailable` until its owner is known.
        """
        known = self.producers_of(peer)
        if known is None:
            return
        mine = known.setdefault(stream.stream_id, set())
        if producer_id in mine:
            return
        principal = peer.identity.principal if peer.identity is not None else ""
        owner = self._owners.owner(producer_id, stream.stream_id, principal)
        if owner is None:
            raise Unavailable(
                f"this broker is asking the coordinator whose producer id {producer_id} is; send again",
                producer_id=producer_id,
            )
        if owner.name:
            self._guard.check(peer, Need(Operation.USE, f"producer:{owner.name}"))
        elif not owner.anybody and owner.principal != principal:
            self._refuse(peer, stream, producer_id, principal)
        if len(mine) >= PRODUCERS_MAX:
            mine.clear()
        mine.add(producer_id)

    def _refuse(self, peer: Peer, stream: Stream, producer_id: int, principal: str) -> NoReturn:
        resource = f"stream:{stream.name}"
        reason = f"producer id {producer_id} belongs to another principal, or to none"
        self._guard.audit.denied_to(principal, peer.address, Operation.WRITE.word, resource, reason)
        raise NotAllowed(
            f"{principal} may not write to {resource} under producer id {producer_id}: another principal owns it, or"
            " no principal does. Write under an id of your own (InitProducer); if a job changed its user, run it as"
            " the former user, or give it another name or checkpoint",
            principal=principal,
            operation=Operation.WRITE.word,
            resource=resource,
            producer_id=producer_id,
        )

    def _forget(self, stream_id: int) -> None:
        self._owners.forget(stream_id)
        for streams in self._writable.values():
            streams.pop(stream_id, None)
        for producers in self._producers.values():
            producers.pop(stream_id, None)
