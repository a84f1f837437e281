"""`Producer.send` in C and in Python: for any records, both change a producer's state alike."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from tests.examples import fuzz_examples
from tests.native_twins import needs_native, outcome
from tests.unit.client.support import WAIT_S, FakeCluster, stream_info

pytestmark = needs_native

STREAMLETS = 3


class Text(str):
    """A subclass of `str`."""

    __slots__ = ()


class Octets(bytes):
    """A subclass of `bytes`."""


KEY = st.sampled_from([b"a", b"b", b"", b"k" * 90])
VALUES = st.sampled_from([b"", b"v", b"x" * 100, b"y" * 400]) | st.sampled_from(
    [None, Octets(b"v"), bytearray(b"v"), "v", b"z" * 2000, b"z" * 5000]
)
FIELDS: st.SearchStrategy[dict[str, Any]] = (
    st.just({})
    | st.fixed_dictionaries({"keys": KEY})
    | st.fixed_dictionaries(
        {},
        optional={
            "keys": st.sampled_from([(), [], (b"a", b"c"), [b"b"], Octets(b"a"), "a", None, [1], {b"a": 1}]),
            "timestamp_us": st.sampled_from([None, 5, 1 << 70, "x"]),
            "headers": st.sampled_from([None, {}, {"h": b"c"}, [("h", b"c"), ("h", None)], {"h": "c"}, [b"h"], 7]),
            "streamlet": st.sampled_from([None, 0, 2, 3, "x", True]),
            "other": st.just(1),
        },
    )
)
STREAMS = st.sampled_from(["s", "s", "s", "t", "typed", "nowhere", Text("s"), 7])
SENT = st.tuples(STREAMS, VALUES, FIELDS)
DONE = st.sampled_from(["close", "close_all", "fail"])
STEPS = st.lists(SENT | SENT | SENT | SENT | DONE, max_size=40)


def seen(producer: Producer) -> Any:
    """All state that `send` may have changed."""
    chunks = {
        name: {
            streamlet: (
                chunk.values,
                chunk.keys,
                chunk.headers,
                chunk.timestamps_us,
                len(chunk.times_s),
                chunk.size,
                producer._writers.filling.get(name) is chunk,
            )
            for streamlet, chunk in writer.open_chunks.items()
        }
        for name, writer in producer._writers.by_name.items()
    }
    return chunks, producer._buffer.left_bytes, producer._buffer.refused_bytes, producer._writers.filling.keys()


def step(producer: Producer, send: Any, what: Any) -> Any:
    """Do one step, and return its outcome, without parts that differ between any two producers."""
    if what == "close":
        producer._writers.by_name["s"].close_open_chunks()
    elif what == "close_all":
        producer._writers.close_open_chunks()
    elif what == "fail":
        producer._writers.by_name["t"].abandon(RuntimeError("no more"))  # type: ignore[arg-type]
    else:
        stream, value, fields = what
        found = outcome(send, stream, value, **fields)
        return found.error or found.value[1]._index
    return None


async def run(directory: Path, steps: list[Any]) -> None:
    typed = pa.schema([("id", pa.int64())])
    infos = [
        stream_info("s", 7, streamlets=STREAMLETS),
        stream_info("t", 8),
        stream_info("typed", 9, schema=typed),
    ]
    cluster: Any = FakeCluster(directory, *infos, segment_bytes=4096, slots=64)
    # Not lean: the size of a lean chunk depends on the distance of its records' times.
    options = ProducerSettings(chunk_bytes_max=1000, buffer_bytes_max=4000, linger_ms=60_000, payload="arrow")
    try:
        async with asyncio.timeout(WAIT_S):
            fast, slow = Producer(cluster, options), Producer(cluster, options)
            for producer in (fast, slow):
                for name in ("s", "t", "typed"):
                    await producer.prepare(name)
            slow._writers.by_name["s"].sticky_streamlet = fast._writers.by_name["s"].sticky_streamlet
            for what in steps:
                both = ((fast, fast.send), (slow, slow._records.send))
                first, second = [(step(producer, send, what), seen(producer)) for producer, send in both]
                assert first == second
            for producer in (fast, slow):
                await producer.close(flush=False)
    finally:
        cluster.arena.close()


@settings(max_examples=fuzz_examples(300, 60))
@given(STEPS)
def test_send_in_c_and_in_python_do_the_same(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory), steps))
