"""The checkers of recovery and migration notice each kind of damage: a check that cannot fail proves nothing."""

import contextlib
import time
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Delivery, EntryId, Position, RecoveryDescription
from tests.chaos.verdict import Wrong
from tests.integration.control_support import (
    WRITER_RECORDS,
    Reader,
    Timeline,
    Writer,
    _longest_gap_s,
    check_log,
    record_number,
)
from tests.integration.support import value_of

STREAMLETS = 2
COUNT = 6
Stored = list[tuple[int, int]]
"""The writer and number of each record of one streamlet, in order."""


def stream() -> Any:
    return SimpleNamespace(name="s", config=SimpleNamespace(streamlets=STREAMLETS, entries=1))


class Client:
    """A client whose stream has exactly these records, one in each chunk."""

    def __init__(self, stored: dict[int, Stored]) -> None:
        self.stored = stored
        self.values = {number: value_of(number) for log in stored.values() for _, number in log}
        self.first_ordinals = [0, 0]

    async def describe(self, _: str) -> Any:
        return stream()

    @contextlib.asynccontextmanager
    async def consumer(self, *_: str, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(batches=self._batches, positions=dict)

    async def _batches(self) -> AsyncIterator[Any]:
        for streamlet, log in self.stored.items():
            for ordinal, (_, number) in enumerate(log, self.first_ordinals[streamlet]):
                yield SimpleNamespace(
                    entry=EntryId(1, streamlet, 0),
                    header=SimpleNamespace(first_record=ordinal),
                    batch=pa.record_batch({"value": [self.values[number]]}),
                )


def sound() -> tuple[Client, list[Writer]]:
    """A correct stream, and its two writers."""
    stored: dict[int, Stored] = {streamlet: [] for streamlet in range(STREAMLETS)}
    writers = []
    for number in range(2):
        writer = Writer.__new__(Writer)
        writer.number = number
        writer.deliveries = [[] for _ in range(STREAMLETS)]
        writers.append(writer)
    for at in range(COUNT):
        for writer in writers:
            for streamlet in range(STREAMLETS):
                entry = EntryId(1, streamlet, 0)
                ordinal = len(stored[streamlet])
                writer.deliveries[streamlet].append(
                    Delivery("s", entry, Position(1, 1, 0), ordinal, 1, "replicated", duplicate=False)
                )
                stored[streamlet].append((writer.number, record_number(writer.number, streamlet, at, STREAMLETS)))
    return Client(stored), writers


async def test_a_correct_stream_passes() -> None:
    client, writers = sound()
    assert await check_log(client, "s", writers) == 2 * STREAMLETS * COUNT  # type: ignore[arg-type]  # has what it uses


def lose_the_last(client: Client, _: list[Writer]) -> None:
    client.stored[1].pop()


def lose_one(client: Client, _: list[Writer]) -> None:
    client.stored[0].pop(3)


def repeat_one(client: Client, _: list[Writer]) -> None:
    client.stored[0].insert(4, client.stored[0][4])


def repeat_the_last(client: Client, _: list[Writer]) -> None:
    client.stored[0].append(client.stored[0][-1])


def swap_two_of_a_writer(client: Client, _: list[Writer]) -> None:
    log = client.stored[0]
    log[2], log[4] = log[4], log[2]


def swap_two_of_different_writers(client: Client, _: list[Writer]) -> None:
    log = client.stored[0]
    log[2], log[3] = log[3], log[2]  # the order of each producer is kept, but not the acknowledged places


def put_one_elsewhere(client: Client, _: list[Writer]) -> None:
    client.stored[1].insert(0, client.stored[0].pop())


def change_a_byte(client: Client, _: list[Writer]) -> None:
    number = client.stored[0][0][1]
    client.values[number] = client.values[number][:-1] + bytes([client.values[number][-1] ^ 1])


def leave_out_an_ordinal(client: Client, _: list[Writer]) -> None:
    client.first_ordinals[1] = 1


def add_what_nobody_acknowledged(client: Client, writers: list[Writer]) -> None:
    number = record_number(0, 0, COUNT, STREAMLETS)
    client.values[number] = value_of(number)
    client.stored[0].append((0, number))
    assert writers


DAMAGES = [
    lose_the_last,
    lose_one,
    repeat_one,
    repeat_the_last,
    swap_two_of_a_writer,
    swap_two_of_different_writers,
    put_one_elsewhere,
    change_a_byte,
    leave_out_an_ordinal,
    add_what_nobody_acknowledged,
]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_the_check_notices_damage(damage: Any) -> None:
    client, writers = sound()
    damage(client, writers)
    with pytest.raises(AssertionError):
        await check_log(client, "s", writers)  # type: ignore[arg-type]  # has what it uses


async def test_a_reader_that_lacks_records_and_one_with_too_many_get_different_errors() -> None:
    client, writers = sound()
    found = Reader(client, stream())  # type: ignore[arg-type]  # has what it uses
    await found.read()
    await found.catch_up(writers, timeout_s=1.0)
    writers[0].deliveries[0].append(writers[0].deliveries[0][-1])
    with pytest.raises(Wrong, match=f"{2 * STREAMLETS * COUNT} of"):
        await found.catch_up(writers, timeout_s=0.05)
    del writers[0].deliveries[0][-2:]
    with pytest.raises(Wrong, match="were acknowledged"):
        await found.catch_up(writers, timeout_s=1.0)


def test_each_writer_has_a_range_of_numbers_of_its_own() -> None:
    assert record_number(1, 0, 0, 4) == WRITER_RECORDS
    assert record_number(0, 3, 5, 4) == 23


@pytest.mark.parametrize(
    ("begun_s", "ended_s", "longest_s"),
    [(0.0, 10.0, 3.0), (4.5, 4.6, 3.0), (0.0, 1.5, 1.0), (6.5, 7.0, 0.5), (8.0, 9.0, 0.0)],
)
def test_a_stall_is_the_longest_gap_that_touches_a_period(begun_s: float, ended_s: float, longest_s: float) -> None:
    assert _longest_gap_s(array("d", [1.0, 2.0, 3.0, 6.0, 6.5, 7.0]), begun_s, ended_s) == longest_s


def test_a_timeline_counts_from_the_kill() -> None:
    killed_us = time.time_ns() // 1000
    info = SimpleNamespace(
        broker_id=1,
        cause="dead",
        phase="recovering",
        detected_us=killed_us + 1_000_000,
        fenced_us=killed_us + 1_100_000,
        opened_us=killed_us + 1_200_000,
        readable_us=killed_us + 1_600_000,
        restored_us=0,
        bytes_recovered=50_000_000,
        streamlets_total=3,
        owner_ids=[3, 2],
    )
    timeline = Timeline(_description(info), killed_us, 1.25)
    text = str(timeline)
    assert "detected 1.000 s, fenced 1.100 s" in text
    assert "longest without acknowledgement 1.250 s" in text
    assert "all readable 1.600 s, all restored -" in text
    assert timeline.gb_per_s == pytest.approx(0.1)


def _description(info: Any) -> RecoveryDescription:
    return info  # type: ignore[no-any-return]  # has what it uses
