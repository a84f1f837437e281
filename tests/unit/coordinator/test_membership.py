import pytest

from kera.coordinator.membership import Membership, Registration
from kera.core.clock import FakeClock
from kera.core.errors import InvalidArgument, StaleEpoch
from kera.v1 import coordinator_pb2
from tests.unit.coordinator.fake_cluster import registration as new_registration


def membership(clock: FakeClock) -> Membership:
    return Membership(clock, heartbeat_interval_ms=1000, heartbeats_missed_max=5)


def decide(members: Membership, request: coordinator_pb2.RegisterBrokerRequest, epoch: int = 1) -> Registration:
    return members.decide(request, next_broker_id=7, next_epoch=epoch)


def test_a_new_broker_gets_the_next_id_and_epoch() -> None:
    members = membership(FakeClock())

    registration = decide(members, new_registration("a"), epoch=3)

    assert (registration.new_broker, registration.new_launch, registration.changed) == (True, True, True)
    assert (registration.record.broker.broker_id, registration.record.broker.broker_epoch) == (7, 3)
    assert members.broker_ids() == []  # decided, not done
    info = members.admit(registration)
    assert (info.broker_id, info.broker_epoch, info.grpc_address, info.alive) == (7, 3, "a:1", True)


def test_a_launch_that_registers_again_keeps_its_epoch() -> None:
    members = membership(FakeClock())
    members.admit(decide(members, new_registration("a")))

    again = decide(members, new_registration("a", 7), epoch=2)
    assert (again.new_broker, again.new_launch, again.changed) == (False, False, False)
    assert again.record.broker.broker_epoch == 1

    moved = decide(members, new_registration("a", 7, port=2), epoch=2)
    assert (moved.new_launch, moved.changed) == (False, True)
    assert members.admit(moved).grpc_address == "a:2"


def test_a_new_broker_whose_answer_was_lost_does_not_become_two() -> None:
    members = membership(FakeClock())
    members.admit(decide(members, new_registration("a")))

    again = members.decide(new_registration("a"), next_broker_id=8, next_epoch=2)

    assert (again.new_broker, again.record.broker.broker_id, again.record.broker.broker_epoch) == (False, 7, 1)


def test_a_new_launch_of_a_known_broker_keeps_the_id_and_fences_the_old_one() -> None:
    members = membership(FakeClock())
    members.admit(decide(members, new_registration("a")))

    launch = decide(members, new_registration("b", 7), epoch=2)
    assert (launch.new_broker, launch.new_launch, launch.changed) == (False, True, True)
    members.admit(launch)

    assert members.epoch(7) == 2
    members.heartbeat(7, 2)
    with pytest.raises(StaleEpoch) as error:
        members.heartbeat(7, 1)
    assert error.value.attributes == {"broker_id": 7, "broker_epoch": 1, "current_epoch": 2}


def test_what_a_broker_claims_about_its_epoch_and_life_is_not_believed() -> None:
    request = new_registration("a")
    request.broker.broker_epoch = 99
    request.broker.alive = True

    broker = decide(membership(FakeClock()), request).record.broker

    assert (broker.broker_epoch, broker.alive) == (1, False)


def test_a_broker_of_another_cluster_is_refused() -> None:
    members = membership(FakeClock())

    with pytest.raises(InvalidArgument, match="belongs to another cluster"):
        decide(members, new_registration("a", 3))
    with pytest.raises(StaleEpoch):
        members.heartbeat(3, 1)


def test_a_registration_without_what_it_needs_is_refused() -> None:
    nameless, homeless = new_registration("a"), new_registration("a")
    nameless.launch_id = ""
    homeless.broker.grpc_address = ""

    for request, field in ((nameless, "launch_id"), (homeless, "grpc_address")):
        with pytest.raises(InvalidArgument, match=field):
            decide(membership(FakeClock()), request)


def test_a_broker_is_alive_until_it_has_missed_its_heartbeats() -> None:
    clock = FakeClock()
    members = membership(clock)
    members.admit(decide(members, new_registration("a")))

    clock.advance(4)
    members.heartbeat(7, 1)
    clock.advance(5)
    assert members.live_ids() == [7]
    clock.advance(0.001)
    assert members.live_ids() == []
    assert not members.describe(7).alive

    members.heartbeat(7, 1)
    assert members.describe(7).alive


def test_a_restored_broker_counts_as_just_heard_of() -> None:
    clock = FakeClock()
    clock.advance(1000)
    members = membership(clock)
    members.restore(decide(members, new_registration("a")).record)

    assert members.live_ids() == [7]
