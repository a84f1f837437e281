"""A producer or consumer of Kafka with confluent-kafka, see `bench.compare.worker`."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import threading
import time
from typing import Any

from bench.compare.worker import Worker, due_of, make_keys, make_values, run, stamped
from bench.compare.workload import DUE_BYTES, Workload

QUEUE_BYTES = 256 << 20
"""The maximum that waits in the client."""
QUEUE_RECORDS = 1_000_000
PREPARED, PREPARED_BYTES = 10_000, 16 << 20
KEYS = 1 << 16
IN_FLIGHT_AT_A_RATE = 1
"""Requests. A broker handles one request of a connection at a time, with acks=all until all replicas have it, so
more requests only wait in its socket, and after one delay would stay late. Records that wait in the client become
one batch.
"""
POLL_S = 0.1
READ_RECORDS = 10_000
FLUSH_S = 60.0


def producer_settings(worker: Worker) -> dict[str, Any]:
    """Batches by the workload. No compression, no idempotence: the defaults.

    A workload's table ``[settings.kafka]`` has others.
    """
    workload = worker.workload
    at_a_rate = {"max.in.flight.requests.per.connection": IN_FLIGHT_AT_A_RATE} if workload.rate else {}
    return at_a_rate | {
        "bootstrap.servers": worker.task.settings["bootstrap"],
        "acks": worker.task.settings["acks"],
        "linger.ms": workload.linger_ms if workload.rate else max(workload.linger_ms, 5),
        "batch.size": max(int(workload.batch_bytes), 1 << 20),
        "batch.num.messages": QUEUE_RECORDS,
        "message.max.bytes": 8 << 20,
        "queue.buffering.max.messages": QUEUE_RECORDS,
        "queue.buffering.max.kbytes": (QUEUE_BYTES >> 10) // workload.clients,
        "socket.nagle.disable": True,
        "delivery.report.only.error": not workload.rate,
        **workload.settings.get("kafka", {}),
    }


def produce(worker: Worker) -> None:
    """At a rate, with a callback for each record; otherwise by the length of the client's queue, which costs
    nothing.
    """
    library = importlib.import_module("confluent_kafka")
    producers = [library.Producer(producer_settings(worker)) for _ in range(worker.workload.clients)]
    topics = [worker.task.settings["topics"][stream] for stream in worker.task.streams]
    for producer, topic in itertools.product(producers, topics):
        producer.list_topics(topic, timeout=FLUSH_S)
    if worker.task.rate:
        _at_rate(worker, producers[0], topics)
    else:
        _flood(worker, [_Flood(worker, producer, topics) for producer in producers])


def _at_rate(worker: Worker, producer: Any, topics: list[str]) -> None:
    keys = itertools.cycle(make_keys(worker.workload, KEYS, seed=worker.task.index) or [None])
    rest = make_values(worker.workload.record_bytes - DUE_BYTES, 1)[0]
    ended = threading.Event()

    def delivered(due_ns: int, error: object, _: object) -> None:
        if error is None:
            worker.acknowledged(1, due_ns)
        else:
            worker.errors.append(str(error))

    def poll() -> None:
        while not ended.is_set():
            producer.poll(POLL_S)

    polling = threading.Thread(target=poll)
    worker.begin_blocking()
    polling.start()
    for topic, key, due_ns in zip(itertools.cycle(topics), keys, worker.due_blocking(), strict=False):
        producer.produce(topic, stamped(due_ns, rest), key, on_delivery=functools.partial(delivered, due_ns))
        worker.sent()
    while len(producer) and time.monotonic_ns() < worker.end_ns + FLUSH_S * 1e9:
        time.sleep(POLL_S)
    ended.set()
    polling.join()


def messages(workload: Workload, seed: int) -> list[dict[str, Any]]:
    """The messages that a producer repeats: with keys, or for each partition in turn as many as fill a batch."""
    most = max(100, PREPARED_BYTES // workload.record_bytes)
    run = max(1, min(int(workload.batch_bytes) // workload.record_bytes, most // workload.streamlets))
    wanted = workload.batch_records or max(PREPARED, run * workload.streamlets)
    values = make_values(workload.record_bytes, min(wanted, most))
    keys = make_keys(workload, len(values), seed)
    if keys is not None:
        return [{"value": value, "key": key} for value, key in zip(values, keys, strict=True)]
    return [{"value": value, "partition": at // run % workload.streamlets} for at, value in enumerate(values)]


def _flood(worker: Worker, floods: list[_Flood]) -> None:
    """Send until there is nothing more to send; then wait until all is acknowledged. Clients take turns."""
    worker.begin_blocking()
    while worker.more:
        if not sum(flood.send() for flood in floods):
            floods[0].wait()
    deadline = time.monotonic() + FLUSH_S
    while sum(flood.wait() for flood in floods) and time.monotonic() < deadline:
        pass


class _Flood:
    """A producer at full speed: sent records that have left the client's queue are acknowledged."""

    def __init__(self, worker: Worker, producer: Any, topics: list[str]) -> None:
        self._worker = worker
        self._producer = producer
        self._topics = itertools.cycle(topics)
        records_max = min(QUEUE_RECORDS // 2, QUEUE_BYTES // 2 // worker.workload.record_bytes)
        self._room = records_max // worker.workload.clients
        self._sent = self._acknowledged = 0
        self._messages = messages(worker.workload, worker.task.index)

    def send(self) -> bool:
        """Send once, unless the client's queue is full; returns whether it was not."""
        self._account()
        if len(self._producer) > self._room and not self._worker.errors:
            return False
        count = min(self._worker.more, len(self._messages))
        if not count:
            return False
        (self._batch if self._worker.workload.send == "batch" else self._each)(count)
        self._sent += count
        self._worker.sent(count)
        return True

    def wait(self) -> bool:
        """Give the client a little time; returns whether its queue is not empty."""
        self._producer.poll(0.001)
        self._account()
        return bool(len(self._producer))

    def _batch(self, count: int) -> None:
        queued = self._producer.produce_batch(next(self._topics), self._messages[:count], on_delivery=self._failed)
        if queued != count:
            raise BufferError(f"Kafka's client took {queued} of {count} records")

    def _each(self, count: int) -> None:
        topic, failed, produce_one = next(self._topics), self._failed, self._producer.produce
        for message in self._messages[:count]:
            produce_one(topic, message["value"], message.get("key"), on_delivery=failed)

    def _failed(self, error: object, _: object) -> None:
        if error is not None:
            self._worker.errors.append(str(error))

    def _account(self) -> None:
        stored = self._sent - len(self._producer) - len(self._worker.errors)
        if stored > self._acknowledged:
            self._worker.acknowledged(stored - self._acknowledged)
            self._acknowledged = stored


def consumer_settings(worker: Worker) -> dict[str, Any]:
    """Fetches as large as there is data for; nothing is committed."""
    return {
        "bootstrap.servers": worker.task.settings["bootstrap"],
        "group.id": "bench",
        "enable.auto.commit": False,
        "enable.partition.eof": False,
        "fetch.min.bytes": 1,
        "fetch.wait.max.ms": 500,
        "fetch.queue.backoff.ms": 1,
        "fetch.message.max.bytes": 8 << 20,
        "queued.min.messages": QUEUE_RECORDS,
        "queued.max.messages.kbytes": QUEUE_BYTES >> 10,
        "socket.nagle.disable": True,
    }


def consume(worker: Worker) -> None:
    """Read the assigned partitions from the beginning."""
    kafka = importlib.import_module("confluent_kafka")
    consumer = kafka.Consumer(consumer_settings(worker))
    topics = worker.task.settings["topics"]
    assigned = [kafka.TopicPartition(topics[stream], each, 0) for stream, each in worker.task.partitions]
    consumer.list_topics(topics[0], timeout=FLUSH_S)
    worker.begin_blocking()
    consumer.assign(assigned)
    timed = bool(worker.workload.rate)
    while not worker.stopped.is_set():
        # At a rate, each message is taken on arrival; otherwise consume returns many messages, or those of its time.
        messages = consumer.consume(1 if timed else READ_RECORDS, POLL_S)
        now_ns = time.monotonic_ns()
        for message in messages:
            if (error := message.error()) is not None:
                raise kafka.KafkaException(error)
            if timed:
                worker.arrived(due_of(message.value()), now_ns)
        worker.seen(len(messages), now_ns)
    consumer.close()


if __name__ == "__main__":
    sys.exit(run(produce, consume))
