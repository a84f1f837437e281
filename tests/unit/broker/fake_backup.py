"""A backup that serves the replicas that a test gives it, and fails on demand."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kera.core.format.chunk import chained_checksum, iterate_chunks
from kera.core.rpc import Call, Reply, api
from kera.core.rpc.frame_server import FrameServer
from kera.v1 import backup_pb2, common_pb2
from tests.unit.broker.support import BROKER_ID, STREAM_ID


@dataclass
class FakeBackup:
    """Serves replicas as a backup does, and fails on demand."""

    backup_id: int
    replicas: dict[int, tuple[bytes, bool]] = field(default_factory=dict)
    damaged: set[tuple[int, int]] = field(default_factory=set)
    """The virtual segment and the offset of each damaged chunk."""
    claims: dict[int, int] = field(default_factory=dict)
    """Checksums to list instead of the right ones."""
    on_read: Callable[[backup_pb2.ReadReplicaRequest], None] = lambda _: None
    per_list: int = 2
    reads: int = 0
    server: FrameServer = field(init=False)
    address: str = ""

    async def start(self) -> None:
        self.server = FrameServer({api.LIST_REPLICAS: self.list_replicas, api.READ_REPLICA: self.read_replica})
        self.address = f"127.0.0.1:{await self.server.listen_tcp('127.0.0.1', 0)}"

    @property
    def message(self) -> common_pb2.BackupInfo:
        return common_pb2.BackupInfo(backup_id=self.backup_id, frames_address=self.address, alive=True)

    def info(self, number: int) -> backup_pb2.ReplicaInfo:
        chunks, closed = self.replicas[number]
        checksum = 0
        for _, at in iterate_chunks(chunks):
            checksum = chained_checksum(chunks, at, checksum)
        return backup_pb2.ReplicaInfo(
            broker_id=BROKER_ID,
            stream_id=STREAM_ID,
            virtual_segment_id=number,
            length=len(chunks),
            checksum=self.claims.get(number, checksum),
            closed=closed,
        )

    def list_replicas(self, call: Call[backup_pb2.ListReplicasRequest]) -> Reply[backup_pb2.ListReplicasResponse]:
        assert call.message.broker_id == BROKER_ID
        behind = [number for number in sorted(self.replicas) if number > call.message.after_virtual_segment_id]
        infos = [self.info(number) for number in behind[: self.per_list]]
        return Reply(backup_pb2.ListReplicasResponse(replicas=infos, complete=len(behind) <= self.per_list))

    def read_replica(self, call: Call[backup_pb2.ReadReplicaRequest]) -> Reply[backup_pb2.ReadReplicaResponse]:
        request = call.message
        self.reads += 1
        self.on_read(request)
        message = backup_pb2.ReadReplicaResponse(replica=self.info(request.virtual_segment_id))
        wanted = {item.stream_id: set(item.streamlet_ids) for item in request.streamlets}
        data, found = self.replicas[request.virtual_segment_id][0], b""
        message.next_offset = request.offset
        for each, at in iterate_chunks(data, request.offset):
            if len(found) + each.chunk_bytes > request.bytes_max and found:
                break
            message.next_offset = at + each.chunk_bytes
            if (request.virtual_segment_id, at) in self.damaged:
                message.replica.chunks_damaged += 1
            elif not wanted or each.streamlet_id in wanted.get(each.stream_id, ()):
                found += data[at : at + each.chunk_bytes]
        return Reply(message, [memoryview(found)] if found else [])
