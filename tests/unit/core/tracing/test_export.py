"""Export of spans to a collector: a slow or missing collector does not delay the program."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kera.core.tracing.export import BATCH_MAX, Exporting

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30


class Collector:
    """Takes spans while `may` is set."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.batches = 0
        self.may = threading.Event()
        self.may.set()
        self.asked = threading.Event()
        self.answer: bool | Exception = True

    def __call__(self, spans: Sequence[Any], /) -> bool:
        self.asked.set()
        assert self.may.wait(WAIT_S)
        self.batches += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer:
            self.taken += spans
        return self.answer


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.may.set()


def test_spans_arrive_in_order_and_in_batches(collector: Collector) -> None:
    exporting = Exporting(collector)
    for number in range(2 * BATCH_MAX + 1):
        exporting.add(number)
    assert exporting.flush(WAIT_S)
    assert collector.taken == list(range(2 * BATCH_MAX + 1))
    assert collector.batches >= 3
    exporting.close()
    exporting._thread.join(WAIT_S)
    assert not exporting._thread.is_alive()


def test_a_hanging_collector_does_not_block_and_the_queue_is_limited(collector: Collector) -> None:
    collector.may.clear()
    exporting = Exporting(collector, queue_max=10)
    exporting.add(0)
    with exporting._changed:
        exporting._changed.notify_all()
    assert collector.asked.wait(WAIT_S)
    for number in range(1, 100):
        exporting.add(number)
    assert (len(exporting._queue), exporting.dropped) == (10, 89)
    assert not exporting.flush(0)
    collector.may.set()
    assert exporting.flush(WAIT_S)
    assert collector.taken == list(range(11))
    exporting.close()


@pytest.mark.parametrize("answer", [False, ConnectionError("nobody is there")], ids=["refused", "unreachable"])
def test_lost_spans_are_logged_once_a_minute(
    collector: Collector, answer: bool | Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    collector.answer, now = answer, [1000.0]
    exporting = Exporting(collector, now_s=lambda: now[0])
    for number in range(5):
        exporting.add(number)
        assert exporting.flush(WAIT_S)
    now[0] += 61
    exporting.add(5)
    assert exporting.flush(WAIT_S)
    exporting.close()
    exporting._thread.join(WAIT_S)
    assert capfd.readouterr().err.count("spans were not exported") == 2


def test_spans_after_the_end_are_dropped(collector: Collector) -> None:
    exporting = Exporting(collector)
    exporting.close()
    exporting._thread.join(WAIT_S)  # it would log the loss, and count from 0 again
    exporting.add(1)
    assert collector.taken == []
    assert exporting.dropped == 1
