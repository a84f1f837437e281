"""Clients that send one request and then nothing, for `tests.chaos.partitions`: some over frames, some over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from kera.core.base.process import die_with_parent
from kera.core.errors import KeraError
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import call
from kera.v1 import broker_pb2, coordinator_pb2

TIMEOUT_S = 30.0


async def main(count: int, frames_address: str, grpc_address: str) -> None:
    """Connect, send one request each, and wait for the end of standard input."""
    channels = []
    for _ in range(count):
        frames = await FrameChannel.connect_tcp(frames_address, timeout_s=TIMEOUT_S)
        with contextlib.suppress(KeraError):  # the stream does not exist
            await call(frames, api.DESCRIBE_STREAMLETS, broker_pb2.DescribeStreamletsRequest(), timeout_s=TIMEOUT_S)
        coordinator = GrpcChannel(grpc_address)
        await call(coordinator, api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest(), timeout_s=TIMEOUT_S)
        channels += [frames, coordinator]
    sys.stdout.write('{"connected": true}\n')
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
