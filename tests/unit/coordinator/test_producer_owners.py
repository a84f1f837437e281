"""Owners of producer ids: blocks of ids, names and claims, which outlast the coordinator."""

import pytest

from kera.coordinator.operations import producer_owners
from kera.core.base.ids import PRODUCER_IDS
from kera.core.errors import InvalidArgument
from kera.v1 import coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster

ALICE, BOB = "user:alice", "user:bob"
CHOSEN = PRODUCER_IDS[5]


async def owner(
    cluster: Cluster, producer_id: int, stream_id: int = 0, principal: str = BOB
) -> coordinator_pb2.ProducerOwner:
    request = coordinator_pb2.FindProducersRequest()
    request.uses.add(producer_id=producer_id, stream_id=stream_id, principal=principal)
    answer = await cluster.coordinator.producers.owners._answer(request)
    return answer.owners[0]


async def test_a_given_id_belongs_to_its_principal_after_a_restart_too(cluster: Cluster) -> None:
    await cluster.register("a")
    owners = cluster.coordinator.producers.owners
    given = {principal: [await owners.give(principal) for _ in range(100)] for principal in (ALICE, BOB)}
    assert len({*given[ALICE], *given[BOB]}) == 200

    for _ in range(2):
        for principal, ids in given.items():
            for producer_id in ids:
                found = await owner(cluster, producer_id)
                assert (found.principal, found.name, found.anybody) == (principal, "", False)
                assert found.first_id <= producer_id <= found.last_id
        await cluster.restart()
    assert await cluster.coordinator.producers.owners.give(ALICE) > max(given[ALICE] + given[BOB])


async def test_the_owner_of_a_named_producers_id_is_its_name(cluster: Cluster) -> None:
    await cluster.register("a")
    instance = await cluster.coordinator.producers.init("billing.eu")
    for _ in range(2):
        assert (await owner(cluster, instance.producer_id)).name == "billing.eu"
        await cluster.restart()


async def test_anybody_owns_an_id_outside_blocks_and_no_principal_owns_a_future_id(cluster: Cluster) -> None:
    await cluster.register("a")
    producer_id = (await cluster.coordinator.producers.init()).producer_id

    assert (await owner(cluster, producer_id)).anybody
    assert await owner(cluster, producer_id + 1) == coordinator_pb2.ProducerOwner(
        first_id=producer_id + 1, last_id=producer_id + 1
    )
    assert await cluster.coordinator.producers.owners.give(ALICE) == producer_id + 1
    assert (await owner(cluster, producer_id + 1)).principal == ALICE


async def test_a_chosen_id_belongs_to_its_first_user_in_each_stream(cluster: Cluster) -> None:
    await cluster.register("a")
    first, second = [(await cluster.create(name)).stream_id for name in ("first", "second")]

    assert (await owner(cluster, CHOSEN, first, ALICE)).principal == ALICE
    assert (await owner(cluster, CHOSEN, second, BOB)).principal == BOB
    await cluster.restart()
    assert (await owner(cluster, CHOSEN, first, BOB)).principal == ALICE
    await cluster.coordinator.streams.delete("first")
    assert (await owner(cluster, CHOSEN, first, BOB)).principal == "", "nothing is kept of a stream that is gone"
    assert not cluster.coordinator.state.ledger.children(f"producer-claims/{first:016x}")
    assert (await owner(cluster, CHOSEN, second, ALICE)).principal == BOB


async def test_the_oldest_claim_is_deleted_when_there_are_too_many(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_owners, "CLAIMS_MAX", 3)
    await cluster.register("a")
    stream_id = (await cluster.create("events")).stream_id
    for number in range(4):
        await owner(cluster, PRODUCER_IDS[number], stream_id, ALICE)
    await cluster.restart()

    assert (await owner(cluster, PRODUCER_IDS[0], stream_id, BOB)).principal == BOB
    assert (await owner(cluster, PRODUCER_IDS[3], stream_id, BOB)).principal == ALICE


async def test_many_claims_of_one_principal_do_not_displace_those_of_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_owners, "CLAIMS_MAX", 4)
    await cluster.register("a")
    stream_id = (await cluster.create("events")).stream_id
    await owner(cluster, CHOSEN, stream_id, BOB)
    for number in range(10):
        if number == 5:
            await cluster.restart()
        await owner(cluster, PRODUCER_IDS[number + 6], stream_id, ALICE)

    assert (await owner(cluster, CHOSEN, stream_id, ALICE)).principal == BOB
    assert len(cluster.coordinator.state.ledger.children(f"producer-claims/{stream_id:016x}")) == 4
    await cluster.coordinator.streams.delete("events")
    assert not cluster.coordinator.producers.owners._claims_of


async def test_too_many_ids_in_a_request_are_refused(cluster: Cluster) -> None:
    request = coordinator_pb2.FindProducersRequest(
        uses=[coordinator_pb2.ProducerUse(producer_id=1)] * (producer_owners.USES_MAX + 1)
    )
    with pytest.raises(InvalidArgument, match="at most 1000 ids"):
        await cluster.coordinator.producers.owners._answer(request)
