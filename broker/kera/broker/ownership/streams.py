"""The streams of one broker, and the finding of the streamlet that a request means."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Protocol

from kera.broker.log.entry import Entry
from kera.broker.log.intervals import Holding, holding
from kera.broker.log.retention import Rules
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.handover import HandedOver, producers_of, put_handed_over
from kera.broker.ownership.handover import handed_over as handed_over_before
from kera.broker.ownership.producer_fences import ProducerFences
from kera.broker.ownership.stream_records import assignments_version, is_news, put_stream
from kera.broker.records import SegmentAddress
from kera.broker.replication.manager import Replication, StreamLogs
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import no_producer
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.restart import Found, RestoredStreamlet, Unserved
from kera.core.done import Done, all_done, nothing
from kera.core.errors import (
    InvalidArgument,
    KeraError,
    NotOwner,
    NotReplicated,
    StreamletOutOfRange,
    Unavailable,
    UnknownStream,
)
from kera.core.ids import EntryId, Position
from kera.core.lineage import comes_from
from kera.core.turns import at_once
from kera.v1 import common_pb2


class Stream:
    """A stream, as far as this broker is concerned with it."""

    def __init__(self, info: common_pb2.StreamInfo) -> None:
        self.stream_id = info.stream_id
        self.name = info.name
        self.streamlet_count = info.config.streamlets
        self.streamlets: dict[int, Streamlet] = {}
        """Those of which this broker has anything, its own and those of which it has older groups."""
        self.logs: StreamLogs | None = None
        """Its virtual logs, if it is replicated."""
        self.assignments_version = 0
        """Of the assignments that are carried out here."""
        self.alter(info)

    def alter(self, info: common_pb2.StreamInfo) -> None:
        """Take over what can change while the stream is in use."""
        self.config_version = info.config_version
        self.schema_ids = frozenset(schema.schema_id for schema in info.schemas)
        """The versions of its schema: producers may go on with an older one."""
        self.durability = max(info.config.durability, common_pb2.DURABILITY_LEADER)
        """The level at which chunks are acknowledged, unless a request asks for another, and readable."""
        self.replication = info.config.replication
        self.virtual_logs = max(1, info.config.virtual_logs)
        self.by_replicas = self.replication > 0 and self.durability > common_pb2.DURABILITY_LEADER
        """Whether readers and writers wait for backups."""
        self.by_disk = self.replication == 0
        """Whether level persisted means the broker's own disk: there are no replicas."""
        if self.logs is not None:
            self.logs.by_replicas = self.by_replicas
        self.retention = Rules.of(info.config)
        for streamlet in self.streamlets.values():
            self._set_level(streamlet)

    def add(self, streamlet: Streamlet) -> None:
        """One more of which something is here."""
        self.streamlets[streamlet.streamlet_id] = streamlet
        self._set_level(streamlet)

    def _set_level(self, streamlet: Streamlet) -> None:
        streamlet.entries.set_by_replicas(self.by_replicas)
        if self.durability == common_pb2.DURABILITY_LEADER:
            for entry in streamlet.entries.made:
                for segment in entry.tail:
                    segment.advance_durable_head(segment.head)
                entry.wake()

    def streamlet(self, streamlet_id: int) -> Streamlet:
        """A streamlet of this broker. Raises `StreamletOutOfRange` or `NotOwner`."""
        streamlet = self.streamlets.get(streamlet_id)
        if streamlet is not None:
            return streamlet
        if streamlet_id >= self.streamlet_count:
            raise StreamletOutOfRange(
                f"stream {self.name!r} has streamlets 0 to {self.streamlet_count - 1}, not {streamlet_id}",
                stream=self.name,
                streamlet_id=streamlet_id,
                streamlets=self.streamlet_count,
            )
        raise self.not_owner(streamlet_id)

    def not_owner(self, streamlet_id: int) -> NotOwner:
        """The error for a streamlet whose chunks this broker does not take, or does not have."""
        streamlet = self.streamlets.get(streamlet_id)
        moves = streamlet is not None and streamlet.sealed
        return NotOwner(
            f"streamlet {streamlet_id} of stream {self.name!r} is "
            + ("about to move to another broker" if moves else "owned by another broker"),
            stream=self.name,
            streamlet_id=streamlet_id,
        )


class Restorer(Protocol):
    """Who knows what was there before: see ``kera.broker.storage.restart``."""

    @property
    def index(self) -> SegmentIndex:
        """Of what is on disk."""
        ...

    @property
    def found(self) -> Found:
        """What was found at the start."""
        ...

    def restore(
        self,
        stream_id: int,
        streamlet_id: int,
        entries: int,
        first_group_id: int,
        *,
        persisted: bool = False,
        fresh: bool = False,
    ) -> RestoredStreamlet:
        """The state of a streamlet, to go on from."""
        ...

    def drop_leftovers(self, is_gone: Callable[[int, int], bool]) -> None:
        """Free what is in memory of streamlets that were not restored."""
        ...


class Streams:
    """All streams with streamlets on this broker (the thesis's stream manager)."""

    def __init__(self, memory: PersistenceManager, restorer: Restorer, replication: Replication) -> None:
        self._memory = memory
        self._restorer = restorer
        self._replication = replication
        replication.coverage.exists = self._exists
        self._streams: dict[int, Stream] = {}
        self.fences = ProducerFences()
        """Of all its streamlets."""
        self.moved_starts: dict[Entry, None] = {}
        """Entries whose start has moved, until the coordinator knows."""
        self.unknown: dict[int, Unserved] = {}
        """Streams that are here and of which the coordinator did not know: kept, and not served."""
        replication.spared = self.unknown
        self._detaching: dict[tuple[int, int], list[Callable[[], None]]] = {}
        """Streamlets whose records and files are being removed, with who waits for that."""

    @property
    def index(self) -> SegmentIndex:
        """Of what is on disk."""
        return self._restorer.index

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._streams

    def get(self, stream_id: int) -> Stream:
        """The stream with this id. Raises `UnknownStream`."""
        try:
            return self._streams[stream_id]
        except KeyError:
            raise UnknownStream(
                f"this broker has no stream with id {stream_id}; it may have been deleted", stream_id=stream_id
            ) from None

    def streamlet(self, stream_id: int, streamlet_id: int) -> Streamlet:
        """A streamlet of this broker. Raises `UnknownStream`, `StreamletOutOfRange` or `NotOwner`."""
        return self.get(stream_id).streamlet(streamlet_id)

    def open(
        self,
        info: common_pb2.StreamInfo,
        broker_id: int,
        broker_epoch: int = 0,
        handed_over: Iterable[common_pb2.StreamletState] = (),
    ) -> None:
        """`opening` in one go, as before anybody is served."""
        at_once(self.opening(info, broker_id, broker_epoch, handed_over))

    def opening(
        self,
        info: common_pb2.StreamInfo,
        broker_id: int,
        broker_epoch: int = 0,
        handed_over: Iterable[common_pb2.StreamletState] = (),
    ) -> Generator[None, None, None]:
        """Have of the stream's streamlets what `info` assigns to this broker; what is open already goes on.

        Yields between streamlets; the stream must not be dropped meanwhile, nor be opened by others. A streamlet that
        is sealed meanwhile stays so.

        Configuration and assignments are taken over unless newer ones are known; newer ones that name us end a seal.
        Streamlets whose owner is another launch of this broker than `broker_epoch` (0: not known) stay as they are:
        their recovery is under way. An owner that needs what its predecessor has handed over, and has not written it
        down, only gets the older intervals. Raises `InvalidArgument` when the configuration makes no sense.
        """
        stream = self._configured(info)
        if info.assignments_version < stream.assignments_version:
            return
        is_new = info.assignments_version > stream.assignments_version
        stream.assignments_version = info.assignments_version
        states = {state.streamlet_id: state for state in handed_over}
        sealed = {streamlet_id for streamlet_id, each in stream.streamlets.items() if each.sealed}
        # What was found of a stream's replicas is compared with all of its streamlets: then they come all at once.
        at_once = stream.replication > 0 and stream.logs is None and self._replication.coverage.knows(stream.stream_id)
        restored = []
        for number, assignment in enumerate(info.assignments):
            if number and not at_once:
                yield
            streamlet = stream.streamlets.get(assignment.streamlet_id)
            if streamlet is not None and streamlet.sealed and not (is_new and assignment.streamlet_id in sealed):
                continue  # an order from before the seal must not undo it
            held, state = holding(assignment, broker_id), states.get(assignment.streamlet_id)
            if is_of_another_launch(assignment, broker_id, broker_epoch) or self._stays(
                stream, assignment, held, broker_id
            ):
                continue
            opened = self._assign(stream, info, assignment, held, state)
            if opened is not None and at_once:
                restored.append(opened)
            elif opened is not None and stream.replication:
                self._restore_replicas(stream, [opened], info.config.entries)
        if restored:
            self._restore_replicas(stream, restored, info.config.entries)

    def _configured(self, info: common_pb2.StreamInfo) -> Stream:
        config = info.config
        if not (config.streamlets and config.entries and config.group_segments):
            raise InvalidArgument(f"stream {info.name!r} has an incomplete configuration", stream=info.name)
        stream = self._streams.get(info.stream_id)
        self._write_down(info)
        if stream is None:
            self.unknown.pop(info.stream_id, None)
            stream = self._streams[info.stream_id] = Stream(info)
        elif info.config_version > stream.config_version:
            stream.alter(info)
            if stream.logs is not None:
                self._replication.set_virtual_logs(stream.logs, stream.virtual_logs)
        return stream

    def _stays(self, stream: Stream, assignment: common_pb2.StreamletAssignment, held: Holding, broker_id: int) -> bool:
        """Whether a streamlet is to stay as it is here, as it is being recovered by others."""
        if not held.intervals and any(source.broker_id == broker_id for source in assignment.sources):
            return True  # its new owner reads our replicas, and they would go with it
        # Else what we had of it is recovered by its owner; what is here has a hole that nobody may see.
        return assignment.streamlet_id not in stream.streamlets and not held.owned and self._has_lost(stream)

    def check_known(self, info: common_pb2.StreamInfo) -> None:
        """Raise `Unavailable` for assignments made by somebody who does not know those that are known here.

        That is a coordinator whose metadata were restored from an older copy: what it would have dropped here may be
        nowhere else.
        """
        stream_id = info.stream_id
        stream = self._streams.get(stream_id)
        version = assignments_version(self.index, stream_id) if stream is None else stream.assignments_version
        if info.assignments_version > version and not comes_from(info, version):
            raise Unavailable(
                f"this broker knows assignments of stream {info.name!r} that the coordinator does not: its metadata may"
                " have been restored from an older copy; see kera cluster describe",
                stream=info.name,
            )

    def _write_down(self, info: common_pb2.StreamInfo) -> None:
        """So that it is still known what the stream is, should the coordinator come to know it no more."""
        if is_news(self._restorer.index, info):
            self._memory.note([put_stream(info)], nothing)

    def _has_lost(self, stream: Stream) -> bool:
        """Whether what earlier launches had in memory is gone, and backups have it."""
        return self._restorer.found.lost_memory and stream.replication > 0

    def _assign(
        self,
        stream: Stream,
        info: common_pb2.StreamInfo,
        assignment: common_pb2.StreamletAssignment,
        held: Holding,
        state: common_pb2.StreamletState | None,
    ) -> Streamlet | None:
        """Have a streamlet as it is assigned; returns it if it was not open before."""
        streamlet = stream.streamlets.get(assignment.streamlet_id)
        if held.inherits and not (streamlet is not None and streamlet.owned):
            held = self._as_inherited(stream.stream_id, assignment, held)
        if streamlet is not None:
            self._alter(streamlet, held, state, taken_over=bool(assignment.sources))
            return None
        if not held.intervals:
            return None
        restored = self._restore(stream, info, assignment, held, fresh=state is not None)
        stream.add(restored)
        return restored

    def _alter(
        self,
        streamlet: Streamlet,
        held: Holding,
        state: common_pb2.StreamletState | None,
        *,
        taken_over: bool,
    ) -> None:
        """An open streamlet is held in another way from now on, or in the same.

        `state`: what was handed over; `taken_over`: its last owner was lost, and the index knows what that had.
        """
        if not held.intervals:
            self.detach(streamlet.stream_id, [streamlet.streamlet_id])
            return
        if state is not None and not streamlet.owned:
            streamlet.learn(producers_of(state))
        if taken_over and held.owned and not streamlet.owned:
            index, ref = self._restorer.index, (streamlet.stream_id, streamlet.streamlet_id)
            origin = index.origin(*ref)
            streamlet.learn(index.producers(*ref))
            streamlet.next_group_id = max(streamlet.next_group_id, origin.next_group_id if origin is not None else 0)
        streamlet.hold(held)

    def _as_inherited(self, stream_id: int, assignment: common_pb2.StreamletAssignment, held: Holding) -> Holding:
        """`held`, or only the older intervals when what the last one goes on from is not here.

        It was handed over, or is taken over from backups. An index that was made anew does not know; then producers
        begin new epochs, as for all else that it forgot.
        """
        last = held.intervals[-1]
        before = handed_over_before(self._restorer.index, stream_id, assignment.streamlet_id)
        if before.first_group_id >= last.first_group_id:
            return held
        if assignment.sources or self._restorer.found.repaired:
            change = put_handed_over(stream_id, assignment.streamlet_id, last.first_group_id, last.first_records)
            self._memory.note([change], nothing)
            return held
        return Holding(held.intervals[:-1], owned=False, broker_epoch=held.broker_epoch)

    def move_start(self, entry: Entry, position: Position, record: int) -> None:
        """What is before a position goes: the caller has it removed."""
        entry.start, entry.start_record = position, record
        self.moved_starts[entry] = None

    def _restore_replicas(self, stream: Stream, restored: list[Streamlet], entries: int) -> None:
        """Have covered what the streamlets have and no virtual segment does."""
        if stream.logs is None:
            stream.logs = self._replication.open_stream(
                stream.stream_id,
                replication=stream.replication,
                entries=entries,
                virtual_logs=stream.virtual_logs,
                by_replicas=stream.by_replicas,
            )
        for streamlet in restored:
            for entry in streamlet.entries.made:
                self._replication.restore(stream.logs, entry)

    def entry(self, entry_id: EntryId) -> Entry | None:
        """An entry of a streamlet of this broker."""
        stream = self._streams.get(entry_id.stream_id)
        streamlet = stream.streamlets.get(entry_id.streamlet_id) if stream is not None else None
        return streamlet.entries[entry_id.entry] if streamlet is not None else None

    def _exists(self, address: SegmentAddress) -> bool:
        entry = self.entry(EntryId(*address[:3]))
        return entry is not None and entry.exists((address.group_id, address.segment_id))

    def _restore(
        self,
        stream: Stream,
        info: common_pb2.StreamInfo,
        assignment: common_pb2.StreamletAssignment,
        held: Holding,
        *,
        fresh: bool,
    ) -> Streamlet:
        """`fresh`: the streamlet was handed over just now, so none of the last interval's groups was ever given."""
        last = held.intervals[-1]
        first_group_id = max(assignment.first_group_id if held.owned else 0, last.first_group_id, 1)
        restored = self._restorer.restore(
            stream.stream_id,
            assignment.streamlet_id,
            info.config.entries,
            last.end_group_id if last.closed else first_group_id,
            persisted=stream.by_disk and stream.durability == common_pb2.DURABILITY_PERSISTED,
            fresh=fresh,
        )
        before = HandedOver()
        if held.owned:
            before = handed_over_before(self._restorer.index, stream.stream_id, assignment.streamlet_id)
        for index, record in enumerate(before.first_records[: info.config.entries]):
            entry = restored.entries[index]
            entry.next_record = max(entry.next_record, record)
        streamlet = Streamlet(
            stream.stream_id,
            assignment.streamlet_id,
            entries=restored.entries,
            group_segments=info.config.group_segments,
            next_group_id=before.first_group_id if fresh else max(restored.next_group_id, before.first_group_id),
            producers=restored.producers,
            memory=self._memory,
            held=held,
        )
        streamlet.first_epochs = self.fences.first_epochs
        forgotten = streamlet.forget_producers()
        if forgotten:
            ref = (stream.stream_id, assignment.streamlet_id)
            self._memory.note([no_producer(*ref, producer_id) for producer_id in forgotten], nothing)
        for entry in restored.moved:
            self._memory.collect(entry)
        for entry in streamlet.entries.made:
            if entry.start_record > held.intervals[0].first_record(entry.index):
                self.moved_starts[entry] = None  # it may have moved when nobody was told
        for segment in restored.segments:
            self._memory.adopt(segment)
            if stream.by_disk and stream.durability > common_pb2.DURABILITY_LEADER:
                self._memory.persist([(segment, segment.head)], nothing)
        return streamlet

    def detach(self, stream_id: int, streamlet_ids: Iterable[int], done: Done = nothing) -> None:
        """Forget streamlets of which nothing is here any more, in memory at once; `done` when their files are gone."""
        stream = self._streams.get(stream_id)
        present = [each for each in streamlet_ids if stream is not None and each in stream.streamlets]
        outcome = all_done(len(present), done)
        for streamlet_id in present:
            assert stream is not None  # noqa: S101 - for the type checker
            streamlet = stream.streamlets.pop(streamlet_id)
            self._forget(streamlet)
            self.drop_remains(stream_id, streamlet_id, outcome)

    def drop_remains(self, stream_id: int, streamlet_id: int, done: Done = nothing) -> None:
        """Remove what is on disk, or left in memory, of a streamlet that is not open."""
        self._restorer.drop_leftovers(lambda *streamlet: streamlet == (stream_id, streamlet_id))
        waiting = self._detaching.setdefault((stream_id, streamlet_id), [])

        def removed(error: KeraError | None) -> None:
            self._detaching.pop((stream_id, streamlet_id), None)
            for go_on in waiting:
                go_on()
            done(error)

        self._memory.drop_streamlet(stream_id, streamlet_id, removed)

    def when_detached(self, stream_id: int, streamlet_id: int, go_on: Callable[[], None]) -> None:
        """Call `go_on` when nothing of an earlier time of the streamlet is being removed any more."""
        waiting = self._detaching.get((stream_id, streamlet_id))
        if waiting is None:
            go_on()
        else:
            waiting.append(go_on)

    def _forget(self, streamlet: Streamlet) -> None:
        for entry in streamlet.entries.made:
            self.moved_starts.pop(entry, None)
        streamlet.drop()

    def drop(self, stream_id: int, done: Done = nothing) -> None:
        """`dropping` in one go; `done` when its files are gone, or if it is not here."""
        at_once(self.dropping(stream_id))
        self._memory.drop_stream(stream_id, done)

    def dropping(self, stream_id: int) -> Generator[None, None, None]:
        """Free what is in memory of a stream. Nobody finds it from the first step on; its files are removed by `drop`.

        Yields between streamlets; the stream must not be opened meanwhile.
        """
        stream = self._streams.pop(stream_id, None)
        name = str(stream_id) if stream is None else stream.name
        self._replication.drop_stream(stream_id, NotReplicated("the stream was deleted", stream=name))
        self._restorer.drop_leftovers(lambda of_stream, _: of_stream == stream_id)
        self.unknown.pop(stream_id, None)
        if stream is not None:
            for streamlet in stream.streamlets.values():
                self._forget(streamlet)
                yield


def is_of_another_launch(assignment: common_pb2.StreamletAssignment, broker_id: int, broker_epoch: int) -> bool:
    """Whether a streamlet is owned by this broker, but not by this launch of it."""
    return assignment.broker_id == broker_id and bool(broker_epoch) and assignment.broker_epoch != broker_epoch
