"""A topic as the target of a copy. Each transaction writes records together with the progress of the copy.

The progress is a record of the topic `STATE_TOPIC`, whose key is the name of the copy. That topic is compacted, so it
keeps the last record of each copy for ever; committed offsets of a consumer group would expire after a week without
consumers. A consumer with ``isolation.level=read_committed`` sees each record once.

The producer's ``transactional.id`` also has the name of the copy: when a copy starts, Kafka ends the transaction that
an earlier process may have left, and accepts no more records from that process.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from kera.connect.errors import CopyElsewhere, CopyMismatch, Refused, Unreachable
from kera.connect.kafka.connection import ANSWER_S, OURS, partitions_of, settings_of, translate, translated
from kera.connect.kafka.records import messages_of
from kera.connect.pieces import Piece, Place, Progress, Source
from kera.connect.worker import Worker
from kera.core.errors import InternalError, InvalidArgument, RecordTooLarge, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

STATE_TOPIC = "kera-connect-state"
VERSION = 1
TRANSACTION_S = 60.0
ABORT_S = 5.0
RETRY_S = 0.1


class TopicSink:
    """See `kera.connect.pieces.Sink`."""

    piece_bytes = 1 << 20

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        name: str,
        settings: Mapping[str, str],
        *,
        create: bool,
        partitions: int | None = None,
    ) -> None:
        """`name`: the copy's name. `partitions`: for a created topic; None: as many as the source has streamlets."""
        self.shown = f"topic {topic}"
        self.notes: list[str] = []
        self._topic = topic
        self._name = name
        self._create = create
        self._wanted = partitions
        self._settings = settings_of(
            bootstrap,
            settings,
            transactional_id=f"kera-connect.{name}",
            enable_idempotence=True,
            transaction_timeout_ms=int(TRANSACTION_S * 1000),
        )
        for setting, value in DEFAULTS.items():
            self._settings.setdefault(setting, value)
        self._producer: Any = None
        self._by_number = False
        self._identity = ""
        self._places: dict[str, Place] = {}
        self._records = 0
        self._worker = Worker("kafka")

    async def open(self, source: Source) -> Progress:
        """See `Sink`. Raises `SchemaMismatch`, `Refused`, `CopyMismatch`, `Unreachable`."""
        if not source.schema.equals(DEFAULT_SCHEMA):
            raise SchemaMismatch(
                f"{source.shown} has columns of its own ({', '.join(source.schema.names)}), and records of Kafka have"
                " none: copy it into files or a table"
            )
        self._identity = source.identity
        return await self._worker.call(self._open, source.streamlets)

    def _open(self, streamlets: int) -> Progress:
        import confluent_kafka as kafka
        import confluent_kafka.admin

        with translated(self.shown):
            others = {name: value for name, value in self._settings.items() if name not in OURS}
            others = {name: value for name, value in others.items() if not name.startswith(_OF_PRODUCERS)}
            others["bootstrap.servers"] = self._settings["bootstrap.servers"]
            admin = confluent_kafka.admin.AdminClient(others)
        partitions = partitions_of(admin, self._topic)
        if not partitions:
            if not self._create:
                raise Refused(f"there is no topic {self._topic!r} at {others['bootstrap.servers']}; --create makes it")
            partitions = self._wanted or streamlets or 1
            self._make(admin, self._topic, partitions, {})
            self.notes.append(f"topic {self._topic} was made, with {partitions} partitions")
        elif self._wanted not in (None, partitions):
            raise InvalidArgument(
                f"--streamlets {self._wanted}: {self.shown} exists, and has {partitions} partitions: leave the option"
                " out, or copy into another topic",
                option="--streamlets",
            )
        if not partitions_of(admin, STATE_TOPIC):
            self._make(admin, STATE_TOPIC, 1, {"cleanup.policy": "compact"})
        self._by_number = partitions == streamlets
        if not self._by_number:
            self.notes.append(
                f"the stream has {streamlets} streamlets, {self.shown} {partitions} partitions: records go where their"
                " keys say, and only those with the same key stay in order"
            )
        with translated(self.shown):
            self._producer = kafka.Producer(self._settings)
        self._in_transaction(self._producer.init_transactions, ANSWER_S * 2)
        state = self._last_state(others)
        if state is not None:
            if state["source"] != self._identity or state["topic"] != self._topic:
                raise CopyMismatch(
                    f"the copy of this name is from {state['source']} to topic {state['topic']!r}, not from"
                    f" {self._identity} to {self._topic!r}: give this one another --name"
                )
            self._places, self._records = state["places"], state["records"]
        return Progress(dict(self._places), self._records)

    def _make(self, admin: Any, topic: str, partitions: int, config: dict[str, str]) -> None:
        import confluent_kafka as kafka
        from confluent_kafka.cimpl import NewTopic

        try:
            # -1: the cluster's default number of replicas.
            admin.create_topics([NewTopic(topic, partitions, -1, config=config)])[topic].result(ANSWER_S)
        except kafka.KafkaException as error:
            if error.args[0].code() != kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                raise translate(f"topic {topic}", error.args[0]) from error
        end_s = time.monotonic() + ANSWER_S
        while partitions_of(admin, topic) < partitions:
            if time.monotonic() > end_s:
                raise Unreachable(f"topic {topic} was created, and no Kafka broker lists it yet; try again")
            time.sleep(RETRY_S)

    def _last_state(self, others: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the state of this copy in the state topic; None: it has none. The copy has no open transaction."""
        import confluent_kafka as kafka

        settings = {
            **others,
            "group.id": f"kera-connect.{self._name}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,
        }
        last: bytes | None = None
        with translated(f"topic {STATE_TOPIC}"):
            consumer = kafka.Consumer(settings)
            try:
                consumer.assign([kafka.TopicPartition(STATE_TOPIC, 0, kafka.OFFSET_BEGINNING)])
                end_s = time.monotonic() + TRANSACTION_S
                while True:
                    for message in consumer.consume(1000, RETRY_S):
                        error = message.error()
                        if error is None:
                            end_s = time.monotonic() + TRANSACTION_S
                            last = message.value() if message.key() == self._name.encode() else last
                        elif error.code() == kafka.KafkaError._PARTITION_EOF:  # noqa: SLF001
                            return None if last is None else _read_state(last)
                    if time.monotonic() > end_s:
                        raise Unreachable(f"topic {STATE_TOPIC}, which says how far the copy is, cannot be read")
            finally:
                consumer.close()

    async def settle(self, rows: Sequence[pa.RecordBatch | None]) -> Progress:
        """Raise `InternalError`: this target has no unsure writes."""
        raise InternalError("this target leaves no write in doubt", spans=len(rows))

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        """See `Sink`. Uses one transaction. Raises `CopyElsewhere`, `RecordTooLarge`, `Refused`, `Unreachable`."""
        await self._worker.call(self._put, pieces)
        return dict(self._places)

    def _put(self, pieces: Sequence[Piece]) -> None:
        if self._producer is None:
            raise InternalError("the target was not opened")
        try:
            self._transact(pieces)
        except BaseException as failed:
            with contextlib.suppress(Exception):  # if this fails, the transaction times out, and readers wait for that
                self._producer.purge()
                self._producer.abort_transaction(ABORT_S)
            error = _error_in(failed)
            if error is None:
                raise
            raise self._failure(error) from failed

    def _transact(self, pieces: Sequence[Piece]) -> None:
        places = {**self._places, **{piece.part: piece.end for piece in pieces}}
        records = self._records + sum(piece.rows.num_rows for piece in pieces)
        self._in_transaction(self._producer.begin_transaction)
        for piece in pieces:
            partition = piece.streamlet if self._by_number and piece.streamlet is not None else -1
            for time_ms, key, value, headers in messages_of(piece.rows):
                self._send(self._topic, value, key, partition, time_ms, headers)
        state = {
            "version": VERSION,
            "source": self._identity,
            "topic": self._topic,
            "records": records,
            "places": places,
        }
        self._send(STATE_TOPIC, json.dumps(state).encode(), self._name.encode(), 0, 0, [])
        self._in_transaction(self._producer.commit_transaction, TRANSACTION_S)
        self._places, self._records = places, records

    # No delivery callbacks: a commit fails if any record failed, and confluent-kafka (2.16) cannot handle callbacks
    # while an error is being raised.

    def _send(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int, time_ms: int, headers: Any
    ) -> None:
        import confluent_kafka as kafka

        while True:
            try:
                self._producer.produce(topic, value, key, partition, timestamp=time_ms, headers=headers or None)
            except BufferError:  # the queue is full
                self._producer.poll(RETRY_S)
                continue
            except kafka.KafkaException as error:
                raise self._failure(cause_of(error.args[0], self._producer)) from error
            self._producer.poll(0)
            return

    def _in_transaction(self, step: Any, *arguments: Any) -> None:
        """Do a step, and repeat it after retriable errors. Records that failed in between are never committed."""
        import confluent_kafka as kafka

        end_s = time.monotonic() + TRANSACTION_S
        while True:
            try:
                step(*arguments)
            except kafka.KafkaException as failed:
                error = failed.args[0]
                if not error.retriable() or time.monotonic() > end_s:
                    raise self._failure(error) from failed
                time.sleep(RETRY_S)
            else:
                return

    def _failure(self, error: Any) -> Exception:
        import confluent_kafka as kafka

        fenced = kafka.KafkaError.PRODUCER_FENCED, kafka.KafkaError.INVALID_PRODUCER_EPOCH
        if error.code() in (*fenced, kafka.KafkaError._FENCED):  # noqa: SLF001
            return CopyElsewhere(
                "another process runs this copy, and has taken it over; one of them is enough, or give this one another"
                " --name"
            )
        if error.code() == kafka.KafkaError.MSG_SIZE_TOO_LARGE:
            return RecordTooLarge(
                f"{self.shown}: a record is larger than Kafka takes; the limit is message.max.bytes in the file of"
                " --kafka-config, and max.message.bytes of the topic"
            )
        return translate(self.shown, error)

    async def finish(self, *, complete: bool) -> Mapping[str, Place]:
        """See `Sink`. This target holds no records back."""
        del complete
        return dict(self._places)

    async def close(self) -> None:
        """See `Sink`."""
        self._producer = None
        self._worker.close()


DEFAULTS = {
    "linger.ms": 20,
    "queue.buffering.max.messages": 500_000,
    "partitioner": "murmur2_random",  # the partitioner of Java's producers
}
_OF_PRODUCERS = ("linger.", "queue.buffering.", "partitioner", "transaction.", "message.", "compression.", "batch.")


def cause_of(error: Any, producer: Any) -> Any:
    """Return the error that has ended a producer of Kafka's; any other error is returned as it is.

    `produce` reports a producer that has ended without the reason. Calls about its transaction report the reason.
    """
    import confluent_kafka as kafka

    if error.code() == kafka.KafkaError._FATAL:  # noqa: SLF001
        try:
            producer.abort_transaction(ABORT_S)
        except kafka.KafkaException as fatal:
            return fatal.args[0]
    return error


def _error_in(failed: BaseException | None) -> Any:
    """Return Kafka's error of a failure; None: it is not Kafka's."""
    import confluent_kafka as kafka

    return failed.args[0] if isinstance(failed, kafka.KafkaException) else None


def _read_state(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
        if found["version"] != VERSION:
            raise CopyMismatch(f"topic {STATE_TOPIC} belongs to another program (version {found['version']})")
        return {name: found[name] for name in ("source", "topic", "places", "records")}
    except (ValueError, KeyError, TypeError) as error:
        raise CopyMismatch(f"topic {STATE_TOPIC} is damaged, which says how far the copy is") from error
