"""Any two readers get equal epochs, at any time and speed, in any history of entries and their brokers.

Readers are the pure part of `kera.client.epochs`. Brokers are a model (tests/epochs_model.py);
tests/unit/broker/test_epochs.py compares the real ones with the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.client.epochs.merging import Reached, decide
from tests.epochs_model import LONG_AGO, Owner
from tests.examples import examples

EPOCH, GRACE, ENTRIES = 10, 6, 3


class Reader:
    """A reader of all entries: reads as far as the test lets it, and gives epochs out when they are closed."""

    def __init__(self, owners: list[Owner]) -> None:
        self.owners = owners
        self.read = [0] * len(owners)
        self.watermarks = [LONG_AGO] * len(owners)
        self.promises = [(LONG_AGO, 0)] * len(owners)
        self.pending: list[list[tuple[int, int]]] = [[] for _ in owners]
        self.epochs: dict[int, list[list[int]]] = {}

    def step(self, entry: int, chunks: int, now: int | None) -> None:
        """Read `chunks` chunks of an entry, and with `now` the promise of its broker."""
        log = self.owners[entry].log
        for kind, time, number in log[self.read[entry] : self.read[entry] + chunks]:
            self.watermarks[entry] = max(self.watermarks[entry], time)
            if kind == "chunk":
                self.pending[entry].append((self.watermarks[entry] // EPOCH, number))
            self.read[entry] += 1
        if now is not None:
            self.promises[entry] = max(self.promises[entry], self.owners[entry].promise(now))
        self.take()

    def take(self) -> None:
        while True:
            reached = [Reached(entry, *self._reached(entry)) for entry in range(len(self.owners))]
            decision = decide(reached)
            if decision.epoch is None or decision.waits_for:
                return
            found = []
            for pending in self.pending:
                found.append([number for epoch, number in pending if epoch == decision.epoch])
                pending[:] = [each for each in pending if each[0] != decision.epoch]
            assert decision.epoch not in self.epochs, "an epoch was given out before all of it had come"
            assert not self.epochs or decision.epoch > max(self.epochs), "epochs go back"
            self.epochs[decision.epoch] = found

    def _reached(self, entry: int) -> tuple[int | None, int]:
        promised, at = self.promises[entry]
        settled = max(self.watermarks[entry], promised if self.read[entry] >= at else LONG_AGO)
        pending = self.pending[entry][0][0] if self.pending[entry] else None
        return pending, settled // EPOCH


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, ENTRIES - 1), st.integers(-30, 8)),
        st.tuples(st.just("time"), st.just(0), st.integers(1, 15)),
        st.tuples(st.just("read"), st.integers(0, ENTRIES - 1), st.integers(0, 3)),
        st.tuples(st.just("ask"), st.integers(0, ENTRIES - 1), st.integers(0, 3)),
        st.tuples(st.just("lost"), st.integers(0, ENTRIES - 1), st.just(0)),
        st.tuples(st.just("say"), st.integers(0, ENTRIES - 1), st.integers(-20, 20)),
        st.tuples(st.just("moved"), st.integers(0, ENTRIES - 1), st.just(0)),
    ),
    max_size=80,
)


def run(history: list[tuple[str, int, int]], *, punctuates: bool = True) -> Iterator[Reader]:
    """A reader that reads during the history, and others that come at its end."""
    owners = [Owner(GRACE, punctuates=punctuates) for _ in range(ENTRIES)]
    eager, now = Reader(owners), 100
    for owner in owners:
        owner.begin(now - GRACE)
    for number, (what, entry, amount) in enumerate(history):
        if what == "append":
            owners[entry].append(now + amount, number)
        elif what == "time":
            now += amount
        elif what in {"read", "ask"}:
            eager.step(entry, amount, now if what == "ask" else None)
        elif what == "say":
            owners[entry].say(now + amount)
        elif what == "lost":
            owners[entry].begin(now)
    end = now + 1000
    yield eager
    for chunks in (1, 2, 10**6):
        late = Reader(owners)
        for _ in range(10**6 // chunks if chunks > 2 else 200):
            for entry in range(ENTRIES):
                late.step(entry, chunks, end)
            if all(late.read[entry] == len(owners[entry].log) for entry in range(ENTRIES)):
                break
        yield late


@given(steps)
@settings(max_examples=examples(400, quick=150))
def test_readers_at_any_time_and_speed_get_equal_epochs(history: list[tuple[str, int, int]]) -> None:
    eager, *late = run(history)
    for reader in late:
        assert reader.epochs == late[0].epochs
        assert {number: reader.epochs.get(number) for number in eager.epochs} == eager.epochs
        given_out = [number for epoch in reader.epochs.values() for entry in epoch for number in entry]
        assert sorted(given_out) == sorted(
            number for owner in reader.owners for kind, _, number in owner.log if kind == "chunk"
        )


def test_readers_get_different_epochs_without_punctuations() -> None:
    history = [("ask", 0, 0), ("ask", 1, 0), ("append", 2, 8), ("time", 0, 40), ("ask", 0, 0), ("ask", 1, 0)]
    history += [("ask", 2, 3), ("append", 0, -35), ("append", 2, 0)]
    kept = list(run(history))
    assert all(reader.epochs == kept[1].epochs for reader in kept[1:])
    assert all(kept[1].epochs[number] == found for number, found in kept[0].epochs.items())
    broken = list(run(history, punctuates=False))
    assert broken[0].epochs
    assert any(broken[1].epochs[number] != found for number, found in broken[0].epochs.items())


def test_an_entry_without_a_chunk_in_an_epoch_does_not_shift_records() -> None:
    """In listing 5.1 of the dissertation it does."""
    history: list[Any] = [("append", 0, -5), ("append", 1, -4), ("time", 0, 30), ("append", 0, 0), ("time", 0, 30)]
    history += [("append", 0, 0), ("append", 1, 1), ("append", 2, 2)]
    for reader in list(run(history))[1:]:
        assert reader.epochs == {9: [[0], [1], []], 13: [[3], [], []], 16: [[5], [6], [7]]}


@pytest.mark.parametrize("amount", [-30, 8])
def test_a_chunk_is_read_once_for_any_timestamp(amount: int) -> None:
    for reader in list(run([("append", 0, amount)]))[1:]:
        assert sum(len(entry) for found in reader.epochs.values() for entry in found) == 1
