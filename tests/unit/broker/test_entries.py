"""Entries are made on first use: a stream may have a million entries that are never written to."""

import pytest

from kera.broker.log.entry import Entries, Entry
from kera.core.base.ids import EntryId
from tests.unit.broker.support import BROKER_ID, Broker, Engine, chunk, stream_info


def test_only_requested_entries_are_made(engine: Engine) -> None:
    there = Entry(EntryId(7, 0, 5), engine.index)
    entries = Entries(7, 0, 64, engine.index, [there])
    assert len(entries) == 64
    assert entries.made == [there]
    assert entries[2] is entries[2]
    assert entries[2].log_id == (7, 0, 2)
    assert entries.made == [entries[2], there]
    with pytest.raises(IndexError):
        entries[64]
    assert [entry.index for entry in entries] == list(range(64))


def test_a_setting_of_all_entries_holds_for_entries_made_later(engine: Engine) -> None:
    entries = Entries(7, 0, 3, engine.index)
    entries[0].by_replicas = False
    entries.set_by_replicas(True)
    assert [entry.by_replicas for entry in entries] == [True, True, True]


def test_a_dropped_streamlet_makes_no_more_entries(engine: Engine) -> None:
    entries = Entries(7, 0, 3, engine.index)
    made = entries[1]
    entries.drop()
    assert list(entries) == [made]


async def test_opening_writing_ending_and_dropping_make_only_the_written_entry(engine: Engine) -> None:
    broker = Broker(engine, stream_info(owners=(BROKER_ID, BROKER_ID), entries=64))
    streamlets = [broker.streams.get(7).streamlets[number] for number in range(2)]
    assert [each.entries.made for each in streamlets] == [[], []]
    broker.append(chunk(3, 0))
    assert [[entry.index for entry in each.entries.made] for each in streamlets] == [[3], []]
    assert streamlets[0].available_groups() == (1, 1)
    broker.broker.orders.seal_all()
    assert [each.sealed for each in streamlets] == [True, True]
    broker.streams.drop(7)
    assert [len(each.entries.made) for each in streamlets] == [1, 0]
