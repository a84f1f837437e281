"""What other clients of a broker wait for while one sends the largest requests of methods that are sliced.

    python -m bench.fairness

One client sends `PIPELINED` requests at once; another one, on a connection of its own, reads a range without records,
one read after the other. Told, per method: how long those took, and for how long the large ones were under way.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kera.client import Client
from kera.client.local_cluster import LocalCluster
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.method import Method, call
from kera.v1 import broker_pb2, common_pb2

PIPELINED = int(os.environ.get("KERA_FAIRNESS_PIPELINED", "40"))
ITEMS = 65536
TIMEOUT_S = 300.0


def requests(stream_id: int) -> dict[Method[Any, Any], Callable[[], Any]]:
    """The largest that each method takes."""
    start = common_pb2.Cursor(stream_id=stream_id)
    return {
        api.MULTI_READ_CHUNKS: lambda: api.MULTI_READ_CHUNKS.request(
            ranges=[broker_pb2.ReadRange(start=start)] * ITEMS
        ),
        api.MEASURE_LAG: lambda: api.MEASURE_LAG.request(cursors=[start] * ITEMS),
        api.DESCRIBE_STREAMLETS: lambda: api.DESCRIBE_STREAMLETS.request(
            stream_id=stream_id, streamlet_ids=[0] * ITEMS
        ),
    }


async def measure(address: str, stream_id: int, method: Method[Any, Any], request: Any) -> str:
    """One line about one method."""
    large = await FrameChannel.connect_tcp(address, timeout_s=10)
    small = await FrameChannel.connect_tcp(address, timeout_s=10)
    begun = time.perf_counter()
    tasks = [asyncio.ensure_future(call(large, method, request, timeout_s=TIMEOUT_S)) for _ in range(PIPELINED)]
    read = api.MULTI_READ_CHUNKS.request(ranges=[broker_pb2.ReadRange(start=common_pb2.Cursor(stream_id=stream_id))])
    took_ms: list[float] = []
    while not all(task.done() for task in tasks):
        at = time.perf_counter()
        await call(small, api.MULTI_READ_CHUNKS, read, timeout_s=TIMEOUT_S)
        took_ms.append((time.perf_counter() - at) * 1000)
    refused = sum(isinstance(each, BaseException) for each in await asyncio.gather(*tasks, return_exceptions=True))
    total_s = time.perf_counter() - begun
    await large.close()
    await small.close()
    took_ms.sort()
    return (
        f"{method.name}: {len(took_ms)} small reads, median {statistics.median(took_ms):.1f} ms,"
        f" p99 {took_ms[len(took_ms) * 99 // 100]:.1f} ms, max {took_ms[-1]:.1f} ms;"
        f" {PIPELINED} large ones {total_s:.1f} s, {refused} refused"
    )


async def main() -> None:
    """Measure all of them on a cluster of its own."""
    with TemporaryDirectory() as directory:
        async with LocalCluster(data_dir=Path(directory)) as cluster, await Client.connect(cluster.bootstrap) as client:
            stream = await client.admin.create_stream("s", streamlets=1)
            for method, make in requests(stream.stream_id).items():
                print(await measure(cluster.ready["broker-1"]["frames_address"], stream.stream_id, method, make()))


if __name__ == "__main__":
    asyncio.run(main())
