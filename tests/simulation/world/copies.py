"""The number of replicas of each record, as backups report them over the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kera.client import Client
from kera.client.checking.history import History, Place
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, verify_header
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.v1 import backup_pb2

TIMEOUT_S = 5.0
READ_BYTES_MAX = 1 << 20


async def copies_of(client: Client, stream_id: int) -> Counter[Place]:
    """The number of replicas of each record of a stream. Raises `KeraError` when a backup does not report all."""
    cluster = await client.admin.describe_cluster()
    broker_ids = [broker.broker_id for broker in cluster.brokers]
    found: Counter[Place] = Counter()
    for backup in cluster.backups:
        channel = await FrameChannel.connect_tcp(backup.frames_address, timeout_s=TIMEOUT_S)
        try:
            found.update(await _places(channel, broker_ids, stream_id))
        finally:
            await channel.close()
    return found


async def replicated_streams(client: Client) -> set[int]:
    """The ids of streams with replicas on a backup. Raises the same errors as `copies_of`."""
    cluster = await client.admin.describe_cluster()
    found: set[int] = set()
    for backup in cluster.backups:
        channel = await FrameChannel.connect_tcp(backup.frames_address, timeout_s=TIMEOUT_S)
        try:
            for broker in cluster.brokers:
                found.update(replica.stream_id for replica in await _replicas(channel, broker.broker_id))
        finally:
            await channel.close()
    return found


async def _places(channel: FrameChannel, broker_ids: Iterable[int], stream_id: int) -> set[Place]:
    found: set[Place] = set()
    for broker_id in broker_ids:
        for replica in await _replicas(channel, broker_id):
            if replica.stream_id == stream_id:
                for header in await _headers(channel, replica):
                    records = range(header.first_record, header.first_record + header.record_count)
                    found.update(Place(header.streamlet_id, header.entry, record) for record in records)
    return found


async def _replicas(channel: FrameChannel, broker_id: int) -> list[backup_pb2.ReplicaInfo]:
    found: list[backup_pb2.ReplicaInfo] = []
    while True:
        after = found[-1].virtual_segment_id if found else 0
        request = backup_pb2.ListReplicasRequest(broker_id=broker_id, after_virtual_segment_id=after)
        answer = (await channel.submit(api.LIST_REPLICAS, request, timeout_s=TIMEOUT_S)).message
        found += answer.replicas
        if answer.complete:
            return found


async def _headers(channel: FrameChannel, replica: backup_pb2.ReplicaInfo) -> list[ChunkHeader]:
    found: list[ChunkHeader] = []
    request = backup_pb2.ReadReplicaRequest(
        broker_id=replica.broker_id,
        virtual_segment_id=replica.virtual_segment_id,
        bytes_max=READ_BYTES_MAX,
        headers_only=True,
    )
    while request.offset < replica.length:
        reply = await channel.submit(api.READ_REPLICA, request, timeout_s=TIMEOUT_S)
        data = memoryview(b"".join(reply.bulk))
        found += [verify_header(data, at) for at in range(0, len(data), HEADER_BYTES)]
        request.offset = reply.message.next_offset
    return found


def too_few(history: History, copies: Counter[Place], wanted: int) -> Iterator[str]:
    """Messages about stored records with fewer replicas than promised."""
    for place, value in history.stored:
        if copies[place] < wanted and not history.is_removed(place):
            yield f"of {value} at {place} there are {copies[place]} replicas, and not {wanted}"
