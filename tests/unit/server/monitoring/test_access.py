"""Counts of principals: separate ones for each of the busiest."""

from __future__ import annotations

from kera.core.access.identity import Identity
from kera.core.rpc.method import Peer
from kera.server.monitoring.access import PRINCIPALS_MAX, AccessCounts
from tests.metrics import shown, values
from tests.unit.core.access.support import Now, guard


def test_the_busiest_principals_are_shown() -> None:
    door = guard(Now())
    for number in range(2 * PRINCIPALS_MAX):
        peer = Peer("tcp", f"10.0.0.9:{number}")
        door.known.meet(peer, Identity(f"u{number}"))
        usage = peer.remembered.usage
        usage.asked(peer, number * 100)
        usage.answered(peer, number)
        usage.waited_s, usage.waits = number / 2, number
    found = values(AccessCounts(door))
    assert found['kera_principal_bytes_in_total{principal="user:u39"}'] == 3900
    assert found['kera_principal_bytes_out_total{principal="user:u39"}'] == 39
    assert found['kera_principal_requests_total{principal="user:u39"}'] == 1
    assert found['kera_principal_throttled_total{principal="user:u39"}'] == 39
    assert found['kera_principal_throttled_seconds_total{principal="user:u39"}'] == 19.5
    assert found['kera_principal_connections{principal="user:u39"}'] == 1
    assert 'kera_principal_bytes_in_total{principal="user:u19"}' not in found
    assert sum(name.startswith("kera_principal_bytes_in_total") for name in found) == PRINCIPALS_MAX
    assert found["kera_principals_left_out"] == PRINCIPALS_MAX
    assert "kera_principal" not in shown(AccessCounts(door), everything=False)


def test_a_principal_is_shown_once() -> None:
    """Also a principal that is a super user with only one of its tokens."""
    door = guard(Now())
    for is_super in (False, True):
        peer = Peer("tcp", "10.0.0.9:1")
        door.known.meet(peer, Identity("alice", is_super=is_super))
        peer.remembered.usage.asked(peer, 10)
    found = values(AccessCounts(door))
    assert found['kera_principal_bytes_in_total{principal="user:alice"}'] == 20
    assert found['kera_principal_connections{principal="user:alice"}'] == 2
