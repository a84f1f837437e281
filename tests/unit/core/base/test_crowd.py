from __future__ import annotations

import pytest

from kera.core.base.crowd import Crowd, host_of


def test_the_oldest_member_of_the_most_crowded_host_makes_room() -> None:
    crowd = Crowd[str](4)
    assert [crowd.add(name, host) for name, host in (("a", "x"), ("b", "y"), ("c", "y"), ("d", "y"))] == [None] * 4
    assert crowd.add("e", "x") == "b"
    assert crowd.add("f", "z") in {"a", "c"}, "both have two"
    assert len(crowd) == 4
    assert "b" not in crowd


def test_a_single_member_of_a_host_stays_when_another_host_adds_many() -> None:
    crowd = Crowd[int](8)
    crowd.add(-1, "alone")
    for number in range(1000):
        crowd.add(number, "many")
    assert -1 in crowd
    assert list(crowd) == [-1, *range(993, 1000)]


def test_a_member_is_added_once_and_removed_once() -> None:
    crowd = Crowd[str](2)
    crowd.add("a", "x")
    assert crowd.add("a", "y") is None, "it is here already"
    assert crowd.remove("a")
    assert not crowd.remove("a")
    assert len(crowd) == 0


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.9:5000", "10.0.0.9"),
        ("ipv4:10.0.0.9:5000", "10.0.0.9"),
        ("ipv6:%5B2001:db8::5%5D:5000", "2001:db8::/64"),
        ("[2001:db8::6]:1", "2001:db8::/64"),
        ("[fe80::1%25eth0]:1", "fe80::/64"),
        ("[::ffff:10.0.0.9]:1", "10.0.0.9"),
        ("unix:/run/kera.sock", "unix:/run/kera.sock"),
        ("", ""),
    ],
)
def test_a_host_is_the_same_over_all_transports(address: str, host: str) -> None:
    assert host_of(address) == host
