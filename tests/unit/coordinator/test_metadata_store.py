"""The contract of all metadata stores. To test another store of this process, add it to `STORES`.

``tests/integration/test_metadata_store.py`` runs the same tests with a ZooKeeper.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.coordinator.store.lmdb_store import LmdbStore
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import (
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    Check,
    MetadataStore,
    StoredRecord,
    VersionConflict,
    Write,
)
from kera.core.errors import InternalError, InvalidArgument
from tests.examples import examples

WAIT_S = 20.0
"""Bound on all waiting: long, since it only ends a test that fails."""
STORES: dict[str, Callable[[Path], MetadataStore]] = {
    "memory": lambda _: MemoryStore(),
    "lmdb": lambda path: LmdbStore(path, bytes_max=64 << 20),
}


@pytest.fixture
def tmp_path(in_memory: Path) -> Path:
    return in_memory


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MetadataStore]:
    made = STORES[request.param](tmp_path)
    yield made
    await made.close()


async def test_a_record_that_was_never_written_does_not_exist(store: MetadataStore) -> None:
    assert await store.get("a") is None
    assert await store.list("") == {}


async def test_versions_count_the_writes_of_a_key_since_its_creation(store: MetadataStore) -> None:
    await store.write(Write("a", b"one", 0))
    assert await store.get("a") == StoredRecord(b"one", 1)
    await store.write(Write("a", b"", 1))
    assert await store.get("a") == StoredRecord(b"", 2)
    await store.write(Write("a", None, 2))
    assert await store.get("a") is None
    await store.write(Write("a", b"again", 0))
    assert await store.get("a") == StoredRecord(b"again", 1)


async def test_records_read_together_are_in_the_order_of_the_request(store: MetadataStore) -> None:
    await store.write(Write("a", b"one", 0), Write("b", b"two", 0))
    assert list(await store.get_each(["b", "none", "a"])) == [StoredRecord(b"two", 1), None, StoredRecord(b"one", 1)]
    assert list(await store.get_each([])) == []


@pytest.mark.parametrize("expected_version", [0, 1, 3])
@pytest.mark.parametrize("value", [b"new", None])
async def test_a_write_that_expects_another_version_is_refused(
    store: MetadataStore, value: bytes | None, expected_version: int
) -> None:
    await store.write(Write("a", b"", 0))
    await store.write(Write("a", b"there", 1))

    with pytest.raises(VersionConflict) as error:
        await store.write(Write("a", value, expected_version))

    assert error.value.attributes == {"key": "a", "expected_version": expected_version, "found_version": 2}
    assert await store.get("a") == StoredRecord(b"there", 2)


async def test_a_write_that_expects_a_missing_record_is_refused(store: MetadataStore) -> None:
    for value in (b"", None):
        with pytest.raises(VersionConflict):
            await store.write(Write("a", value, 1))


async def test_a_refused_write_changes_none_of_its_records(store: MetadataStore) -> None:
    await store.write(Write("a", b"1", 0), Write("b", b"1", 0))

    with pytest.raises(VersionConflict):
        await store.write(Write("new", b"2", 0), Write("a", None, 1), Write("b", b"2", 7))

    assert await store.list("") == {"a": StoredRecord(b"1", 1), "b": StoredRecord(b"1", 1)}


async def test_a_write_changes_all_of_its_records(store: MetadataStore) -> None:
    await store.write(Write("a", b"1", 0), Write("b", b"1", 0))

    await store.write(Write("new", b"2", 0), Write("a", None, 1), Write("b", b"2", 1))

    assert await store.list("") == {"b": StoredRecord(b"2", 2), "new": StoredRecord(b"2", 1)}


@pytest.mark.parametrize("key", ["a", "not there"])
async def test_a_write_can_depend_on_the_version_of_an_unchanged_record(store: MetadataStore, key: str) -> None:
    await store.write(Write("a", b"1", 0))
    version = 1 if key == "a" else 0

    await store.write(Check(key, version), Write("b", b"1", 0))
    with pytest.raises(VersionConflict) as error:
        await store.write(Write("b", b"2", 1), Check(key, version + 1))

    assert error.value.attributes == {"key": key, "expected_version": version + 1, "found_version": version}
    assert await store.list("") == {"a": StoredRecord(b"1", 1), "b": StoredRecord(b"1", 1)}


async def test_a_write_that_depends_on_the_absence_of_an_existing_record_is_refused(store: MetadataStore) -> None:
    await store.write(Write("a", b"1", 0))

    with pytest.raises(VersionConflict):
        await store.write(Write("b", b"1", 0), Check("a", 0))

    assert await store.list("") == {"a": StoredRecord(b"1", 1)}


async def test_deleting_a_missing_record_checks_that_it_is_missing(store: MetadataStore) -> None:
    await store.write(Write("a", None, 0), Write("b", b"1", 0))

    with pytest.raises(VersionConflict):
        await store.write(Write("b", None, 0))

    assert await store.list("") == {"b": StoredRecord(b"1", 1)}


async def test_a_write_whose_caller_gives_up_is_carried_out(store: MetadataStore) -> None:
    writing = asyncio.create_task(store.write(Write("a", b"1", 0), Write("b", b"1", 0)))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    async with asyncio.timeout(WAIT_S):
        while not await store.get("a"):
            await asyncio.sleep(0.001)

    assert await store.list("") == {"a": StoredRecord(b"1", 1), "b": StoredRecord(b"1", 1)}


async def test_any_text_can_be_a_key(store: MetadataStore) -> None:
    keys = ["", ".", "..", "+", "++", "%", "a/", "/", "//", "a//b", "a/b/c", "a/%2F", "ä/ö", "a b", "\n"]
    for key in keys[1:]:
        await store.write(Write(key, key.encode(), 0))

    assert await store.list("") == {key: StoredRecord(key.encode(), 1) for key in sorted(keys[1:])}
    for prefix in keys:
        assert list(await store.list(prefix)) == sorted(key for key in keys[1:] if key.startswith(prefix))
        assert (await store.get(prefix) if prefix else None) == (StoredRecord(prefix.encode(), 1) if prefix else None)


async def test_a_list_is_a_consistent_snapshot(store: MetadataStore) -> None:
    async def write_both() -> None:
        for version in range(50):
            await store.write(Write("a", b"%d" % version, version), Write("b/c", b"%d" % version, version))

    writing = asyncio.create_task(write_both())
    seen = 0
    while not writing.done():
        records = await store.list("")
        assert records.get("a") == records.get("b/c")
        seen += 1
        await asyncio.sleep(0)
    await writing

    assert seen
    assert await store.list("a") == {"a": StoredRecord(b"49", 50)}


async def test_a_list_has_the_keys_with_the_prefix_in_order(store: MetadataStore) -> None:
    for key in ("streams/2", "streams/1", "stream", "streams0", "brokers/1", "ströme/1"):
        await store.write(Write(key, key.encode(), 0))

    assert list(await store.list("streams/")) == ["streams/1", "streams/2"]
    assert list(await store.list("t")) == []
    assert list(await store.list("")) == ["brokers/1", "stream", "streams/1", "streams/2", "streams0", "ströme/1"]
    assert await store.keys() == (await store.list("")).keys()


async def test_a_value_over_the_limit_is_refused(store: MetadataStore) -> None:
    await store.write(Write("a", b"x" * VALUE_BYTES_MAX, 0))

    with pytest.raises(InvalidArgument, match=f"the limit is {VALUE_BYTES_MAX}"):
        await store.write(Write("b", b"x" * (VALUE_BYTES_MAX + 1), 0))

    assert list(await store.list("")) == ["a"]


async def test_an_empty_or_overlong_key_is_refused(store: MetadataStore) -> None:
    await store.write(Write("k" * KEY_BYTES_MAX, b"", 0))
    for key in ("", "k" * (KEY_BYTES_MAX + 1)):
        with pytest.raises(InternalError):
            await store.write(Write(key, b"", 0))


async def test_a_write_with_two_values_for_a_record_is_refused(store: MetadataStore) -> None:
    with pytest.raises(InternalError):
        await store.write(Write("a", b"1", 0), Write("a", b"2", 1))


async def test_only_one_of_several_concurrent_writes_wins(store: MetadataStore) -> None:
    results = await asyncio.gather(
        *(store.write(Write("a", bytes([writer]), 0)) for writer in range(8)), return_exceptions=True
    )

    assert [result for result in results if not isinstance(result, VersionConflict)] == [None]
    assert await store.get("a") == StoredRecord(bytes([results.index(None)]), 1)


KEYS = st.sampled_from(["a", "a/", "a/b", "b"])
VERSIONS = st.integers(0, 3)
WRITES = st.lists(
    st.builds(Write, KEYS, st.none() | st.binary(max_size=3), VERSIONS) | st.builds(Check, KEYS, VERSIONS),
    min_size=1,
    max_size=3,
    unique_by=lambda write: write.key,
)


async def compare(real: MetadataStore, history: list[list[Write | Check]]) -> None:
    """Run a history on a store and on the memory store, and compare the outcomes."""

    async def outcome(store: MetadataStore, writes: list[Write | Check]) -> str:
        try:
            await store.write(*writes)
        except VersionConflict as error:
            return error.message
        return "written"

    fake = MemoryStore()
    for writes in history:
        assert await outcome(real, writes) == await outcome(fake, writes)
        assert await real.list("") == await fake.list("")
        assert await real.list("a/") == await fake.list("a/")


@settings(max_examples=examples(50, quick=25), deadline=None)
@given(st.lists(WRITES, max_size=20))
def test_the_lmdb_store_behaves_like_the_memory_store(history: list[list[Write | Check]]) -> None:
    async def run(path: Path) -> None:
        real = LmdbStore(path, bytes_max=1 << 20)
        await compare(real, history)
        await real.close()

    with TemporaryDirectory() as path:
        asyncio.run(run(Path(path)))
