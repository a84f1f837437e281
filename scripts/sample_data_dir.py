"""Write a small data directory of a broker: ``python -m scripts.sample_data_dir DIRECTORY``.

It made tests/data/broker-format-2. The log engine writes it, without daemons, threads or a clock: a stream of level
leader, whose segments go to disk when they close, and a stream of level persisted, which is committed chunk by chunk. A
new format gets a new directory; existing directories are never rewritten.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from kera.broker.log.arena import Arena
from kera.broker.log.events import Events
from kera.broker.ownership.streams import Streams
from kera.broker.registration import BrokerDirectory
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.manager import Replication
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import FORMAT, SegmentIndex
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.physical_ids import PhysicalIds
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.format.chunk import Codec, encode_chunk, encode_payload, verify_header
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.v1 import common_pb2

BROKER_ID = 3
CLUSTER_ID = "7a0d5f1e4c3b42998e6f1b2a3c4d5e6f"
SEGMENT_BYTES = 16 << 10
LEADER, PERSISTED = 1, 2
"""The ids of the streams."""
CHUNKS = 12
"""Number of chunks of each stream."""
START_US = 1_700_000_000_000_000


def write(
    data_dir: Path, *, clean: bool = True, commit_chunks: int = 1, ticked: bool = True, punctuated: bool = False
) -> None:
    """Write the directory, which must not exist.

    `clean`: as after a stop of the broker; otherwise as after a crash of its host, some time (`ticked`) or at once
    after the last commit. `commit_chunks`: how many chunks are committed at once. `punctuated`: with a punctuation
    after every chunk; the sample has none, because it is older than punctuations.
    """
    directory = BrokerDirectory(data_dir)
    try:
        directory.store(BROKER_ID, CLUSTER_ID)
        with tempfile.TemporaryDirectory(prefix="kera-sample-", dir="/dev/shm") as shm_dir:
            _write_log(
                data_dir / "log",
                Path(shm_dir),
                clean=clean,
                commit_chunks=commit_chunks,
                ticked=ticked,
                punctuated=punctuated,
            )
    finally:
        directory.close()


def _write_log(root: Path, shm_dir: Path, *, clean: bool, commit_chunks: int, ticked: bool, punctuated: bool) -> None:
    root.mkdir()
    index = SegmentIndex.open(root / "index")
    store = SegmentStore(root, LocalDisk(root), index)
    restart = Restart(None, index, store)
    restart.look(index_whole=True, slot_bytes=SEGMENT_BYTES)
    meta = {"format": FORMAT, "clean": False, "slot_bytes": SEGMENT_BYTES, "next_physical_id": 1}
    index.commit([], meta)
    arena = Arena.create(
        shm_dir, arena_bytes=16 * SEGMENT_BYTES, slot_bytes=SEGMENT_BYTES, data_dir=root.parent, ephemeral=True
    )
    memory = PersistenceManager(arena, index, PhysicalIds(meta), Events())
    replication = Replication(ReplicationLimits(SEGMENT_BYTES), memory.index_writer.note, memory.events)
    streams = Streams(memory, restart, replication)
    streams.open(stream_info(LEADER, "clicks", common_pb2.DURABILITY_LEADER), BROKER_ID)
    streams.open(stream_info(PERSISTED, "orders", common_pb2.DURABILITY_PERSISTED), BROKER_ID)
    for stream in streams:
        for sequence in range(CHUNKS):
            data = chunk(stream.stream_id, sequence)
            streamlet = stream.streamlet(0)
            appended = streamlet.append(memoryview(data), verify_header(data))
            if punctuated:
                if stream.stream_id == LEADER:
                    streamlet.publish(appended)
                behind = streamlet.punctuate(streamlet.entries[0], START_US + sequence * 1_000_000 + 500_000)
                appended = behind or appended
            if stream.stream_id == LEADER:
                streamlet.publish(appended)
            elif appended.segment is not None and (sequence + 1) % commit_chunks == 0:
                memory.commits.persist([(appended.segment, appended.end)], lambda _: None)
            perform(memory, store)
    if clean:
        memory.segments.close_all()
        perform(memory, store)
        index.commit([], dict(memory.ids.meta, clean=True))
    elif ticked:
        memory.tick(0, idle_close_ms=1)
        perform(memory, store)
    index.close(clean=clean)
    arena.close()


def perform(memory: PersistenceManager, store: SegmentStore) -> None:
    """Perform the planned jobs until there are none."""
    while jobs := memory.plan():
        for job in jobs:
            store.perform(job)
            memory.finished(job)


def stream_info(stream_id: int, name: str, durability: common_pb2.Durability.ValueType) -> common_pb2.StreamInfo:
    """Return the coordinator's description of a stream with one streamlet, and groups of two segments."""
    return common_pb2.StreamInfo(
        stream_id=stream_id,
        name=name,
        config=common_pb2.StreamConfig(streamlets=1, entries=1, group_segments=2, durability=durability),
        config_version=1,
        schemas=[common_pb2.StreamSchema(schema_id=1)],
        assignments=[common_pb2.StreamletAssignment(broker_id=BROKER_ID, broker_epoch=1, first_group_id=1)],
    )


def chunk(stream_id: int, sequence: int) -> bytes:
    """Return a chunk of records that all differ; every third chunk is compressed."""
    count = 10 + sequence * 4
    time_us = START_US + sequence * 1_000_000
    names = [f"{stream_id}-{sequence}-{number}" for number in range(count)]
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(range(time_us, time_us + count)).cast(DEFAULT_SCHEMA.field("timestamp").type),
            pa.array([[name.encode()] for name in names], DEFAULT_SCHEMA.field("keys").type),
            pa.array([f"the value of {name}".encode() for name in names], DEFAULT_SCHEMA.field("value").type),
            pa.nulls(count, DEFAULT_SCHEMA.field("headers").type),
        ],
        schema=DEFAULT_SCHEMA,
    )
    codec = Codec.NONE if sequence % 3 else Codec.ZSTD
    return encode_chunk(
        encode_payload(batch, codec),
        record_count=count,
        stream_id=stream_id,
        streamlet_id=0,
        schema_id=1,
        producer_id=40 + stream_id,
        producer_epoch=0,
        sequence=sequence,
        created_us=time_us,
        min_timestamp_us=time_us,
        max_timestamp_us=time_us + count - 1,
        codec=codec,
    ).to_bytes()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
