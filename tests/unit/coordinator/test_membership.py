from collections.abc import Callable
from typing import Any

import pytest

from kera.coordinator.cluster.admission import Admission, decide_admission
from kera.coordinator.cluster.member_kinds import BACKUP, BROKER, MemberKind
from kera.coordinator.cluster.membership import Membership
from kera.core.base.clock import FakeClock
from kera.core.errors import InvalidArgument, StaleEpoch
from tests.unit.coordinator.fake_cluster import backup_registration
from tests.unit.coordinator.fake_cluster import registration as broker_registration

EACH = pytest.mark.parametrize("kind", [BROKER, BACKUP], ids=lambda kind: str(kind.noun))
AnyKind = MemberKind[Any, Any]
Members = Membership[Any, Any]


def membership(clock: FakeClock, kind: AnyKind = BROKER) -> Members:
    return Membership(kind, clock, heartbeat_interval_ms=1000, heartbeats_missed_max=5)


def new_registration(kind: AnyKind, *arguments: Any, **named: Any) -> Any:
    new: Callable[..., Any] = broker_registration if kind is BROKER else backup_registration
    return new(*arguments, **named)


def decide(members: Members, request: Any, epoch: int = 1) -> Admission[Any]:
    return decide_admission(members, request, next_id=7, next_epoch=epoch)


def admit(members: Members, admission: Admission[Any]) -> Any:
    return members.admit(admission.record, admission.passing)


@EACH
def test_a_new_member_gets_the_next_id_and_epoch(kind: AnyKind) -> None:
    members = membership(FakeClock(), kind)

    registration = decide(members, new_registration(kind, "a"), epoch=3)

    assert (registration.new_member, registration.new_launch, registration.changed) == (True, True, True)
    assert (registration.member_id, registration.epoch) == (7, 3)
    assert kind.id_and_epoch(registration.record) == (7, 3)
    assert members.ids() == []  # decided, not done
    info = admit(members, registration)
    assert (info.grpc_address, info.alive) == ("a:1", True)
    assert members.describe_all() == [info]


@EACH
def test_a_launch_that_registers_again_keeps_its_epoch(kind: AnyKind) -> None:
    members = membership(FakeClock(), kind)
    admit(members, decide(members, new_registration(kind, "a")))

    again = decide(members, new_registration(kind, "a", 7), epoch=2)
    assert (again.new_member, again.new_launch, again.changed) == (False, False, False)
    assert (again.member_id, again.epoch) == (7, 1)

    moved = decide(members, new_registration(kind, "a", 7, port=2), epoch=2)
    assert (moved.new_launch, moved.changed) == (False, True)
    assert admit(members, moved).grpc_address == "a:2"


@EACH
@pytest.mark.parametrize("directory_id", ["", "directory"])
def test_a_repeated_registration_of_a_new_member_makes_no_second_member(kind: AnyKind, directory_id: str) -> None:
    members, request = membership(FakeClock(), kind), new_registration(kind, "a")
    request.directory_id = directory_id
    admit(members, decide(members, request))

    again = decide_admission(members, request, next_id=8, next_epoch=2)

    assert (again.new_member, again.member_id, again.epoch) == (False, 7, 1)
    assert kind.id_and_epoch(again.record) == (7, 1)


@EACH
def test_a_new_launch_of_a_known_member_keeps_the_id_and_fences_the_old_one(kind: AnyKind) -> None:
    members = membership(FakeClock(), kind)
    admit(members, decide(members, new_registration(kind, "a")))

    launch = decide(members, new_registration(kind, "b", 7), epoch=2)
    assert (launch.new_member, launch.new_launch, launch.changed) == (False, True, True)
    admit(members, launch)

    assert members.epoch(7) == 2
    members.heartbeat(7, 2)
    with pytest.raises(StaleEpoch) as error:
        members.heartbeat(7, 1)
    assert error.value.attributes == {f"{kind.noun}_id": 7, f"{kind.noun}_epoch": 1, "current_epoch": 2}


@EACH
def test_a_registration_cannot_set_its_own_epoch_and_liveness(kind: AnyKind) -> None:
    request = new_registration(kind, "a")
    kind.set_id_and_epoch(request, 0, 99)
    kind.info(request).alive = True

    record = decide(membership(FakeClock(), kind), request).record

    assert (kind.id_and_epoch(record), kind.info(record).alive) == ((7, 1), False)


@EACH
def test_a_member_of_another_cluster_is_refused(kind: AnyKind) -> None:
    members = membership(FakeClock(), kind)

    with pytest.raises(InvalidArgument, match=f"the {kind.noun}'s data directory belongs to another cluster"):
        decide(members, new_registration(kind, "a", 3))
    with pytest.raises(StaleEpoch):
        members.heartbeat(3, 1)


@EACH
def test_a_registration_without_a_launch_id_or_address_is_refused(kind: AnyKind) -> None:
    nameless, homeless = new_registration(kind, "a"), new_registration(kind, "a")
    nameless.launch_id = ""
    kind.info(homeless).grpc_address = ""

    for request, field in ((nameless, "launch_id"), (homeless, "grpc_address")):
        with pytest.raises(InvalidArgument, match=field):
            decide(membership(FakeClock(), kind), request)


@EACH
def test_a_member_is_alive_until_it_has_missed_its_heartbeats(kind: AnyKind) -> None:
    clock = FakeClock()
    members = membership(clock, kind)
    admit(members, decide(members, new_registration(kind, "a")))

    clock.advance(4)
    members.heartbeat(7, 1)
    clock.advance(5)
    assert members.live_ids() == [7]
    clock.advance(0.001)
    assert members.live_ids() == []
    assert not members.describe(7).alive

    members.heartbeat(7, 1)
    assert members.describe(7).alive


@EACH
def test_a_restored_member_counts_as_alive_at_first(kind: AnyKind) -> None:
    clock = FakeClock()
    clock.advance(1000)
    members = membership(clock, kind)
    members.load([decide(members, new_registration(kind, "a")).record.SerializeToString()], [])

    assert members.live_ids() == [7]


def test_the_free_space_of_a_backup_is_its_latest_report_and_is_not_stored() -> None:
    members = membership(FakeClock(), BACKUP)
    first = decide(members, backup_registration("a", free_memory_bytes=100, free_disk_bytes=1000))
    assert (first.record.backup.free_memory_bytes, first.record.backup.free_disk_bytes) == (0, 0)
    assert admit(members, first).free_memory_bytes == 100

    members.heartbeat(7, 1, free_memory_bytes=90, free_disk_bytes=900)
    assert (members.describe(7).free_memory_bytes, members.describe(7).free_disk_bytes) == (90, 900)

    again = decide(members, backup_registration("a", 7, free_memory_bytes=80, free_disk_bytes=800))
    assert not again.changed
    assert (admit(members, again).free_memory_bytes, members.describe(7).free_disk_bytes) == (80, 800)

    members.load([again.record.SerializeToString()], [])
    assert members.describe(7).free_memory_bytes == 0


# --- fencing, drains and pauses ----------------------------------------------------------------------------------


@EACH
def test_a_fenced_launch_is_dead_and_never_comes_back(kind: AnyKind) -> None:
    members = membership(FakeClock(), kind)
    admit(members, decide(members, new_registration(kind, "a")))

    record = members.kind.fenced(members.record(7), 5)
    assert members.live_ids() == [7]  # decided, not done
    members.replace(record)

    assert (members.live_ids(), members.is_fenced(7), members.epoch(7)) == ([], True, 5)
    for epoch in (1, 5):
        with pytest.raises(StaleEpoch):
            members.heartbeat(7, epoch)
    for member_id in (7, 0):
        with pytest.raises(StaleEpoch, match="given up for lost"):
            decide(members, new_registration(kind, "a", member_id))
    assert members.kind.fenced(members.record(7), 6).launch_id == record.launch_id

    restored = membership(FakeClock(), kind)
    restored.load([record.SerializeToString()], [])
    with pytest.raises(StaleEpoch):
        decide(restored, new_registration(kind, "a", 7))
    launch = decide(restored, new_registration(kind, "b", 7), epoch=6)
    assert (launch.new_launch, launch.member_id, launch.epoch) == (True, 7, 6)
    admit(restored, launch)
    assert restored.live_ids() == [7]


@EACH
def test_only_the_coordinator_changes_draining_and_it_outlasts_launches(kind: AnyKind) -> None:
    members = membership(FakeClock(), kind)
    request = new_registration(kind, "a")
    kind.info(request).draining = True
    admit(members, decide(members, request))
    assert members.open_ids() == [7]

    members.replace(members.kind.changed(members.record(7), draining=True))
    admit(members, decide(members, new_registration(kind, "b", 7), epoch=2))
    assert (members.open_ids(), members.live_ids(), members.describe(7).draining) == ([], [7], True)

    members.replace(members.kind.changed(members.record(7), draining=False))
    assert members.open_ids() == [7]


@EACH
def test_a_pause_of_the_coordinator_does_not_count_as_silence_of_a_member(kind: AnyKind) -> None:
    clock = FakeClock()
    members = membership(clock, kind)
    admit(members, decide(members, new_registration(kind, "a")))

    clock.advance(60)  # the coordinator was stopped
    members.tick()
    assert members.live_ids() == [7]
    for _ in range(4):
        clock.advance(1)
        members.tick()
    assert members.live_ids() == [7]
    clock.advance(1.5)  # a little late is not a pause
    members.tick()
    assert members.live_ids() == []

    members.heartbeat(7, 1)
    clock.advance(60)
    members.heartbeat(7, 1)
    members.tick()
    assert members.heard_s(7) == clock.monotonic_s()  # not in the future


@EACH
def test_a_member_declared_dead_is_dead_until_its_next_heartbeat(kind: AnyKind) -> None:
    members = membership(FakeClock(), kind)
    admit(members, decide(members, new_registration(kind, "a")))

    members.declare_dead(7)
    members.tick()
    assert members.live_ids() == []
    members.heartbeat(7, 1)
    assert members.live_ids() == [7]
    assert not members.is_alive(8)
