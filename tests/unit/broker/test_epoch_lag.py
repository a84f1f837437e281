"""Epoch lag: how far the entries of a stream are settled, measured without making promises."""

from __future__ import annotations

from typing import Any

import pytest

from kera.broker.ownership.epoch_lag import Furthest, furthest_behind
from kera.core.base.turns import at_once
from kera.v1 import common_pb2
from tests.unit.broker.support import BROKER_ID, Broker, Engine, chunk, stream_info

NOW_US = 1_000_000_000
GRACE_US = 1_000_000
CREATED_US = NOW_US - 7000
ENTRIES = 2


def open_broker(engine: Engine, **config: Any) -> Broker:
    set_time(engine, NOW_US)
    info = stream_info(**{"epoch_ms": 1000, "epoch_grace_ms": GRACE_US // 1000, "entries": ENTRIES, **config})
    info.created_us = CREATED_US
    broker = Broker(engine)
    broker.broker.registered(BROKER_ID, ())
    at_once(broker.streams.opening(info, BROKER_ID, created=True))
    return broker


def set_time(engine: Engine, now_us: int) -> None:
    engine.memory.tick(engine.memory.now_ms, now_us, idle_close_ms=1 << 40)


def look(broker: Broker, *, promises: bool = True) -> Furthest | None:
    (stream,) = broker.streams
    return at_once(furthest_behind(stream, broker.engine.memory.now_us, lambda _: promises))


def append(broker: Broker, producer: int, time_us: int, sequence: int = 0) -> None:
    broker.append(chunk(producer, sequence, min_timestamp_us=time_us, max_timestamp_us=time_us))


async def test_entries_by_clock_are_settled_as_far_as_the_broker_would_promise(engine: Engine) -> None:
    broker = open_broker(engine)
    entries = broker.streams.streamlet(7, 0).entries
    assert look(broker) == (NOW_US - GRACE_US, 0, 0)
    append(broker, 0, NOW_US)
    assert look(broker) == (NOW_US - GRACE_US, 0, 1), "the other one has got something of now"
    append(broker, 1, NOW_US + 5)
    assert look(broker) == (NOW_US, 0, 0)
    set_time(engine, NOW_US + 9 * GRACE_US)
    assert look(broker) == (NOW_US + 8 * GRACE_US, 0, 0)
    assert {entry.promised_us for entry in entries.made} == {-(1 << 63)}, "nobody was promised anything"


async def test_a_broker_that_promises_nothing_is_settled_as_far_as_its_records(engine: Engine) -> None:
    broker = open_broker(engine)
    append(broker, 0, NOW_US - 5)
    assert look(broker, promises=False) == (CREATED_US, 0, 1), "nothing has come: since there is such a stream"
    append(broker, 1, NOW_US - 9)
    assert look(broker, promises=False) == (NOW_US - 9, 0, 1)
    broker.streams.streamlet(7, 0).entries[1].promised_us = NOW_US - 3
    assert look(broker, promises=False) == (NOW_US - 5, 0, 0), "what was promised is kept"


async def test_entries_by_producers_are_settled_as_far_as_their_records(engine: Engine) -> None:
    broker = open_broker(engine, punctuation=common_pb2.PUNCTUATION_PRODUCERS)
    assert look(broker) is None
    append(broker, 1, 4000)
    assert look(broker) == (4000, 0, 1)
    append(broker, 1, NOW_US + 1, 1)
    furthest = look(broker)
    assert furthest is not None
    assert [furthest.lag_ms(NOW_US), Furthest(4000, 0, 0).lag_ms(1_004_999)] == [0, 1000]


@pytest.mark.parametrize("owned", [True, False])
async def test_only_owned_streamlets_with_epochs_count(engine: Engine, owned: bool) -> None:
    broker = open_broker(engine, epoch_ms=1000 if owned else 0)
    broker.streams.streamlet(7, 0).owned = not owned
    assert look(broker) is None


async def test_a_sealed_streamlet_makes_no_new_promise(engine: Engine) -> None:
    broker = open_broker(engine)
    append(broker, 0, NOW_US)
    append(broker, 1, NOW_US)
    broker.streams.streamlet(7, 0).seal()
    set_time(engine, NOW_US + 9 * GRACE_US)
    assert look(broker) == (NOW_US, 0, 0)
