"""A producer and a broker with a bad connection between them: all records arrive once, in the order of sending."""

import asyncio
import tempfile
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.client.producing.encoding.partitioner import streamlet_of
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from kera.core.errors import Unavailable
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.unit.client.support import WAIT_S, FakeCluster, Fault, stream_info

STREAMLETS = 3
KEYS = [b"a", b"b", b"c", b"d", b"e"]
_KEYS = DEFAULT_SCHEMA.field("keys").type
FAULTS = st.lists(st.sampled_from([Fault.NONE, Fault.NOT_SENT, Fault.LOST, Fault.ANSWER_LOST]), max_size=25)
SENDS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send_batch", "send_keyed", "send_keyed", "pause"]),
        st.integers(0, STREAMLETS - 1),
        st.integers(1, 60),
    ),
    min_size=1,
    max_size=30,
)


async def run(
    directory: Path, sends: list[tuple[str, int, int]], faults: list[Fault], requests_in_flight_max: int, refusals: int
) -> None:
    cluster = FakeCluster(directory, stream_info(streamlets=STREAMLETS, entries=2), segment_bytes=4096, slots=512)
    cluster.loopback.faults.extend(faults)
    cluster.connects.extend([Unavailable("nobody listens")] * refusals)
    sent: list[list[bytes]] = [[] for _ in range(STREAMLETS)]
    options = ProducerSettings(
        chunk_bytes_max=1024,
        request_bytes_max=2048,
        requests_in_flight_max=requests_in_flight_max,
    )
    number = 0
    try:
        async with asyncio.timeout(WAIT_S), Producer(cluster, options) as producer:  # type: ignore[arg-type]
            await producer.prepare("s")
            for kind, streamlet, count in sends:
                values = [b"%d" % (number + index) for index in range(count)]
                number += count
                if kind == "send":
                    for value in values:
                        producer.send("s", value, streamlet=streamlet)
                elif kind == "send_batch":
                    await producer.send_batch("s", pa.record_batch({"value": values}), streamlet=streamlet)
                elif kind == "send_keyed":
                    keys = [KEYS[value[-1] % len(KEYS)] for value in values]
                    columns = {"keys": pa.array([[key] for key in keys], _KEYS), "value": values}
                    await producer.send_batch("s", pa.record_batch(columns))
                    for key, value in zip(keys, values, strict=True):
                        sent[streamlet_of(key, STREAMLETS)].append(value)
                    continue
                else:
                    await asyncio.sleep(0)
                    continue
                sent[streamlet] += values
        for streamlet in range(STREAMLETS):
            stored = [cluster.stored("s", streamlet, entry)["value"].to_pylist() for entry in range(2)]
            assert stored == [[], sent[streamlet]]  # the producer has the id 1, and so writes to entry 1
    finally:
        cluster.arena.close()


@settings(max_examples=max(1, settings().max_examples // 2))
@given(SENDS, FAULTS, st.integers(1, 5), st.integers(0, 3))
def test_all_records_arrive_once_and_in_order(
    sends: list[tuple[str, int, int]], faults: list[Fault], requests_in_flight_max: int, refusals: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory), sends, faults, requests_in_flight_max, refusals))
