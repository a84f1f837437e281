"""A chunk that a broker accepts and readers cannot decode."""

import struct

import pyarrow as pa

from kera.client import Client
from kera.core.base.ids import PRODUCER_IDS
from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.v1 import broker_pb2

BOUND_S = 60.0


async def write_a_chunk_that_nobody_can_read(bootstrap: str, name: str) -> None:
    """Write a chunk whose checksums and metadata are right, so that a broker accepts it."""
    async with await Client.connect(bootstrap) as client:
        stream = await client.describe(name)
        broker = stream.brokers[stream.assignments[0].broker_id]
        payload = bytes(
            encode_payload(pa.RecordBatch.from_pylist([{"timestamp": 1, "value": b"12345"}], DEFAULT_SCHEMA))
        )
        at = payload.rindex(struct.pack("<2i", 0, 5))
        chunk = encode_chunk(
            pa.py_buffer(payload[:at] + struct.pack("<2i", 0, 1 << 30) + payload[at + 8 :]),
            record_count=1,
            stream_id=stream.stream_id,
            streamlet_id=0,
            schema_id=stream.schema_id,
            producer_id=PRODUCER_IDS.start,
            producer_epoch=1,
            sequence=0,
            created_us=1,
            min_timestamp_us=1,
            max_timestamp_us=1,
        ).to_bytes()
        channel = await FrameChannel.connect_tcp(broker.frames_address, timeout_s=BOUND_S)
        try:
            request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
            reply = await channel.submit(api.MULTI_WRITE_CHUNKS, request, [chunk], timeout_s=BOUND_S)
            assert [status.error.code for status in reply.message.statuses] == [""]
        finally:
            await channel.close()
