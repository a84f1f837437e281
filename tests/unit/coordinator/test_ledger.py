import pytest

from kera.coordinator.store.ledger import Ledger, number
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import VersionConflict, Write


async def test_a_write_changes_both_memory_and_the_store() -> None:
    store = MemoryStore()
    ledger = await Ledger.load(store)
    await ledger.write({"a": b"1", "b": b"1"})
    await ledger.write({"a": b"2", "b": None})
    await ledger.write({"b": b"3"})

    for mirror in (ledger, await Ledger.load(store)):
        assert (mirror.get("a"), mirror.get("b"), mirror.get("c")) == (b"2", b"3", None)


async def test_values_are_in_the_order_of_their_keys() -> None:
    ledger = await Ledger.load(MemoryStore())
    await ledger.write({"x/2": b"2", "x/1": b"1", "y/1": b"no"})

    assert ledger.values("x/") == [b"1", b"2"]


async def test_a_failed_write_leaves_memory_as_it_was() -> None:
    store = MemoryStore()
    ledger = await Ledger.load(store)
    await ledger.write({"a": b"1"})
    await store.write(Write("a", b"another coordinator's", 1))

    with pytest.raises(VersionConflict):
        await ledger.write({"a": b"2", "b": b"2"})

    assert (ledger.get("a"), ledger.get("b")) == (b"1", None)


async def test_numbers_start_at_one_and_are_taken_by_writing_them() -> None:
    ledger = await Ledger.load(MemoryStore())
    assert ledger.next_number("last") == 1
    assert ledger.next_number("last") == 1
    await ledger.write({"last": number(1)})
    assert ledger.next_number("last") == 2


async def test_children_are_the_direct_keys_below_a_path() -> None:
    store = MemoryStore()
    ledger = await Ledger.load(store)
    await ledger.write({"x/1/b": b"1", "x/1/a": b"1", "x/2/a": b"1", "x/1": b"1"})
    await ledger.write({"x/1/b": b"2", "x/2/a": None})
    for mirror in (ledger, await Ledger.load(store)):
        assert mirror.children("x/1") == ["x/1/a", "x/1/b"]
        assert mirror.children("x/2") == []
        assert mirror.children("x") == ["x/1"]
