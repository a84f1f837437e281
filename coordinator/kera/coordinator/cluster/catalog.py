"""The streams: names, ids, and who owns which streamlet. No I/O, no waiting.

Invariants:

1. A stream id is given once. A stream that is deleted and created again under its name has a new id.
2. A name belongs to at most one stream, including streams whose creation is under way.
3. Only the brokers that have to open a stream see it while its creation is under way.
4. For the current launch of each broker: an assignment of one of its streamlets has that launch's epoch, and a
   `first_group_id` above the ids of all groups of earlier launches. An assignment with an earlier epoch waits for a
   recovery, see ``recovery``.
5. `assignments_version` of a stream grows with every change of its assignments, and is never given twice: see
   ``kera.server.lineage``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Generator, Iterable, Iterator

from kera.coordinator.cluster.intervals import FIRST_GROUP_ID
from kera.coordinator.cluster.intervals import broker_ids_of as broker_ids_of_assignment
from kera.coordinator.cluster.stream_brokers import StreamBrokers
from kera.core.errors import InvalidArgument, StreamExists, Unavailable, UnknownStream, invariant
from kera.server.lineage import new_version
from kera.v1 import common_pb2

__all__ = ["FIRST_GROUP_ID", "GROUPS_PER_LAUNCH", "Catalog", "broker_ids_of", "first_group_id_of", "with_assignments"]

GROUPS_PER_LAUNCH = 1 << 24
"""Minimum growth of a streamlet's `first_group_id` when its broker starts anew; see `first_group_id_of`.

A broker keeps its data over a restart: it attaches to its memory again, or reads its disk, and continues its own group
ids. `first_group_id` only says where ids start if the broker finds nothing of the streamlet. Then the jump marks the
loss: every position of an earlier launch is below it, so a reader with an old cursor learns that its data is gone
(``DataLost``, with the exact gap), and a position of lost data never names other data. The launches of a broker would
have to write 128 TiB each to one streamlet to reach it (with a group of one segment of 8 MiB).
"""

CATALOG_BYTES_MAX = 16 << 20
"""Maximum size of all streams' descriptions together, checked when one is added or altered.

RegisterBroker answers with them in one message of at most 32 MiB; the rest is for assignments, which grow with epochs
and group ids.
"""


MEMORY_DOMAINS_MAX = 64
"""Maximum number of memory domains in the cluster: a broker has a file in shared memory for each."""


class Catalog:
    """The streams of the cluster."""

    def __init__(self, *, bytes_max: int = CATALOG_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._streams: dict[int, common_pb2.StreamInfo] = {}
        self._ids: dict[str, int] = {}
        self._names: list[str] = []
        """The names of all streams, sorted."""
        self._creating: dict[str, common_pb2.StreamInfo] = {}
        # Sums over all streams, kept up to date: with many streams it would take long to add them up for each request.
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._brokers: dict[int, StreamBrokers] = {}
        self._streamlets: Counter[int] = Counter()
        self.created: Counter[str] = Counter()
        """The number of streams that each principal has created, including creations under way."""
        self._bytes_by: Counter[str] = Counter()
        """Bytes of the descriptions of these streams, by principal."""
        self._domain_of: dict[int, tuple[str, str]] = {}
        """For each stream, its creator and its memory domain."""
        self._domains: Counter[tuple[str, str]] = Counter()
        """The number of streams by creator and memory domain."""
        self._waited_for: Counter[str] = Counter()
        """The number of streams whose retention waits for a consumer group, by group."""
        self._of_broker: defaultdict[int, set[int]] = defaultdict(set)

    def add(self, stream: common_pb2.StreamInfo) -> None:
        """Add or replace a stream that is stored: an existing, a newly created or a changed one."""
        invariant(self._ids.get(stream.name, stream.stream_id) == stream.stream_id, "a name belongs to one stream")
        self._creating.pop(stream.name, None)
        known, brokers = self._streams.get(stream.stream_id), self._brokers.get(stream.stream_id)
        self._discount(stream)
        if brokers is None:
            brokers = StreamBrokers.of(stream.assignments)
        elif known is not None:
            for broker_id in +brokers.concerned:
                self._of_broker[broker_id].discard(stream.stream_id)
            brokers = brokers.changed(known, stream)
        self._count(stream, brokers)
        self._waited_for.subtract(known.config.retention_consumer_groups if known is not None else ())
        self._waited_for.update(stream.config.retention_consumer_groups)
        for broker_id in +brokers.concerned:
            self._of_broker[broker_id].add(stream.stream_id)
        self._streams[stream.stream_id] = stream
        if stream.name not in self._ids:
            insort(self._names, stream.name)
        self._ids[stream.name] = stream.stream_id

    def remove(self, stream: common_pb2.StreamInfo) -> None:
        """Forget a stream that is no longer stored."""
        known = self._streams.pop(stream.stream_id)
        self._waited_for.subtract(known.config.retention_consumer_groups)
        for broker_id in +self._brokers[stream.stream_id].concerned:
            self._of_broker[broker_id].discard(stream.stream_id)
        self._discount(stream)
        del self._ids[stream.name]
        del self._names[bisect_left(self._names, stream.name)]

    def check_free(self, name: str) -> None:
        """Check that a stream can be created under this name. Raises `StreamExists` or `Unavailable`."""
        if name in self._ids:
            raise StreamExists(f"stream {name!r} exists already", stream=name, stream_id=self._ids[name])
        if name in self._creating:
            raise Unavailable(f"stream {name!r} is being created by another request; ask again", stream=name)

    def check_room(self, stream: common_pb2.StreamInfo) -> None:
        """Check that there is room for the description of a new stream, or a new description of an existing one.

        Raises `InvalidArgument`.
        """
        if not self.fits(stream, self._bytes_max):
            raise InvalidArgument(
                f"the descriptions of all streams would take more than {self._bytes_max} bytes;"
                " delete streams, or create some with fewer streamlets",
                limit_bytes=self._bytes_max,
            )
        _check_domain(stream.config.memory_domain, self.memory_domains())

    def memory_domains(self, by: str | None = None) -> set[str]:
        """Return the memory domains of all streams, or of the streams that a principal has created."""
        return {domain for principal, domain in +self._domains if by in {None, principal}}

    @property
    def bytes_max(self) -> int:
        """Maximum size of all descriptions together when a stream is added or altered."""
        return self._bytes_max

    def bytes_created(self, stream: common_pb2.StreamInfo) -> int:
        """Return the size of the descriptions of all streams of this stream's creator, with `stream` replacing its
        current one.
        """
        return self._bytes_by[stream.created_by] - self._sizes.get(stream.stream_id, 0) + stream.ByteSize()

    def fits(self, stream: common_pb2.StreamInfo, bytes_max: int) -> bool:
        """Whether all descriptions take at most `bytes_max`, with `stream` replacing its current description."""
        return self._bytes - self._sizes.get(stream.stream_id, 0) + stream.ByteSize() <= bytes_max

    def reserve(self, stream: common_pb2.StreamInfo, owners: Counter[int]) -> None:
        """Hold the name and the room of a stream whose creation is under way, until `add` or `release`.

        `owners`: how many streamlets each broker will own.
        """
        self._creating[stream.name] = stream
        self._count(stream, StreamBrokers.of_new(owners))

    def release(self, stream: common_pb2.StreamInfo) -> None:
        """Free the name and the room of a stream that could not be created."""
        if self._creating.pop(stream.name, None) is not None:
            self._discount(stream)

    def named(self, name: str) -> common_pb2.StreamInfo:
        """Return the stream of this name. Raises `UnknownStream`."""
        if name not in self._ids:
            raise UnknownStream(f"there is no stream {name!r}", stream=name)
        return self._streams[self._ids[name]]

    def with_id(self, stream_id: int) -> common_pb2.StreamInfo:
        """Return the stream with this id. Raises `UnknownStream`."""
        if stream_id not in self._streams:
            raise UnknownStream(f"there is no stream with id {stream_id}", stream_id=stream_id)
        return self._streams[stream_id]

    def find(self, stream_id: int) -> common_pb2.StreamInfo | None:
        """Return the stream with this id, or None."""
        return self._streams.get(stream_id)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._streams

    def streams(self) -> list[common_pb2.StreamInfo]:
        """Return all streams, by name."""
        return [self._streams[self._ids[name]] for name in self._names]

    def page(self, after: str, bytes_max: int) -> tuple[list[common_pb2.StreamInfo], bool]:
        """Return the streams that follow the name `after`, by name, and whether more follow.

        The descriptions take at most `bytes_max` together, except that one stream is always returned.
        """
        found: list[common_pb2.StreamInfo] = []
        left_bytes = bytes_max
        for number in range(bisect_right(self._names, after), len(self._names)):
            stream_id = self._ids[self._names[number]]
            left_bytes -= self._sizes[stream_id]
            if found and left_bytes < 0:
                return found, True
            found.append(self._streams[stream_id])
        return found, False

    def __len__(self) -> int:
        return len(self._streams)

    def holders(self, stream: common_pb2.StreamInfo) -> list[int]:
        """Return the same as `broker_ids_of` without a pass over the assignments.

        `stream` is known, or its creation is under way.
        """
        return sorted(+self._brokers[stream.stream_id].holders)

    def owned_count(self, broker_id: int) -> int:
        """Return how many streamlets a broker owns, without those of streams whose creation is under way."""
        creating = sum(self._brokers[stream.stream_id].owners[broker_id] for stream in self._creating.values())
        return self._streamlets[broker_id] - creating

    def is_owner(self, broker_id: int, stream_id: int) -> bool:
        """Whether a broker owns any streamlet of a stream."""
        brokers = self._brokers.get(stream_id)
        return brokers is not None and brokers.owners[broker_id] > 0

    def consumer_groups_waited_for(self) -> set[str]:
        """Return the consumer groups that streams' settings name, so that they are not forgotten."""
        return set(+self._waited_for)

    def streamlet_counts(self) -> Counter[int]:
        """Return how many streamlets each broker owns; 0 for brokers without any."""
        return +self._streamlets

    def created_by(self, name: str, creation_id: str) -> common_pb2.StreamInfo | None:
        """Return the stream of this name, if the request with this `creation_id` created it."""
        stream = self._streams.get(self._ids.get(name, 0))
        return stream if stream is not None and creation_id and stream.creation_id == creation_id else None

    def creating(self, broker_id: int, broker_epoch: int) -> list[common_pb2.StreamInfo]:
        """Return the streams whose creation is under way with streamlets at this launch of a broker."""
        return [
            stream
            for stream in self._creating.values()
            if broker_id in self._brokers[stream.stream_id].owners
            and any(owner.broker_id == broker_id and owner.broker_epoch == broker_epoch for owner in stream.assignments)
        ]

    def concerning(self, broker_id: int) -> list[common_pb2.StreamInfo]:
        """Return the streams whose assignments name a broker, in whatever role, by id."""
        return [self._streams[stream_id] for stream_id in sorted(self._of_broker[broker_id])]

    def _count(self, stream: common_pb2.StreamInfo, brokers: StreamBrokers) -> None:
        self._sizes[stream.stream_id] = stream.ByteSize()
        self._bytes += self._sizes[stream.stream_id]
        self._brokers[stream.stream_id] = brokers
        self._streamlets.update(brokers.owners)
        self.created[stream.created_by] += 1
        self._bytes_by[stream.created_by] += self._sizes[stream.stream_id]
        place = self._domain_of[stream.stream_id] = stream.created_by, stream.config.memory_domain
        self._domains[place] += 1

    def _discount(self, stream: common_pb2.StreamInfo) -> None:
        size = self._sizes.pop(stream.stream_id, None)
        if size is not None:
            self._bytes -= size
            self._streamlets.subtract(self._brokers.pop(stream.stream_id).owners)
            self.created[stream.created_by] -= 1
            self._bytes_by[stream.created_by] -= size
            self._domains[self._domain_of.pop(stream.stream_id)] -= 1


def broker_ids_of(stream: common_pb2.StreamInfo) -> list[int]:
    """Return the brokers that have streamlets of `stream`, or older groups of some."""
    return sorted({broker_id for one in stream.assignments for broker_id in broker_ids_of_assignment(one)})


def owned_streamlets(
    catalog: Catalog, broker_id: int
) -> Iterator[tuple[common_pb2.StreamInfo, common_pb2.StreamletAssignment]]:
    """Yield the streamlets that a broker owns. A slow iteration sees each stream as it was at the beginning."""
    for stream in catalog.concerning(broker_id):
        if catalog.is_owner(broker_id, stream.stream_id):
            yield from ((stream, one) for one in stream.assignments if one.broker_id == broker_id)


def relaunched(
    catalog: Catalog,
    broker_id: int,
    broker_epoch: int,
    stays: Callable[[common_pb2.StreamInfo, common_pb2.StreamletAssignment], bool] = lambda *_: False,
    *,
    coordinator_epoch: int,
    but: Container[int] = (),
) -> Generator[None, None, list[common_pb2.StreamInfo]]:
    """Return new versions of the streams with streamlets of this broker, for its launch with this epoch. Nothing
    changes.

    Yields between streamlets; the caller must let nothing else change meanwhile.

    An assignment for which `stays` returns true keeps its epoch. The streams in `but` stay as they are. So does a
    stream whose creation is under way: its epoch is now outdated, and its creation fails on that.
    """
    changed = []
    for stream in catalog.concerning(broker_id):
        if stream.stream_id in but or not catalog.is_owner(broker_id, stream.stream_id):
            continue
        version: common_pb2.StreamInfo | None = None
        for streamlet_id, owner in enumerate(stream.assignments):
            yield
            if owner.broker_id != broker_id or stays(stream, owner):
                continue
            version = version or with_assignments(stream, [], coordinator_epoch)
            version.assignments[streamlet_id].first_group_id = first_group_id_of(owner, broker_epoch)
            version.assignments[streamlet_id].broker_epoch = broker_epoch
        if version is not None:
            changed.append(version)
    return changed


def first_group_id_of(owner: common_pb2.StreamletAssignment, broker_epoch: int) -> int:
    """Return where the group ids of a new launch begin if it finds nothing of the streamlet.

    The result is above the ids of the launch before. As epochs are never given twice, it is also above the ids of
    launches that a restore of older metadata has removed from the metadata.
    """
    return max(owner.first_group_id + GROUPS_PER_LAUNCH, broker_epoch * GROUPS_PER_LAUNCH)


def with_assignments(
    stream: common_pb2.StreamInfo, assignments: Iterable[common_pb2.StreamletAssignment], coordinator_epoch: int
) -> common_pb2.StreamInfo:
    """Return the next version of `stream`, with `assignments` replacing its assignments of the same streamlets."""
    version = common_pb2.StreamInfo()
    version.CopyFrom(stream)
    new_version(version, coordinator_epoch)
    for assignment in assignments:
        version.assignments[assignment.streamlet_id].CopyFrom(assignment)
    return version


def _check_domain(domain: str, domains: Collection[str]) -> None:
    """Check that there is room for a stream of this memory domain. Raises `InvalidArgument`."""
    if domain not in domains and len(domains) >= MEMORY_DOMAINS_MAX:
        raise InvalidArgument(
            f"there are streams of {len(domains)} memory domains, and no room for {domain!r}: put the stream into one"
            " of those, or delete all streams of one",
            memory_domain=domain,
            limit=MEMORY_DOMAINS_MAX,
        )
