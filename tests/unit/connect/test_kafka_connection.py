"""Clients of Kafka, without a broker."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from kera.connect.errors import Unreachable
from kera.connect.kafka.connection import admin_of, settings_of
from kera.connect.kafka.sink import cause_of
from kera.connect.kafka.source import TopicSource


def test_an_admin_client_writes_nothing_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    admin = admin_of(settings_of("127.0.0.1:1", {}, group_id="readers", enable_auto_commit=False))

    with pytest.raises(confluent_kafka.KafkaException):
        admin.list_topics(timeout=0.2)
    del admin

    assert capfd.readouterr().err == ""


class Consumer:
    """Each poll takes 10 s; the test gives the answers."""

    def __init__(self, clock: Clock, answers: Iterable[int | None]) -> None:
        self._clock, self._answers = clock, iter(answers)

    def assign(self, _: object) -> None:
        pass

    def consume(self, *_: object) -> list[Any]:
        self._clock.now_s += 10
        answer = next(self._answers)
        if answer is None:
            return []
        error = confluent_kafka.KafkaError(answer)
        return [SimpleNamespace(partition=lambda: -1, offset=lambda: None, error=lambda: error)]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("answer", [None, confluent_kafka.KafkaError._ALL_BROKERS_DOWN])
def test_a_copy_to_the_current_end_fails_when_no_broker_answers(
    answer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("kera.connect.kafka.source.time.monotonic", clock)
    source = TopicSource("127.0.0.1:1", "t", "copy", {}, follow=False)
    source._consumer = Consumer(clock, [answer] * 20)

    with pytest.raises(Unreachable, match="has sent nothing for 60 s"):
        list(source._messages({0: 0}, {0: 5}))
    assert clock.now_s == 70


def test_a_slow_target_does_not_count_as_silence_of_the_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("kera.connect.kafka.source.time.monotonic", clock)
    source = TopicSource("127.0.0.1:1", "t", "copy", {}, follow=False)
    end_of_partition = confluent_kafka.KafkaError._PARTITION_EOF
    source._consumer = Consumer(clock, [end_of_partition, None, None, None])

    messages = source._messages({0: 0}, {0: 5})
    for _ in range(3):
        assert next(messages) == (0, [])
        clock.now_s += 1000


class Ended:
    """A producer that has ended; calls about its transaction report the reason."""

    def abort_transaction(self, _timeout_s: float) -> None:
        raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._FENCED))


@pytest.mark.parametrize(
    ("reported", "cause"),
    [
        (confluent_kafka.KafkaError._FATAL, confluent_kafka.KafkaError._FENCED),
        (confluent_kafka.KafkaError._QUEUE_FULL, confluent_kafka.KafkaError._QUEUE_FULL),
    ],
)
def test_the_reason_why_a_producer_has_ended_is_found(reported: int, cause: int) -> None:
    assert cause_of(confluent_kafka.KafkaError(reported), Ended()).code() == cause
