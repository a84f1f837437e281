"""The brokers that accept chunks for a streamlet, as seen by a writer over the network."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from kera.client import Client
from kera.client.types import StreamDescription
from kera.core.base.ids import PRODUCER_IDS
from kera.core.errors import OutOfSequence
from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.v1 import broker_pb2

TIMEOUT_S = 5.0
FAR_AHEAD = 1 << 40
"""A sequence that no producer reaches. The owner misses the chunks before it; other brokers do not check it."""


async def not_taken_by_owners(client: Client, name: str) -> list[str]:
    """Messages about streamlets whose chunks not exactly their owners accept. Raises `KeraError`."""
    stream = await client.admin.describe_stream(name)
    taking: dict[int, list[int]] = {streamlet_id: [] for streamlet_id in sorted(stream.assignments)}
    for broker in (await client.admin.describe_cluster()).brokers:
        channel = await FrameChannel.connect_tcp(broker.frames_address, timeout_s=TIMEOUT_S)
        try:
            for streamlet_id, brokers in taking.items():
                if await _takes(channel, stream, streamlet_id):
                    brokers.append(broker.broker_id)
        finally:
            await channel.close()
    return list(_differences(stream, taking))


def _differences(stream: StreamDescription, taking: dict[int, list[int]]) -> Iterator[str]:
    for streamlet_id, brokers in taking.items():
        owner = stream.assignments[streamlet_id].broker_id
        if brokers != [owner]:
            yield f"chunks of streamlet {streamlet_id} are taken by brokers {brokers}, and its owner is {owner}"


async def _takes(channel: FrameChannel, stream: StreamDescription, streamlet_id: int) -> bool:
    row = pa.RecordBatch.from_pylist([{"timestamp": 0, "value": b"never stored"}], DEFAULT_SCHEMA)
    chunk = encode_chunk(
        encode_payload(row),
        record_count=1,
        stream_id=stream.stream_id,
        streamlet_id=streamlet_id,
        schema_id=stream.schema_id,
        producer_id=PRODUCER_IDS.start,
        producer_epoch=1,
        sequence=FAR_AHEAD,
        created_us=0,
        min_timestamp_us=0,
        max_timestamp_us=0,
    )
    request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
    answer = await channel.submit(api.MULTI_WRITE_CHUNKS, request, [chunk.to_bytes()], timeout_s=TIMEOUT_S)
    (status,) = answer.message.statuses
    return bool(status.error.code == OutOfSequence.code)
