"""A producer or consumer of NATS JetStream, see `bench.compare.worker`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence

from bench.compare.peers import raw
from bench.compare.peers.nats_protocol import BATCH_MAX, Acknowledgements, Messages, Nats, publish, publish_atomically
from bench.compare.worker import Worker, due_of, run_async

RECEIVE_BYTES = 1 << 18
INBOX = b"_A%d" % os.getpid()
"""The inbox of this process: if processes shared one, each would get the acknowledgements of the other."""
CONSUMER = {
    "deliver_policy": "all",
    "ack_policy": "none",
    "replay_policy": "instant",
    "flow_control": True,
    "idle_heartbeat": 5_000_000_000,
    "mem_storage": True,
    "num_replicas": 1,
}


class Producer(raw.Pipeline):
    """Publishes with an inbox for each partition, and counts the acknowledgements there.

    At level persisted it uses atomic batches: these are flushed as a whole, and not message by message. At the other
    levels they are slower than single messages.
    """

    def __init__(self, worker: Worker, subjects: Sequence[bytes]) -> None:
        super().__init__(worker)
        self._subjects = subjects
        self._acknowledgements = Acknowledgements()
        self._atomic = worker.workload.durability == "persisted"
        if self._atomic:
            self.batch_records_min = BATCH_MAX

    def encode(self, batch: raw.Batch) -> bytes:
        """One publication for each record: the protocol has no publication of several records."""
        atomic = self._atomic and len(batch.values) > 1
        return (publish_atomically if atomic else publish)(self._subjects[batch.partition], batch, INBOX)

    def data_received(self, data: bytes) -> None:
        """Count acknowledgements, and answer the server's question whether we are alive."""
        try:
            found = self._acknowledgements.feed(data)
        except ValueError as error:
            self.fail(error)
            return
        if b"PING\r\n" in data:
            self.transport.write(b"PONG\r\n")
        for partition, count in found.items():
            self.acknowledge(partition, count)


def _subjects(worker: Worker) -> list[str]:
    names, streamlets = worker.task.settings["streams"], worker.workload.streamlets
    return [names[stream * streamlets + each] for stream, each in worker.task.partitions]


async def produce(worker: Worker) -> None:
    """Produce as `bench.compare.peers.raw` does."""
    subjects = [name.encode() for name in _subjects(worker)]
    nats = Nats(worker.task.settings["port"])
    nats.socket.sendall(b"SUB %b.* 1\r\n" % INBOX)
    nats.ping()
    await raw.produce(worker, nats.socket, lambda: Producer(worker, subjects))


async def consume(worker: Worker) -> None:
    """Read with a push consumer for each partition, without acknowledgements, with flow control."""
    control, nats = Nats(worker.task.settings["port"]), Nats(worker.task.settings["port"])
    inbox = f"_D.{worker.task.index}"
    nats.socket.sendall(f"SUB {inbox} 1\r\n".encode())
    nats.ping()
    await worker.begin()
    config = CONSUMER | {"deliver_subject": inbox}
    for name in _subjects(worker):
        control.request(f"CONSUMER.CREATE.{name}", {"stream_name": name, "config": config})
    nats.socket.settimeout(0)
    await worker.until_stopped(_receive(worker, nats.socket))


async def _receive(worker: Worker, connected: socket.socket) -> None:
    messages, loop, timed = Messages(), asyncio.get_running_loop(), bool(worker.workload.rate)
    while data := await loop.sock_recv(connected, RECEIVE_BYTES):
        values, now_ns = messages.feed(data), time.monotonic_ns()
        worker.seen(len(values), now_ns)
        if timed:
            for value in values:
                worker.arrived(due_of(value), now_ns)
        if messages.answers:
            await loop.sock_sendall(connected, b"".join(messages.answers))
            messages.answers.clear()
    raise ConnectionError("NATS has closed the connection")


if __name__ == "__main__":
    sys.exit(run_async(produce, consume))
