"""The metadata store on a real ZooKeeper: the promises of every store, and failures of ZooKeeper."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kazoo.protocol import serialization

from kera.coordinator.store import zookeeper_election, zookeeper_session
from kera.coordinator.store.ledger import Ledger
from kera.coordinator.store.metadata import (
    Check,
    MetadataDamaged,
    MetadataStore,
    MetadataStoreFailed,
    MetadataStoreFull,
    StoredRecord,
    UnknownFormat,
    VersionConflict,
    Write,
)
from kera.coordinator.store.metadata_copy import RESTORED, pack, put_back
from kera.coordinator.store.zookeeper_election import ZooKeeperElection
from kera.coordinator.store.zookeeper_layout import candidates_path, pending_path, records_path, staged_path
from kera.coordinator.store.zookeeper_session import (
    Lost,
    Operation,
    Watch,
    ZooKeeperAddress,
    ZooKeeperSession,
    ZooKeeperUnreachable,
    put,
)
from kera.coordinator.store.zookeeper_store import ZooKeeperStore
from kera.core.errors import InternalError, KeraError
from tests.examples import examples
from tests.integration.zookeeper import TICK_MS, ZooKeeper
from tests.unit.coordinator.test_metadata_store import (
    WRITES,
    compare,
    test_a_list_has_the_keys_with_the_prefix_in_order,
    test_a_list_is_a_consistent_snapshot,
    test_a_record_that_was_never_written_does_not_exist,
    test_a_refused_write_changes_none_of_its_records,
    test_a_value_over_the_limit_is_refused,
    test_a_write_can_depend_on_the_version_of_an_unchanged_record,
    test_a_write_changes_all_of_its_records,
    test_a_write_that_depends_on_the_absence_of_an_existing_record_is_refused,
    test_a_write_that_expects_a_missing_record_is_refused,
    test_a_write_that_expects_another_version_is_refused,
    test_a_write_whose_caller_gives_up_is_carried_out,
    test_a_write_with_two_values_for_a_record_is_refused,
    test_an_empty_or_overlong_key_is_refused,
    test_any_text_can_be_a_key,
    test_deleting_a_missing_record_checks_that_it_is_missing,
    test_only_one_of_several_concurrent_writes_wins,
    test_records_read_together_are_in_the_order_of_the_request,
    test_versions_count_the_writes_of_a_key_since_its_creation,
)

__all__ = [
    "test_a_list_has_the_keys_with_the_prefix_in_order",
    "test_a_list_is_a_consistent_snapshot",
    "test_a_record_that_was_never_written_does_not_exist",
    "test_a_refused_write_changes_none_of_its_records",
    "test_a_value_over_the_limit_is_refused",
    "test_a_write_can_depend_on_the_version_of_an_unchanged_record",
    "test_a_write_changes_all_of_its_records",
    "test_a_write_that_depends_on_the_absence_of_an_existing_record_is_refused",
    "test_a_write_that_expects_a_missing_record_is_refused",
    "test_a_write_that_expects_another_version_is_refused",
    "test_a_write_whose_caller_gives_up_is_carried_out",
    "test_a_write_with_two_values_for_a_record_is_refused",
    "test_an_empty_or_overlong_key_is_refused",
    "test_any_text_can_be_a_key",
    "test_deleting_a_missing_record_checks_that_it_is_missing",
    "test_only_one_of_several_concurrent_writes_wins",
    "test_records_read_together_are_in_the_order_of_the_request",
    "test_versions_count_the_writes_of_a_key_since_its_creation",
]

SESSION_TIMEOUT_MS = 4000
WAIT_S = 30.0
_roots = itertools.count(1)


class Transaction:
    """The content of a transaction: kinds of operations, and their paths."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations: list[tuple[str, str]] = []
        for add in operations:
            add(self)

    def check(self, path: str, _version: int) -> None:
        self.operations.append(("check", path))

    def create(self, path: str, _value: bytes) -> None:
        self.operations.append(("create", path))

    def set_data(self, path: str, _value: bytes, _version: int) -> None:
        self.operations.append(("set", path))

    def delete(self, path: str, _version: int) -> None:
        self.operations.append(("delete", path))

    def decides(self, root: str) -> bool:
        """Whether it decides a large write, which is carried out from now on."""
        return ("create", pending_path(root)) in self.operations

    def carries_out(self, root: str) -> bool:
        """Whether it carries out a part of a large write."""
        return any(kind == "delete" and path.startswith(staged_path(root)) for kind, path in self.operations)


async def nothing(_: Transaction) -> None:
    pass


class Session(ZooKeeperSession):
    """A session that tests can disturb, and that counts calls."""

    def __init__(self, address: ZooKeeperAddress, **options: Any) -> None:
        super().__init__(address, **options)
        self.before: Callable[[Transaction], Awaitable[None]] = nothing
        """Called before a transaction is sent."""
        self.after: Callable[[Transaction], Awaitable[None]] = nothing
        """Called after a transaction was carried out, before its sender knows."""
        self.looks = 0
        """How often the names in a node were requested."""
        self.watches: set[Watch] = set()
        """The callbacks for changes of these names."""

    async def transact(self, operations: Sequence[Operation], timeout_s: float) -> int:
        transaction = Transaction(operations)
        await self.before(transaction)
        revision = await super().transact(operations, timeout_s)
        await self.after(transaction)
        return revision

    async def children(self, path: str, watch: Watch | None = None) -> Sequence[str]:
        self.looks += 1
        self.watches |= {watch} if watch is not None else set()
        return await super().children(path, watch)

    async def make_all(self, path: str, value: bytes) -> None:
        """Make a node and its ancestors."""
        parts = path.split("/")
        for length in range(2, len(parts)):
            await self.make("/".join(parts[:length]))
        await self.make(path, value)

    async def delete_all(self, path: str) -> None:
        """Remove a node and its descendants."""
        for name in await self.children(path):
            await self.delete_all(f"{path}/{name}")
        await self.delete(path)

    async def candidates(self) -> list[str]:
        """The nodes of all candidates for leadership."""
        path = candidates_path(self.root)
        return [f"{path}/{name}" for name in await self.children(path)]


@asynccontextmanager
async def opened(
    server: ZooKeeper, root: str, session_timeout_ms: int = SESSION_TIMEOUT_MS, **limits: int
) -> AsyncIterator[tuple[Session, ZooKeeperStore]]:
    address = ZooKeeperAddress.parse(f"{server.address}/{root}")
    session = await Session.connect(address, session_timeout_ms=session_timeout_ms)
    assert isinstance(session, Session)
    try:
        store = await ZooKeeperStore.open(session, **limits)
        yield session, store
        await store.close()
    finally:
        await session.close()


def new_root() -> str:
    return f"test-{next(_roots)}/below"


@pytest.fixture
async def store(zookeeper: ZooKeeper) -> AsyncIterator[MetadataStore]:
    async with opened(zookeeper, new_root()) as (_, made):
        yield made


def test_zookeeper_does_what_the_fake_store_does(zookeeper: ZooKeeper) -> None:
    @settings(max_examples=examples(25, quick=5), deadline=None)
    @given(st.lists(WRITES, max_size=20))
    def check(history: list[list[Write | Check]]) -> None:
        async def run() -> None:
            async with opened(zookeeper, new_root()) as (_, made):
                await compare(made, history)

        asyncio.run(run())

    check()


# --- two writers, and failures -------------------------------------------------------------------------------


async def test_two_stores_at_one_root_see_each_others_writes(
    zookeeper: ZooKeeper,
) -> None:
    root = new_root()
    async with opened(zookeeper, root) as (_, one), opened(zookeeper, root) as (_, other):

        async def count(store: ZooKeeperStore, key: str) -> None:
            for version in range(30):
                await store.write(Write(key, b"%d" % version, version))

        await asyncio.gather(count(one, "a"), count(other, "b"))

        assert (
            await one.list("") == await other.list("") == {"a": StoredRecord(b"29", 30), "b": StoredRecord(b"29", 30)}
        )


async def test_a_write_waits_for_a_restart_of_zookeeper_and_is_carried_out_once(
    zookeeper: ZooKeeper,
) -> None:
    async with opened(zookeeper, new_root(), session_timeout_ms=20_000) as (_, store):
        await store.write(Write("a", b"1", 0))
        writing = asyncio.create_task(store.write(Write("a", b"2", 1)))
        await asyncio.sleep(0)
        await asyncio.to_thread(zookeeper.stop)
        await asyncio.to_thread(zookeeper.start)
        await asyncio.wait_for(writing, WAIT_S)

        assert await store.list("") == {"a": StoredRecord(b"2", 2)}


async def test_a_write_whose_answer_was_lost_is_not_carried_out_again(zookeeper: ZooKeeper) -> None:
    async with opened(zookeeper, new_root()) as (session, store):
        lost = 0

        async def lose_answer(_: Transaction) -> None:
            nonlocal lost
            if not lost:
                lost += 1
                raise Lost("no answer")

        await store.write(Write("a", b"1", 0))
        session.after = lose_answer
        await store.write(Write("a", b"2", 1), Write("b", b"2", 0))

        assert lost == 1
        assert await store.list("") == {"a": StoredRecord(b"2", 2), "b": StoredRecord(b"2", 1)}


async def test_a_write_with_a_lost_answer_before_another_write_has_an_unknown_outcome(zookeeper: ZooKeeper) -> None:
    root = new_root()
    async with opened(zookeeper, root) as (session, store), opened(zookeeper, root) as (_, other):
        lost = 0

        async def lose_answer(_: Transaction) -> None:
            nonlocal lost
            if not lost:
                lost += 1
                await other.write(Write("b", b"1", 0))
                raise Lost("no answer")

        session.after = lose_answer
        with pytest.raises(MetadataStoreFailed, match="not known whether"):
            await store.write(Write("a", b"1", 0))


async def _present(store: ZooKeeperStore, key: str) -> StoredRecord | None:
    """A record, as soon as the store can be read again."""
    with suppress(MetadataStoreFailed):
        return await store.get(key)
    return None


async def test_operations_fail_in_bounded_time_without_zookeeper_and_work_after_it(
    zookeeper: ZooKeeper,
) -> None:
    async with opened(zookeeper, new_root(), session_timeout_ms=600) as (session, store):
        election = ZooKeeperElection(session, "here:1")
        await election.win()
        await store.write(Write("a", b"1", 0))
        await asyncio.to_thread(zookeeper.stop)
        try:
            async with asyncio.timeout(WAIT_S):
                for failing in (store.get("a"), store.list(""), store.write(Write("a", b"2", 1))):
                    with pytest.raises(MetadataStoreFailed):
                        await failing
        finally:
            await asyncio.to_thread(zookeeper.start)
        async with asyncio.timeout(WAIT_S):
            while (record := await _present(store, "a")) is None:
                await asyncio.sleep(0.01)

        await store.write(Write("a", b"3", record.version))
        assert await store.get("a") == StoredRecord(b"3", record.version + 1)


# --- writes that are larger than a transaction ----------------------------------------------------------------

LARGE = tuple(Write(f"streams/{number}", bytes([number]) * 3000, 0) for number in range(10))
"""Four transactions with the small limit."""


SMALL = 10_000
"""The limit of small transactions: large ones would fill the server's memory, as it keeps the last 500."""


async def left_over(session: Session) -> int:
    """The number of staged writes."""
    pending = await session.version(pending_path(session.root)) is not None
    return len(await session.children(staged_path(session.root))) + pending


async def end(_: Transaction) -> None:
    """Simulate a process that ends in a transaction."""
    raise MetadataStoreFailed("the process ends")


async def test_a_write_larger_than_a_transaction_is_all_or_nothing(
    zookeeper: ZooKeeper,
) -> None:
    async with opened(zookeeper, new_root()) as (session, store):
        await all_or_nothing(store)
        assert await left_over(session) == 0


async def all_or_nothing(store: ZooKeeperStore) -> None:
    large = [write._replace(value=(write.value or b"") * 100) for write in LARGE]
    await store.write(Write("a", b"1", 0), Write("b", b"1", 0))
    for refused in (Write("b", b"", 0), Check("b", 2), Check("a", 0)):
        with pytest.raises(VersionConflict):
            await store.write(*large, refused)
    assert len(await store.list("")) == 2

    await store.write(Check("b", 1), Write("a", None, 1), *large)
    await store.write(*(Write(write.key, write.value, 1) for write in large))

    expected = {write.key: StoredRecord(write.value or b"", 2) for write in large}
    assert await store.list("") == {"b": StoredRecord(b"1", 1), **expected}


async def test_a_copy_of_the_metadata_is_restored_completely(zookeeper: ZooKeeper) -> None:
    async with opened(zookeeper, new_root(), transaction_bytes_max=SMALL) as (_, store):
        records = {"cluster_id": b"c", **{f"streams/{number:016x}": b"%d" % number * 500 for number in range(30)}}
        await store.write(Write("streams/gone", b"1", 0))
        await put_back(store, pack(records, 1), force=True)

        found = {key: record.value for key, record in (await store.list("")).items()}
        assert found == {**records, RESTORED: b"{}"}, "and it says that it was put back"


@pytest.mark.parametrize(
    "parts_done", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("finds_it", ["a list", "a get", "a write", "an opening"])
async def test_the_next_user_of_the_store_carries_out_a_decided_large_write(
    zookeeper: ZooKeeper, finds_it: str, parts_done: int
) -> None:
    root = new_root()
    async with (
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (session, ends),
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (_, other),
    ):
        await ends.write(Write("a", b"1", 0))
        done = 0

        async def end_in_the_middle(transaction: Transaction) -> None:
            nonlocal done
            if transaction.carries_out(session.root):
                if done == parts_done:
                    await end(transaction)
                done += 1

        session.before = end_in_the_middle
        with pytest.raises(MetadataStoreFailed, match="the process ends"):
            await ends.write(Check("a", 1), *LARGE)

        if finds_it == "a list":
            assert len(await other.list("streams/")) == len(LARGE)
        elif finds_it == "a get":
            assert await other.get(LARGE[9].key) == StoredRecord(LARGE[9].value or b"", 1)
        elif finds_it == "a write":
            await other.write(Write(LARGE[9].key, b"after", 1))
            with pytest.raises(VersionConflict):
                await other.write(Write(LARGE[8].key, b"", 0))
        async with opened(zookeeper, root, transaction_bytes_max=SMALL) as (third, _):
            assert len(await third.children(f"{records_path(third.root)}/streams")) == len(LARGE)
            assert await left_over(third) == 0


async def test_several_stores_can_carry_out_a_pending_write_concurrently(zookeeper: ZooKeeper) -> None:
    root = new_root()
    async with (
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (session, ends),
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (_, one),
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (_, other),
    ):

        async def end_when_decided(transaction: Transaction) -> None:
            if transaction.decides(session.root):
                await end(transaction)

        session.after = end_when_decided
        with pytest.raises(MetadataStoreFailed, match="the process ends"):
            await ends.write(*LARGE)
        assert await left_over(session) == 2

        lists = await asyncio.gather(one.list(""), other.list(""), one.list(""))

        expected = {write.key: StoredRecord(write.value or b"", 1) for write in LARGE}
        assert all(found == expected for found in lists)
        await asyncio.gather(one.write(Write("a", b"", 0)), other.write(Write("b", b"", 0)))
        assert await left_over(session) == 0


@pytest.mark.parametrize(
    ("pending", "part"), [(b"\xff", None), (b"gone", None), (b"there", b"\x00\x05garbage")], ids=["id", "gone", "part"]
)
async def test_the_error_for_an_unreadable_decided_write_names_it(
    zookeeper: ZooKeeper, pending: bytes, part: bytes | None
) -> None:
    root = new_root()
    async with opened(zookeeper, root, transaction_bytes_max=SMALL) as (session, store):
        await store.write(Write("a", b"1", 0))
        if part is not None:
            directory = f"{staged_path(session.root)}/{pending.decode()}"
            await session.make(directory)
            await session.make(f"{directory}/00000000", part)
        await session.make(pending_path(session.root), pending)

        for failing in (store.get("a"), store.list(""), store.write(*LARGE)):
            with pytest.raises(MetadataDamaged, match=f"delete {pending_path(session.root)}"):
                await failing
        with pytest.raises(MetadataDamaged):
            async with opened(zookeeper, root):
                pass

        await session.delete(pending_path(session.root))
        assert await store.list("") == {"a": StoredRecord(b"1", 1)}


async def test_the_error_names_a_node_that_is_no_record(zookeeper: ZooKeeper) -> None:
    async with opened(zookeeper, new_root()) as (session, store):
        await store.write(Write("a", b"1", 0))
        stray = f"{records_path(session.root)}/++/%61%FF"
        await session.make(stray, b"not ours")

        with pytest.raises(MetadataDamaged, match=re.escape(stray)):
            await store.list("")
        assert await store.keys() == {"a"}


async def test_a_large_write_that_was_not_decided_has_no_effect(zookeeper: ZooKeeper) -> None:
    root = new_root()
    async with (
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (session, ends),
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (_, other),
    ):
        session.before = end
        with pytest.raises(MetadataStoreFailed, match="the process ends"):
            await ends.write(*LARGE)
        assert await other.list("") == {}
        assert await left_over(session) == 1

        await other.write(*LARGE)
        assert await left_over(session) == 0


@pytest.mark.slow
async def test_a_write_can_have_more_keys_than_one_transaction_can_check(
    zookeeper: ZooKeeper,
) -> None:
    async with opened(zookeeper, new_root()) as (session, store):
        await many_keys(store)
        assert await left_over(session) == 0


async def many_keys(store: ZooKeeperStore) -> None:
    keys = [f"streams/{number:0200}" for number in range(5000)]
    await store.write(*(Write(key, b"1", 0) for key in keys))
    await store.write(*(Write(key, b"2", 1) for key in keys))
    with pytest.raises(VersionConflict) as error:
        await store.write(*(Write(key, None, 2 if key != keys[-1] else 1) for key in keys))

    assert error.value.attributes == {"key": keys[-1], "expected_version": 1, "found_version": 2}
    assert set(await store.list("")) == set(keys)
    assert await store.get(keys[-1]) == StoredRecord(b"2", 2)


async def test_a_large_write_is_not_decided_on_outdated_versions(
    zookeeper: ZooKeeper,
) -> None:
    root = new_root()
    async with (
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (session, slow),
        opened(zookeeper, root, transaction_bytes_max=SMALL) as (_, other),
    ):
        decisions = 0

        async def overtake(transaction: Transaction) -> None:
            nonlocal decisions
            if transaction.decides(session.root):
                decisions += 1
                await other.write(Write("unconcerned", b"", 0) if decisions == 1 else LARGE[7])

        session.before = overtake
        with pytest.raises(VersionConflict, match=LARGE[7].key):
            await slow.write(*LARGE)

        assert decisions == 2
        assert set(await slow.list("")) == {"unconcerned", LARGE[7].key}
        assert await left_over(session) == 0


async def test_metadata_of_another_format_are_refused(zookeeper: ZooKeeper) -> None:
    root = new_root()
    async with opened(zookeeper, root) as (session, _):
        await session.transact([put(f"{session.root}/format", b"2", 0)], WAIT_S)

    with pytest.raises(UnknownFormat, match="has format 2, this version knows 1"):
        async with opened(zookeeper, root):
            pass


async def test_the_error_names_an_unreachable_zookeeper() -> None:
    address = ZooKeeperAddress.parse("127.0.0.1:1")
    with pytest.raises(ZooKeeperUnreachable, match=r"127\.0\.0\.1:1 .*--zookeeper"):
        await ZooKeeperSession.connect(address, session_timeout_ms=400, connect_timeout_s=0.2)


async def test_an_exceeded_quota_refuses_only_writes_that_need_more_room(zookeeper: ZooKeeper) -> None:
    async with opened(zookeeper, new_root(), transaction_bytes_max=SMALL) as (session, store):
        await store.write(Write("a", b"1" * 5000, 0))
        quota = f"/zookeeper/quota{session.root}"
        limits = b"count=-1,bytes=-1=;byteHardLimit=12000;countHardLimit=-1"
        await session.make_all(f"{quota}/zookeeper_limits", limits)
        await session.make(f"{quota}/zookeeper_stats", b"count=0,bytes=6000")

        with pytest.raises(MetadataStoreFull, match=f"quota of {session.root}"):
            await store.write(Write("b", b"2" * 8000, 0))
        with pytest.raises(MetadataStoreFull):
            await store.write(*LARGE)

        await store.write(Write("a", b"3", 1))
        await store.write(Write("b", b"2" * 8000, 0))
        assert set(await store.list("")) == {"a", "b"}
        assert await left_over(session) == 0


async def test_an_election_waits_for_room_if_the_quota_is_exceeded(zookeeper: ZooKeeper) -> None:
    async with opened(zookeeper, new_root()) as (session, _):
        quota = f"/zookeeper/quota{session.root}"
        limits = b"count=-1,bytes=-1=;byteHardLimit=%d;countHardLimit=-1"
        await session.make_all(f"{quota}/zookeeper_limits", limits % 1)
        await session.make(f"{quota}/zookeeper_stats", b"count=0,bytes=6000")
        winning = asyncio.create_task(ZooKeeperElection(session, "here:1").win())
        await asyncio.wait([winning], timeout=5 * zookeeper_session.RETRY_INTERVAL_S)
        assert not winning.done()

        await session.transact([put(f"{quota}/zookeeper_limits", limits % 1_000_000, 0)], WAIT_S)
        await asyncio.wait_for(winning, WAIT_S)


# --- the election --------------------------------------------------------------------------------------------


async def test_one_candidate_wins_and_the_next_one_leads_when_it_resigns(
    zookeeper: ZooKeeper,
) -> None:
    root = new_root()
    async with opened(zookeeper, root) as (one, one_store), opened(zookeeper, root) as (other, _):
        first, second = ZooKeeperElection(one, "one:1"), ZooKeeperElection(other, "other:1")
        await asyncio.wait_for(first.win(), WAIT_S)
        await one_store.write(Write("leader", b"", 0))
        winning = asyncio.create_task(second.win())
        async with asyncio.timeout(WAIT_S):
            while second.leader != "one:1" or len(second.coordinators) < 2:
                await asyncio.sleep(0.01)
        assert await first.prove(Check("leader", 1))
        async with asyncio.timeout(WAIT_S):  # it has begun to look at the others
            while first.coordinators != ["one:1", "other:1"]:
                await asyncio.sleep(0.01)
        assert not winning.done()

        await first.resign()
        await asyncio.wait_for(winning, WAIT_S)

        assert second.leader == "other:1"
        assert await second.prove(Check("leader", 1))
        assert not await second.prove(Check("leader", 2)), "somebody has written that another one leads"
        assert not await first.prove(Check("leader", 1))


async def test_a_candidate_whose_node_was_deleted_leads_no_more(
    zookeeper: ZooKeeper,
) -> None:
    root = new_root()
    async with opened(zookeeper, root, 1000) as (one, one_store), opened(zookeeper, root) as (other, _):
        first, second = ZooKeeperElection(one, "one:1"), ZooKeeperElection(other, "other:1")
        await first.win()
        await one_store.write(Write("leader", b"", 0))
        await one.make_ephemeral(f"{one.root}/mark-", b"")
        (node,) = await one.candidates()
        winning = asyncio.create_task(second.win())
        await other.delete(node)

        await asyncio.wait_for(winning, WAIT_S)

        assert not await first.prove(Check("leader", 1))
        (mark,) = [name for name in await one.children(one.root) if name.startswith("mark-")]
        assert await one.owns(f"{one.root}/{mark}"), "the session is the same"


async def test_a_waiting_candidate_adds_no_watch_with_each_look(
    zookeeper: ZooKeeper,
) -> None:
    root = new_root()
    async with opened(zookeeper, root) as (one, _), opened(zookeeper, root) as (other, _):
        first = ZooKeeperElection(one, "one:1")
        second = ZooKeeperElection(other, "other:1", poll_interval_s=0.001)
        await first.win()
        winning = asyncio.create_task(second.win())
        async with asyncio.timeout(WAIT_S):
            while other.looks < 20:
                await asyncio.sleep(0.001)

        assert len(other.watches) == 1, "of those that are the same, ZooKeeper's client keeps one"
        await first.resign()
        await asyncio.wait_for(winning, WAIT_S)


async def test_a_candidate_of_an_earlier_session_is_replaced_by_one_of_this_session(zookeeper: ZooKeeper) -> None:
    root = new_root()
    async with opened(zookeeper, root) as (earlier, _), opened(zookeeper, root) as (now, _):
        election = ZooKeeperElection(now, "here:1")
        await election.win()
        (own,) = await now.candidates()
        await now.delete(own)
        await earlier.make_ephemeral(own.rpartition("-")[0] + "-", b"here:1")

        await asyncio.wait_for(election.win(), WAIT_S)

        assert election.coordinators == ["here:1"]
        (node,) = await now.candidates()
        assert await now.owns(node)


async def test_a_store_without_its_records_is_damaged_and_not_new(zookeeper: ZooKeeper) -> None:
    async with opened(zookeeper, new_root()) as (session, store):
        root = session.root
        await store.write(Write("streams/1", b"1", 0))
        await session.delete_all(f"{root}/records")
        with pytest.raises(MetadataDamaged, match=f"{root}/records is empty, and records were written; delete {root} "):
            await ZooKeeperStore.open(session)
        await session.delete_all(root)
        assert await (await ZooKeeperStore.open(session)).list("") == {}


async def test_records_in_a_removed_directory_can_be_restored(zookeeper: ZooKeeper) -> None:
    async with opened(zookeeper, new_root()) as (session, store):
        ledger = await Ledger.load(store)
        await ledger.write({"streams/1": b"1", "streams/2": b"2", "other": b"3"})
        written = await store.list("")
        await session.delete_all(f"{session.root}/records/streams")

        changed = await ledger.changed_by_others(list(written))
        assert changed == {"streams/1": 0, "streams/2": 0}
        await ledger.restore(changed)

        assert await store.list("") == written
        assert await ledger.changed_by_others(list(written)) == {}
        await ledger.write({"streams/1": b"more", "streams/3": b"3"})


async def test_removed_nodes_of_the_layout_are_recreated(zookeeper: ZooKeeper) -> None:
    async with opened(zookeeper, new_root(), transaction_bytes_max=SMALL) as (session, store):
        root = session.root
        await store.write(Write("a", b"1", 0))
        await session.delete_all(f"{root}/revision")
        await store.write(Write("a", b"2", 1))
        await session.delete_all(f"{root}/revision")
        assert await store.list("") == {"a": StoredRecord(b"2", 2)}

        await session.delete_all(f"{root}/staged")
        await store.write(*(Write(f"large/{number}", bytes(SMALL // 2), 0) for number in range(4)))
        assert len(await store.keys()) == 5

        await session.delete_all(f"{root}/candidates")
        await asyncio.wait_for(ZooKeeperElection(session, "here:1").win(), WAIT_S)


async def test_the_errors_after_removed_metadata_name_their_root(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(zookeeper_election.log, "warning", lambda what, **more: said.append(f"{what}: {more}"))
    async with opened(zookeeper, new_root()) as (session, store):
        election = ZooKeeperElection(session, "here:1")
        await election.win()
        await store.write(Write("leader", b"1", 0), Write("a", b"1", 0))
        await session.delete_all(session.root)

        for failing in (
            store.list(""),
            store.write(Write("a", b"2", 1)),
            store.write(Write("b/c", b"2", 0)),
            store.write(Write("new", b"2", 0)),
        ):
            with pytest.raises(MetadataStoreFailed, match=f"below {session.root}"):
                await failing
        assert await store.get("a") is None
        assert not await election.prove(Check("leader", 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(election.win(), 5 * zookeeper_session.RETRY_INTERVAL_S)
        assert [what for what in said if "restart" in what] == said[:1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_election_fails_when_the_zookeeper_client_has_died(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(zookeeper, new_root()) as (session, store):
        election = ZooKeeperElection(session, "here:1")

        def die(_: float) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(session._client._connection, "_read_socket", die)
        with pytest.raises(KeraError):
            await store.write(Write("a", b"1", 0))
        with pytest.raises(InternalError, match="restart"):
            await asyncio.wait_for(election.win(), WAIT_S)


async def test_a_write_with_an_unreadable_answer_has_an_unknown_outcome(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise ValueError("no answer that is known")

    async with opened(zookeeper, new_root(), 600) as (_, store):
        with monkeypatch.context() as patch:
            patch.setattr(serialization.Transaction, "deserialize", unreadable)
            with pytest.raises(MetadataStoreFailed, match="not known whether"):
                await store.write(Write("a", b"1", 0))
        assert await store.get("a") == StoredRecord(b"1", 1)


async def test_a_lease_is_no_longer_than_the_session_that_zookeeper_grants(zookeeper: ZooKeeper) -> None:
    longest_ms = TICK_MS * 300
    async with opened(zookeeper, new_root(), 2 * longest_ms) as (session, _):
        assert ZooKeeperElection(session, "here:1").lease_s <= longest_ms / 1000 * zookeeper_election.LEASE_PART
