"""A broker in this process: it listens on real sockets, and a test controls its behaviour."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from kera.client.testing.reads import Reads
from kera.client.testing.requests import Requests
from kera.client.testing.streams import Attempt, Changes, FakeStream
from kera.client.types import fill_cursor, position_of
from kera.core.base.address import split_address
from kera.core.base.ids import EntryId
from kera.core.errors import InvalidArgument, KeraError
from kera.core.format.chunk import iterate_chunks
from kera.core.rpc import Call, Reply, api
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2

HOST = "127.0.0.1"


class FakeBroker:
    """A broker of a `FakeCluster`; the streams define which streamlets it has."""

    def __init__(
        self, broker_id: int, streams: dict[int, FakeStream], changes: Changes, *, segment_bytes: int, grpc: bool
    ) -> None:
        self.broker_id = broker_id
        self.info = common_pb2.BrokerInfo(broker_id=broker_id, broker_epoch=10 + broker_id, segment_bytes=segment_bytes)
        """The coordinator's description of this broker."""
        self.requests = Requests(api.BROKER_METHODS)
        """The requests to this broker."""
        self._changes = changes
        self._reads = Reads(broker_id, streams)
        self._grpc = grpc
        self._servers: list[FrameServer | GrpcServer] = []
        self._held: list[socket.socket] = []
        """Its ports from before a crash, held so that no other process can answer there."""
        self._reading = 0

    # -- control by a test -------------------------------------------------------------------------------------

    def refuse(self, *errors: KeraError) -> None:
        """Answer the next requests with these errors, one each."""
        self.requests.refuse(*errors)

    def refuse_all(self, error: KeraError | None) -> None:
        """Answer every request with `error`; None: handle requests again."""
        self.requests.refuse_all(error)

    def slow_down(self, delay_s: float) -> None:
        """Handle each request only after `delay_s`; 0: at once."""
        self.requests.slow_down(delay_s)

    def pause(self, *methods: str) -> None:
        """Make requests wait for `resume`; with `methods`, only these, such as ``MultiWriteChunks``."""
        self.requests.pause(*methods)

    def resume(self) -> None:
        """Handle the waiting requests, in order, and all new ones."""
        self.requests.resume()

    async def crash(self) -> None:
        """Break all connections and accept no others. Stored data are available again after `restart`."""
        self.info.alive = False
        servers, self._servers = self._servers, []
        if not servers:
            return
        await asyncio.gather(*(server.close(grace_s=0) for server in servers))
        for address in {self.info.frames_address, self.info.grpc_address}:
            with contextlib.suppress(OSError):  # another process has taken the port
                self._held.append(_held(address))

    async def restart(self) -> None:
        """Listen again, on another port, as a new launch. Raises `InvalidArgument` if it still runs."""
        if self.running:
            raise InvalidArgument(f"broker {self.broker_id} still runs: crash it first")
        self.info.broker_epoch += 1
        await self.start()

    async def close(self) -> None:
        """Crash for good, and release the ports."""
        await self.crash()
        while self._held:
            self._held.pop().close()

    # -- observation by a test ---------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the broker can be reached."""
        return self.info.alive

    @property
    def calls(self) -> list[str]:
        """The names of the called methods, the oldest first."""
        return [request.method for request in self.requests.log]

    @property
    def reads_waiting(self) -> int:
        """Number of reads that wait for data."""
        return self._reading

    @property
    def ranges_refused(self) -> int:
        """Number of ranges of reads that were answered with an error."""
        return self._reads.refused

    # -- its work ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen on free ports."""
        service = self.requests.service(
            api.BROKER_METHODS,
            {
                api.MULTI_WRITE_CHUNKS: self._write,
                api.MULTI_READ_CHUNKS: self._read,
                api.DESCRIBE_STREAMLETS: lambda call: Reply(self._reads.describe(call.message)),
                api.TRUNCATE_STREAMLETS: self._truncate,
                api.PUNCTUATE: self._punctuate,
                api.LOCATE_CHUNKS: self._locate,
                api.COMMIT_CURSORS: lambda call: Reply(
                    broker_pb2.CommitCursorsResponse(
                        results=[broker_pb2.CursorResult(start=cursor) for cursor in call.message.cursors]
                    )
                ),
            },
        )
        frames = FrameServer(service)
        self._servers.append(frames)
        self.info.frames_address = f"{HOST}:{await frames.listen_tcp(HOST, 0)}"
        self.info.grpc_address = self.info.frames_address  # every broker needs one; no gRPC server listens here
        if self._grpc:
            server = GrpcServer([service])
            self._servers.append(server)
            self.info.grpc_address = f"{HOST}:{await server.listen(HOST, 0)}"
        self.info.alive = True

    def _write(self, call: Call[broker_pb2.MultiWriteChunksRequest]) -> Reply[broker_pb2.MultiWriteChunksResponse]:
        response = broker_pb2.MultiWriteChunksResponse(request_id=call.message.request_id)
        data = bytes(call.bulk)
        now_s = asyncio.get_running_loop().time()
        for header, at in iterate_chunks(data):
            status = response.statuses.add()
            try:
                stream = self._reads.stream(header.stream_id)
                stream.attempts.append(Attempt(now_s, self.broker_id, header.streamlet_id))
                streamlet = stream.owned_by(self.broker_id, header.streamlet_id)
                stored = streamlet.write(header, data[at : at + header.chunk_bytes])
                status.duplicate = stored is None
                if stored is not None:
                    status.group_id, status.segment_id, status.position = stored.start
                    status.first_record = streamlet.records - header.record_count
                status.durability = stream.message.config.durability
            except KeraError as error:
                status.error.CopyFrom(error_to_message(error))
        response.all_stored = not any(status.HasField("error") for status in response.statuses)
        self._changes.wake()
        return Reply(response)

    async def _read(self, call: Call[broker_pb2.MultiReadChunksRequest]) -> Reply[Any]:
        request, loop = call.message, asyncio.get_running_loop()
        ranges = self._reads.ranges(request)
        until_s = loop.time() + request.wait_ms / 1000
        while True:
            changed = self._changes.next
            reply, found = self._reads.look(request, ranges)
            reply.message.request_id = request.request_id
            if found or loop.time() >= until_s:
                return reply
            self._reading += 1
            try:
                await asyncio.wait_for(changed.wait(), until_s - loop.time())
            except TimeoutError:
                return reply
            finally:
                self._reading -= 1

    def _punctuate(self, call: Call[broker_pb2.PunctuateRequest]) -> Reply[broker_pb2.PunctuateResponse]:
        request, response = call.message, broker_pb2.PunctuateResponse()
        stream = self._reads.stream(request.stream_id)
        if not stream.message.config.epoch_ms:
            raise InvalidArgument(f"stream {stream.message.name!r} has no epochs")
        for streamlet_id in request.streamlet_ids:
            told = response.streamlets.add()
            try:
                streamlet = stream.owned_by(self.broker_id, streamlet_id)
                told.entries = int(bool(streamlet.log))
                told.written = int(streamlet.punctuate(request.stream_id, streamlet_id, request.timestamp_us))
            except KeraError as error:
                told.error.CopyFrom(error_to_message(error))
        self._changes.wake()
        return Reply(response)

    def _locate(self, call: Call[broker_pb2.LocateChunksRequest]) -> Reply[broker_pb2.LocateChunksResponse]:
        response = broker_pb2.LocateChunksResponse()
        for query in call.message.queries:
            told, cursor = response.places.add(), query.start
            entry = EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry)
            try:
                streamlet = self._reads.stream(entry.stream_id).streamlets[entry.streamlet_id]
                place, told.record, told.bytes = streamlet.locate(query)
                fill_cursor(told.place, entry, place)
            except KeraError as error:
                told.error.CopyFrom(error_to_message(error))
        return Reply(response)

    def _truncate(self, call: Call[broker_pb2.TruncateStreamletsRequest]) -> Reply[Any]:
        response = broker_pb2.TruncateStreamletsResponse()
        for cursor in call.message.cursors:
            self._reads.stream(cursor.stream_id).streamlets[cursor.streamlet_id].truncate(position_of(cursor))
            response.results.add(start=cursor)
        return Reply(response)


def _held(address: str) -> socket.socket:
    """Return a socket that holds a port and does not listen."""
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite connections that have just ended
        held.bind(split_address(address))
    except OSError:
        held.close()
        raise
    return held
