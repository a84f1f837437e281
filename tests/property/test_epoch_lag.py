"""The entry of a stream that is furthest behind, against a look at all entries, also at those not made yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kera.broker.log.epochs import EpochRules
from kera.broker.ownership.epoch_lag import furthest_behind
from kera.core.base.turns import at_once
from kera.core.format.punctuation import NO_TIME
from tests.examples import examples

CREATED_US, NOW_US = 50, 1000
TIMES = st.one_of(st.just(NO_TIME), st.integers(-5, NOW_US + 5))


@st.composite
def streamlets(draw: st.DrawFn, rules: EpochRules, streamlet_id: int) -> Any:
    count = draw(st.integers(1, 4))
    made = draw(st.sets(st.integers(0, count - 1)))
    first_promise_us = draw(TIMES)

    def entry(index: int) -> Any:
        promised_us = max(first_promise_us, draw(TIMES))
        tail = [SimpleNamespace(max_timestamp_us=time_us) for time_us in draw(st.lists(TIMES, max_size=2))]
        return SimpleNamespace(index=index, promised_us=promised_us, stored_watermark_us=draw(TIMES), tail=tail)

    class Entries(SimpleNamespace):
        def __len__(self) -> int:
            return count

    entries = Entries(made_by_index={index: entry(index) for index in made}, first_promise_us=first_promise_us)
    owned = draw(st.booleans())
    takes_chunks = owned and draw(st.booleans())
    return SimpleNamespace(
        streamlet_id=streamlet_id, entries=entries, owned=owned, takes_chunks=takes_chunks, epochs=rules
    )


@st.composite
def streams(draw: st.DrawFn) -> Any:
    rules = EpochRules(by_clock=draw(st.booleans()), grace_us=draw(st.integers(1, 99)))
    found = {number: draw(streamlets(rules, number)) for number in range(draw(st.integers(0, 3)))}
    return SimpleNamespace(epochs=rules, created_us=CREATED_US, streamlets=found)


def all_settled(stream: Any, *, promises: bool) -> list[tuple[int, int, int]]:
    """The settled time of each entry that can delay an epoch, one by one."""
    found = []
    for streamlet in stream.streamlets.values():
        for index in range(len(streamlet.entries)) if streamlet.owned else ():
            entry = streamlet.entries.made_by_index.get(index)
            times = [streamlet.entries.first_promise_us]
            if entry is not None:
                times = [entry.promised_us, entry.stored_watermark_us, *(each.max_timestamp_us for each in entry.tail)]
            if stream.epochs.by_clock and promises and streamlet.takes_chunks:
                times.append(NOW_US - stream.epochs.grace_us)
            time_us = max(times)
            if time_us == NO_TIME and stream.epochs.by_clock:
                time_us = CREATED_US
            if time_us != NO_TIME and (entry is not None or stream.epochs.by_clock):
                found.append((time_us, streamlet.streamlet_id, index))
    return found


@settings(max_examples=examples(2000))
@given(streams(), st.booleans())
def test_the_entry_that_is_furthest_behind_is_found(stream: Any, promises: bool) -> None:
    found = at_once(furthest_behind(stream, NOW_US, lambda _: promises))
    expected = all_settled(stream, promises=promises)
    if not expected:
        assert found is None
        return
    assert found is not None
    assert found in expected
    assert found.settled_us == min(expected)[0]
