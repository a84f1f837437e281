"""A producer or consumer of RabbitMQ's streams, see `bench.compare.worker`."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Sequence

from bench.compare.peers import rabbitmq_protocol as protocol
from bench.compare.peers import raw
from bench.compare.worker import Worker, due_of, run_async

RECEIVE_BYTES = 1 << 18
CREDITS = 50
"""This many chunks may be under way to a consumer."""
FIRST = 1
"""The kind of a subscription's start: the first message."""
TOGETHER = 100
"""Messages in a sub-batch entry, as in the Java client's documentation; at a rate each message is alone."""


class Producer(raw.Pipeline):
    """A publisher for each partition."""

    window = 100_000
    batch_bytes_max = 512 << 10
    """A frame has at most 1 MiB."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._frames = protocol.Frames()

    def encode(self, batch: raw.Batch) -> bytes:
        """Encode a batch; keys have chosen the partition, and are not stored."""
        return protocol.publish(batch.partition, batch.values, TOGETHER)

    def data_received(self, data: bytes) -> None:
        """Count confirmations."""
        for key, body in self._frames.feed(data):
            if key == protocol.PUBLISH_CONFIRM:
                self.acknowledge(body[0], protocol.confirmed(body))
            elif key in {protocol.PUBLISH_ERROR, protocol.CLOSE}:
                self.fail(ValueError(f"RabbitMQ has refused to store: {body[:200]!r}"))


def _streams(worker: Worker) -> Sequence[str]:
    names, streamlets = worker.task.settings["streams"], worker.workload.streamlets
    return [names[stream * streamlets + each] for stream, each in worker.task.partitions]


async def produce(worker: Worker) -> None:
    """Produce as `bench.compare.peers.raw` does."""
    connection = protocol.Stream(worker.task.settings["port"])
    for number, stream in enumerate(_streams(worker)):
        declaration = struct.pack(">B", number) + protocol.text("") + protocol.text(stream)
        connection.request(protocol.DECLARE_PUBLISHER, declaration)
    await raw.produce(worker, connection.socket, lambda: Producer(worker))


async def consume(worker: Worker) -> None:
    """Read with a subscription for each partition; credit is given back for each chunk."""
    connection = protocol.Stream(worker.task.settings["port"])
    await worker.begin()
    connection.socket.settimeout(0)
    connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    subscriptions = [
        struct.pack(">IB", number, number) + protocol.text(stream) + struct.pack(">HHI", FIRST, CREDITS, 0)
        for number, stream in enumerate(_streams(worker))
    ]
    requests = b"".join(protocol.frame(protocol.SUBSCRIBE, each) for each in subscriptions)
    await asyncio.get_running_loop().sock_sendall(connection.socket, requests)
    await worker.until_stopped(_receive(worker, connection.socket))


async def _receive(worker: Worker, connected: socket.socket) -> None:
    frames, loop, timed = protocol.Frames(), asyncio.get_running_loop(), bool(worker.workload.rate)
    each_value = timed or worker.workload.read == "records"
    while data := await loop.sock_recv(connected, RECEIVE_BYTES):
        credit = b""
        for key, body in frames.feed(data):
            if key == protocol.DELIVER:
                chunk, now_ns = memoryview(body), time.monotonic_ns()
                worker.seen(protocol.chunk_messages(chunk), now_ns)
                credit += protocol.frame(protocol.CREDIT, struct.pack(">BH", body[0], 1))
                for value in protocol.chunk_values(chunk) if each_value else ():
                    if timed:
                        worker.arrived(due_of(value), now_ns)
            elif key == protocol.SUBSCRIBE | protocol.RESPONSE and struct.unpack_from(">H", body, 4)[0] != protocol.OK:
                raise ValueError(f"RabbitMQ has refused a subscription: {body!r}")
        if credit:
            await loop.sock_sendall(connected, credit)
    raise ConnectionError("RabbitMQ has closed the connection")


if __name__ == "__main__":
    sys.exit(run_async(produce, consume))
