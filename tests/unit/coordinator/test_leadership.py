"""Gaining and losing the lead, with the memory store and a fake election."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.coordinator.store.leadership import LEADER, Alone, Leadership
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import (
    Check,
    MetadataStore,
    MetadataStoreFailed,
    StoredRecord,
    VersionConflict,
    Write,
)
from kera.core.errors import InternalError, KeraError, NotLeader, ProtocolError, Uncertain, UnknownStream
from kera.core.rpc import Call, Peer, Reply, Service, api
from kera.v1 import coordinator_pb2 as messages

WAIT_S = 30.0
LEASE_S = 0.1
"""By the clock of the test. Only the interval of proofs, a quarter of it, is real time."""


class FakeElection:
    problem = ""
    alone = False
    feature_level = 1

    def __init__(self) -> None:
        self.lease_s = LEASE_S
        self.leader = ""
        self.coordinators = ["other:1", "me:1"]
        self.may_win = asyncio.Event()
        self.proof: Callable[[], bool] = lambda: True
        self.resigned = 0
        self.proofs: list[Check] = []

    async def win(self) -> None:
        await self.may_win.wait()

    async def prove(self, guard: Check) -> bool:
        self.proofs.append(guard)
        return self.proof()

    async def resign(self) -> None:
        self.resigned += 1


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class BreakingStore(MemoryStore):
    """A store whose reads fail too once its writes fail."""

    async def get(self, key: str) -> StoredRecord | None:
        if self.failure is not None:
            raise self.failure
        return await super().get(key)


class World:
    """A coordinator that serves one method and keeps the stores that it gets for its terms."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.election: Any = FakeElection()
        self.clock = Clock()
        self.epochs: list[int] = []
        self.stores: list[MetadataStore] = []
        self.closed = 0
        self.loading: Callable[[], None] = lambda: None
        self.handling: Callable[[], Any] = lambda: None
        self.observed: list[tuple[str, str]] = []
        self.leadership = Leadership(self._office, now=self.clock, wall_us=lambda: 0, pause_s=0.001)
        self.served = self.leadership.service(
            [api.DESCRIBE_CLUSTER, api.LIST_STREAMS], lambda *seen: self.observed.append(seen)
        )

    @asynccontextmanager
    async def _office(self, store: MetadataStore, epoch: int) -> AsyncIterator[Service]:
        self.loading()
        self.epochs.append(epoch)
        self.stores.append(store)
        yield {api.DESCRIBE_CLUSTER: self._handle}
        self.closed += 1

    async def _handle(self, _: Call[Any]) -> Reply[Any]:
        waits = self.handling()
        if waits is not None:
            await waits
        return Reply(messages.DescribeClusterResponse(cluster_id="mine"))

    def run(self) -> asyncio.Task[Any]:
        return asyncio.create_task(self.leadership.run(self.store, self.election, "me:1"))

    async def ask(self, method: Any = api.DESCRIBE_CLUSTER) -> Any:
        call: Call[Any] = Call(method.request(), memoryview(b""), Peer("grpc", "me"))
        answer: Any = self.served[method](call)
        return (await answer).message

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def record(self) -> dict[str, Any]:
        record = await self.store.get(LEADER)
        assert record is not None
        return dict(json.loads(record.value))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A coordinator that runs for leader."""
    made = World()
    running = made.run()
    await asyncio.sleep(0)
    yield made
    running.cancel()
    await asyncio.wait([running])


@pytest.fixture
async def leading(world: World) -> World:
    world.election.may_win.set()
    await world.until(lambda: world.leadership.leading)
    return world


@pytest.mark.parametrize(("leader", "named"), [("", ""), ("other:1", "other:1"), ("me:1", "")])
async def test_a_coordinator_that_does_not_lead_refuses_and_names_the_leader(
    world: World, leader: str, named: str
) -> None:
    world.election.leader = leader
    for method in (api.DESCRIBE_CLUSTER, api.LIST_STREAMS):
        with pytest.raises(NotLeader) as error:
            await world.ask(method)
        assert error.value.attributes == {"leader": named}

    assert world.observed == [("DescribeCluster", "not_leader"), ("ListStreams", "not_leader")]
    assert await world.store.list("") == {}, "only who has won writes"


async def test_a_winner_writes_the_leader_record_before_it_loads_and_serves(world: World) -> None:
    records: list[Any] = []
    world.loading = lambda: records.append(dict(world.store.records))
    world.election.may_win.set()
    await world.until(lambda: world.leadership.leading)

    assert [list(found) for found in records] == [[LEADER]]
    assert await world.record() == {"address": "me:1", "epoch": 1, "previous_epoch": 0, "census_since": 1}
    assert world.epochs == [1]
    answer = await world.ask()
    assert (answer.cluster_id, list(answer.coordinators)) == ("mine", ["me:1", "other:1"])
    with pytest.raises(ProtocolError):
        await world.ask(api.LIST_STREAMS)


async def test_writes_of_a_term_are_refused_once_another_leader_has_begun(leading: World) -> None:
    (store,) = leading.stores
    await store.write(Write("a", b"1", 0))
    assert await store.list("a") == await leading.store.list("a")
    leading.election.may_win.clear()  # it cannot win again
    await leading.store.write(Write(LEADER, b'{"address": "other:1", "epoch": 2}', 1))

    for _ in range(2):
        with pytest.raises(VersionConflict):
            await store.write(Write("a", b"2", 1))

    assert not leading.leadership.leading
    await leading.until(lambda: leading.election.resigned > 0)
    assert leading.closed
    record = await leading.store.get("a")
    assert record is not None
    assert record.value == b"1"


@pytest.mark.parametrize("error", [VersionConflict("no"), MetadataStoreFailed("perhaps")])
async def test_a_write_that_fails_ends_the_term_and_the_next_one_loads_anew(
    leading: World, error: KeraError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(leading.store, "write", fail)
        with pytest.raises(type(error)):
            await leading.stores[0].write(Write("a", b"1", 0))
        assert not leading.leadership.leading
    await leading.until(lambda: leading.leadership.leading)

    assert leading.epochs == [1, 2]
    assert (leading.closed, leading.election.resigned) == (1, 1)
    await leading.stores[1].write(Write("a", b"1", 0))


async def test_an_invalid_write_does_not_end_the_term(leading: World) -> None:
    with pytest.raises(InternalError):
        await leading.stores[0].write(Write("", b"", 0))

    assert leading.leadership.leading


async def test_a_leader_proves_again_and_again_that_it_leads(leading: World) -> None:
    asked = len(leading.election.proofs)
    await leading.until(lambda: len(leading.election.proofs) > asked + 2)

    assert set(leading.election.proofs) == {Check(LEADER, 1)}
    assert leading.leadership.leading


async def test_a_leader_that_fails_its_proof_stops_and_resigns(leading: World) -> None:
    leading.election.proof = lambda: False
    leading.election.may_win.clear()
    await leading.until(lambda: leading.closed)

    with pytest.raises(NotLeader):
        await leading.ask()
    await leading.until(lambda: leading.election.resigned > 0)
    assert leading.election.resigned == 1


async def test_a_leader_that_cannot_prove_its_lead_answers_nothing_and_stops(leading: World) -> None:
    def fail() -> bool:
        raise MetadataStoreFailed("away")

    leading.election.proof = fail
    leading.election.may_win.clear()
    leading.clock.now_s += LEASE_S
    with pytest.raises(NotLeader):
        await leading.ask()
    await leading.until(lambda: leading.closed)


async def test_a_paused_leader_answers_nothing_until_it_renews_its_proof(
    leading: World,
) -> None:
    leading.clock.now_s += LEASE_S
    with pytest.raises(NotLeader):
        await leading.ask()

    await leading.until(lambda: leading.leadership.leading)
    await leading.ask()
    assert leading.epochs == [1]


@pytest.mark.parametrize("error", [None, UnknownStream("s"), VersionConflict("no")])
async def test_a_call_that_ends_after_the_proof_has_run_out_is_uncertain(
    leading: World, error: KeraError | None
) -> None:
    leading.election.proof = lambda: False

    async def too_long() -> None:
        leading.clock.now_s += LEASE_S
        if error is not None:
            raise error

    leading.handling = too_long
    with pytest.raises(Uncertain):
        await leading.ask()


async def test_a_refusal_within_the_lease_reaches_the_caller(leading: World) -> None:
    async def refuse() -> None:
        raise UnknownStream("s")

    leading.handling = refuse
    with pytest.raises(UnknownStream):
        await leading.ask()


async def test_a_winner_that_cannot_load_resigns_and_tries_again(world: World) -> None:
    errors: list[KeraError] = [MetadataStoreFailed("away"), VersionConflict("no")]

    def load() -> None:
        if errors:
            raise errors.pop()

    world.loading = load
    world.election.may_win.set()
    await world.until(lambda: world.leadership.leading)

    assert world.epochs == [3]
    assert world.election.resigned == 2


async def test_a_failure_to_lead_is_logged_once_and_again_when_it_ends(world: World) -> None:
    errors = ["away"] * 20 + ["full"] * 20 + ["away"]

    def load() -> None:
        if errors:
            raise MetadataStoreFailed(errors.pop(0))

    world.loading = load
    with capture_logs() as lines:
        world.election.may_win.set()
        await world.until(lambda: world.leadership.leading)

    assert [(line["event"], line.get("error")) for line in lines] == [
        ("cannot lead", "away"),
        ("can lead again", None),
        ("leading", None),
    ]


async def test_an_unexpected_exception_of_loading_ends_the_run() -> None:
    world = World()
    world.election.may_win.set()

    def load() -> None:
        raise ZeroDivisionError

    world.loading = load
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(world.run(), WAIT_S)
    assert world.election.resigned == 1


async def test_an_unexpected_exception_of_a_proof_ends_the_run() -> None:
    world = World()
    world.election.may_win.set()
    running = world.run()
    await world.until(lambda: world.leadership.leading)

    def fail() -> bool:
        raise ZeroDivisionError

    world.election.proof = fail
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(running, WAIT_S)
    assert world.closed == 1


async def test_a_single_coordinator_leads_at_once_with_a_higher_epoch_at_each_start() -> None:
    world = World()
    world.election = Alone("me:1")
    assert math.isinf(world.election.lease_s)
    for epoch in (1, 2):
        running = world.run()
        await asyncio.wait_for(world.leadership.until_first_term(), WAIT_S)
        await world.until(lambda: world.leadership.leading)
        assert await world.record() == {
            "address": "me:1",
            "epoch": epoch,
            "previous_epoch": epoch - 1,
            "census_since": 1,
        }
        assert list((await world.ask()).coordinators) == ["me:1"]
        running.cancel()
        await asyncio.wait([running])

    assert world.epochs == [1, 2]


async def test_a_single_coordinator_that_cannot_load_raises_the_error() -> None:
    world = World()
    world.election = Alone("me:1")

    def load() -> None:
        raise MetadataStoreFailed("broken")

    world.loading = load
    with pytest.raises(MetadataStoreFailed):
        await asyncio.wait_for(world.run(), WAIT_S)


async def test_a_single_coordinator_ends_when_its_store_fails() -> None:
    """No other coordinator can lead, and only a new start opens the store anew."""
    world = World()
    store = world.store = BreakingStore()
    world.election = Alone("me:1")
    running = world.run()
    await world.until(lambda: world.leadership.leading)

    store.failure = MetadataStoreFailed("broken")
    with pytest.raises(MetadataStoreFailed):
        await world.stores[0].write(Write("a", b"1", 0))

    with pytest.raises(MetadataStoreFailed, match="broken"):
        await asyncio.wait_for(running, WAIT_S)


async def test_only_one_of_two_winners_of_the_election_can_write() -> None:
    """The election may have two winners; the store decides between them."""
    worlds = [World(), World()]
    worlds[1].store = worlds[0].store
    running = [world.run() for world in worlds]
    for world in worlds:
        world.election.may_win.set()
    for world in worlds:
        await world.until(partial(len, world.stores))

    outcomes = await asyncio.gather(
        *(world.stores[-1].write(Write("a", b"", 0)) for world in worlds), return_exceptions=True
    )

    assert [outcome for outcome in outcomes if not isinstance(outcome, VersionConflict)] == [None]
    for task in running:
        task.cancel()
    await asyncio.wait(running)
