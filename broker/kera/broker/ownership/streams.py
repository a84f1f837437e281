"""The streams of one broker: opens, alters and drops them, and finds the streamlets of requests."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Iterator

from kera.broker.event import Event
from kera.broker.log.entry import Entry
from kera.broker.log.intervals import Holding, holding
from kera.broker.log.streamlet import PRODUCER_LIMITS, ProducerLimits, Streamlet
from kera.broker.ownership.moved_starts import MovedStarts
from kera.broker.ownership.opener import StreamletOpener
from kera.broker.ownership.producer_fences import ProducerFences
from kera.broker.ownership.stored import Full
from kera.broker.ownership.stream import Stream
from kera.broker.ownership.stream_records import assignments_version, is_news, put_stream
from kera.broker.records import SegmentAddress
from kera.broker.replication.manager import Replication
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.restart import Restart, Unserved
from kera.core.base.done import Done, nothing
from kera.core.base.ids import EntryId, Position
from kera.core.base.turns import at_once
from kera.core.errors import InvalidArgument, KeraError, NotReplicated, Unavailable, UnknownStream
from kera.server.lineage import comes_from
from kera.v1 import common_pb2


class StreamletRemoval:
    """Removes the remains of streamlets that are not open here, on disk and in memory. Belongs to one event loop."""

    def __init__(self, memory: PersistenceManager, restart: Restart) -> None:
        self._memory = memory
        self._restart = restart
        self._waiting: dict[tuple[int, int], list[Callable[[], None]]] = {}
        """Streamlets whose records and files are being removed, each with the functions to call then."""

    def remove(self, stream_id: int, streamlet_id: int, done: Done = nothing) -> None:
        """Remove the remains of a streamlet that is not open; call `done` when the index has forgotten them."""
        self._restart.drop_leftovers(lambda *streamlet: streamlet == (stream_id, streamlet_id))
        waiting = self._waiting.setdefault((stream_id, streamlet_id), [])

        def removed(error: KeraError | None) -> None:
            self._waiting.pop((stream_id, streamlet_id), None)
            for go_on in waiting:
                go_on()
            done(error)

        self._memory.removals.drop_streamlet(stream_id, streamlet_id, removed)

    def when_removed(self, stream_id: int, streamlet_id: int, go_on: Callable[[], None]) -> None:
        """Call `go_on` when no removal of the streamlet's earlier data is under way any more."""
        waiting = self._waiting.get((stream_id, streamlet_id))
        if waiting is None:
            go_on()
        else:
            waiting.append(go_on)


class Streams:
    """All streams with streamlets on this broker (the thesis's stream manager)."""

    def __init__(
        self,
        memory: PersistenceManager,
        restart: Restart,
        replication: Replication,
        producer_limits: ProducerLimits = PRODUCER_LIMITS,
    ) -> None:
        self._memory = memory
        self._restart = restart
        self._replication = replication
        self._has_holes = restart.found.lost_memory
        """Whether to leave replicated streamlets closed that are here and not owned."""
        self.by_id: dict[int, Stream] = {}
        self.dropped = Event[[int]]()
        """Emitted when a stream was dropped here."""
        self.fences = ProducerFences()
        """The fences of all streamlets."""
        self.full = Full()
        """Principals whose streams take no more data."""
        self.moved_starts = MovedStarts(memory.removals.collect)
        self.unknown: dict[int, Unserved] = {}
        """Streams that are here but that the coordinator did not know: kept, and not served."""
        self.removal = StreamletRemoval(memory, restart)
        self._opener = StreamletOpener(memory, restart, self.fences, self.moved_starts, producer_limits)

    def withhold(self) -> None:
        """Leave replicated streamlets closed that are not owned, because an earlier launch has lost its memory."""
        self._has_holes = True

    @property
    def index(self) -> SegmentIndex:
        """The index of the data on disk."""
        return self._restart.index

    def __iter__(self) -> Iterator[Stream]:
        return iter(self.by_id.values())

    def __len__(self) -> int:
        return len(self.by_id)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self.by_id

    def get(self, stream_id: int) -> Stream:
        """Return the stream with this id. Raises `UnknownStream`."""
        try:
            return self.by_id[stream_id]
        except KeyError:
            raise not_here(stream_id) from None

    def streamlet(self, stream_id: int, streamlet_id: int) -> Streamlet:
        """Return a streamlet of this broker. Raises `UnknownStream`, `StreamletOutOfRange` or `NotOwner`."""
        return self.get(stream_id).streamlet(streamlet_id)

    def open(
        self,
        info: common_pb2.StreamInfo,
        broker_id: int,
        broker_epoch: int = 0,
        handed_over: Iterable[common_pb2.StreamletState] = (),
    ) -> None:
        """Do all of `opening` at once, as before the broker serves requests."""
        at_once(self.opening(info, broker_id, broker_epoch, handed_over))

    def opening(
        self,
        info: common_pb2.StreamInfo,
        broker_id: int,
        broker_epoch: int = 0,
        handed_over: Iterable[common_pb2.StreamletState] = (),
        *,
        created: bool = False,
    ) -> Generator[None, None, None]:
        """Open the stream's streamlets that `info` assigns to this broker; open ones continue.

        Yields between streamlets; the stream must not be dropped meanwhile, nor opened by another order. A streamlet
        that is sealed meanwhile stays sealed.

        Configuration and assignments are taken over unless newer ones are known; newer assignments to this broker end a
        seal. Streamlets that another launch of this broker than `broker_epoch` (0: unknown) owns stay as they are,
        because their recovery is under way. An owner that needs the handed over state of its predecessor, and has not
        recorded it, only gets the older intervals. `created`: no broker has had data of the stream before.

        Raises `InvalidArgument` if the configuration is incomplete.
        """
        stream = self._configured(info)
        if info.assignments_version < stream.assignments_version:
            return
        is_new = info.assignments_version > stream.assignments_version
        stream.assignments_version = info.assignments_version
        states = {state.streamlet_id: state for state in handed_over}
        unsealed = {number for number, each in stream.streamlets.items() if is_new and each.sealed}
        # The stream's known virtual segments are compared with all of its streamlets, so these are opened together.
        together = stream.replication > 0 and stream.logs is None and self._replication.coverage.knows(stream.stream_id)
        opened: list[Streamlet] = []
        for number, assignment in enumerate(info.assignments):
            if number and not together:
                yield
            held = holding(assignment, broker_id)
            if is_of_another_launch(assignment, broker_id, broker_epoch) or self._stays(
                stream, assignment, held, broker_id, unsealed
            ):
                continue
            state = states.get(assignment.streamlet_id)
            opened += self._assign(stream, info, assignment, held, state, created=created)
            if not together:
                self._replicate(stream, opened, info.config.entries)
                opened.clear()
        self._replicate(stream, opened, info.config.entries)

    @property
    def has_replicas_of_earlier_launches(self) -> bool:
        """Whether backups may have replicas of earlier launches from which other brokers recover, or have recovered."""
        return self._replication.coverage.spare_before > 0

    def release(self, stream_id: int) -> None:
        """Free a stream's replicas of earlier launches: it has no data here, and no broker recovers from them."""
        self._replication.release(stream_id)

    def _configured(self, info: common_pb2.StreamInfo) -> Stream:
        config = info.config
        if not (config.streamlets and config.entries and config.group_segments):
            raise InvalidArgument(f"stream {info.name!r} has an incomplete configuration", stream=info.name)
        stream = self.by_id.get(info.stream_id)
        self._write_down(info)
        if stream is None:
            self.unknown.pop(info.stream_id, None)
            stream = self.by_id[info.stream_id] = Stream(info)
        elif info.config_version > stream.config_version:
            domain = stream.memory_domain
            stream.alter(info)
            if stream.memory_domain != domain:
                for streamlet in stream.streamlets.values():
                    self._memory.close_older(streamlet.entries.made, 0)
            if stream.logs is not None:
                self._replication.logs.set_virtual_logs(stream.logs, stream.virtual_logs)
        return stream

    def _stays(
        self,
        stream: Stream,
        assignment: common_pb2.StreamletAssignment,
        held: Holding,
        broker_id: int,
        unsealed: Container[int],
    ) -> bool:
        """Whether a streamlet stays as it is, whatever is assigned to this broker."""
        streamlet = stream.streamlets.get(assignment.streamlet_id)
        if streamlet is not None and streamlet.sealed and assignment.streamlet_id not in unsealed:
            return True  # an order from before the seal must not undo it
        if not held.intervals and any(source.broker_id == broker_id for source in assignment.sources):
            return True  # its new owner reads this broker's replicas, which would be removed with it
        # After a loss of memory, the owner recovers the lost data, and readers must not see the hole that is here.
        return streamlet is None and not held.owned and self._has_holes and stream.replication > 0

    def check_known(self, info: common_pb2.StreamInfo) -> None:
        """Raise `Unavailable` for assignments that do not descend from those that are known here.

        They come from a coordinator whose metadata was restored from an older copy: data that it orders to drop may
        exist only here.
        """
        stream_id = info.stream_id
        stream = self.by_id.get(stream_id)
        version = assignments_version(self.index, stream_id) if stream is None else stream.assignments_version
        if info.assignments_version > version and not comes_from(info, version):
            raise Unavailable(
                f"this broker knows assignments of stream {info.name!r} that the coordinator does not: its metadata may"
                " have been restored from an older copy; see kera cluster describe",
                stream=info.name,
            )

    def _write_down(self, info: common_pb2.StreamInfo) -> None:
        """Record the stream, so that this broker knows it even if the coordinator forgets it."""
        if is_news(self._restart.index, info):
            self._memory.index_writer.note([put_stream(info)], nothing)

    def _assign(
        self,
        stream: Stream,
        info: common_pb2.StreamInfo,
        assignment: common_pb2.StreamletAssignment,
        held: Holding,
        state: common_pb2.StreamletState | None,
        *,
        created: bool,
    ) -> list[Streamlet]:
        """Open a streamlet, or change its assignment; return it in a list if it was not open before."""
        streamlet = stream.streamlets.get(assignment.streamlet_id)
        if held.inherits and not (streamlet is not None and streamlet.owned):
            held = self._opener.as_inherited(stream.stream_id, assignment, held)
        if streamlet is None:
            # A streamlet that was taken over after the handover may have groups of the last interval.
            fresh = state is not None and not assignment.sources
            if not held.intervals:
                return []
            now = state if fresh else None
            stream.assign(assignment)
            return [self._opener.open(stream, info, assignment, held, handed_over_now=now, created=created)]
        if held.intervals:
            self._opener.change(streamlet, held, state, taken_over=bool(assignment.sources))
            stream.assign(assignment)
            stream.set_epochs(streamlet)
        else:
            self._detach(stream, streamlet)
        return []

    def move_start(self, entry: Entry, position: Position, record: int, done: Done = nothing) -> None:
        """Remove the records before a position, see `MovedStarts.move`."""
        replicated = bool(self.get(entry.log_id.stream_id).replication)
        self.moved_starts.move(entry, position, record, done, replicated=replicated)

    def _replicate(self, stream: Stream, opened: list[Streamlet], entries: int) -> None:
        """Replicate the data of newly opened streamlets that no virtual segment covers."""
        if not (opened and stream.replication):
            return
        if stream.logs is None:
            stream.logs = self._replication.logs.open_stream(
                stream.stream_id,
                replication=stream.replication,
                entries=entries,
                virtual_logs=stream.virtual_logs,
                by_replicas=stream.by_replicas,
            )
            stream.logs.set_priority(stream.replication_priority)
        for streamlet in opened:
            for entry in streamlet.entries.made:
                self._replication.backlog.restore(stream.logs, entry)

    def entry(self, entry_id: EntryId) -> Entry | None:
        """Return an entry of this broker; None if its streamlet is not here."""
        stream = self.by_id.get(entry_id.stream_id)
        streamlet = stream.streamlets.get(entry_id.streamlet_id) if stream is not None else None
        return streamlet.entries[entry_id.entry] if streamlet is not None else None

    def exists(self, address: SegmentAddress) -> bool:
        """Whether the log has any data of a segment."""
        entry = self.entry(EntryId(*address[:3]))
        return entry is not None and entry.exists((address.group_id, address.segment_id))

    def _detach(self, stream: Stream, streamlet: Streamlet) -> None:
        """Forget a streamlet that is no longer assigned to this broker, and remove its data."""
        stream.remove(streamlet.streamlet_id)
        self._forget(streamlet)
        self.removal.remove(stream.stream_id, streamlet.streamlet_id)

    def _forget(self, streamlet: Streamlet) -> None:
        for entry in streamlet.entries.made:
            self.moved_starts.forget(entry)
        streamlet.drop()

    def drop(self, stream_id: int, done: Done = nothing) -> None:
        """Do all of `dropping` at once; call `done` when the index has forgotten the stream, or if it is not here."""
        at_once(self.dropping(stream_id))
        self._memory.removals.drop_stream(stream_id, done)

    def dropping(self, stream_id: int) -> Generator[None, None, None]:
        """Free the memory of a stream, which requests no longer find from the first step on; `drop` removes its files.

        Yields between streamlets; the stream must not be opened meanwhile.
        """
        stream = self.by_id.pop(stream_id, None)
        self.dropped(stream_id)
        name = str(stream_id) if stream is None else stream.name
        self._replication.drop_stream(stream_id, NotReplicated("the stream was deleted", stream=name))
        self._restart.drop_leftovers(lambda of_stream, _: of_stream == stream_id)
        self.unknown.pop(stream_id, None)
        if stream is not None:
            for streamlet in stream.streamlets.values():
                self._forget(streamlet)
                yield


def name_of(streams: Streams, stream_id: int) -> str | None:
    """Return the name of a stream; None if it is not here."""
    stream = streams.by_id.get(stream_id)
    return None if stream is None else stream.name


def not_here(stream_id: int) -> UnknownStream:
    """Return the error for a stream that is not here."""
    return UnknownStream(
        f"this broker has no stream with id {stream_id}: it was deleted, or another broker had this address before",
        stream_id=stream_id,
    )


def is_of_another_launch(assignment: common_pb2.StreamletAssignment, broker_id: int, broker_epoch: int) -> bool:
    """Whether this broker owns a streamlet, but by another launch."""
    return assignment.broker_id == broker_id and bool(broker_epoch) and assignment.broker_epoch != broker_epoch
