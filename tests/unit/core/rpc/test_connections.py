"""The limit of a daemon's connections, and which connection makes room."""

from typing import NamedTuple

import pytest

from kera.core.base.settings import InvalidSettings
from kera.core.rpc.connections import CONNECTIONS_MAX_DEFAULT, DESCRIPTORS_RESERVED, connections_max, idlest, parts_of


class Connection(NamedTuple):
    evictable: bool
    asked: bool
    active_s: float


def test_the_limit_of_descriptors_leaves_room_for_files() -> None:
    assert connections_max(None, 4096) == 4096 - DESCRIPTORS_RESERVED


def test_half_of_few_descriptors_are_for_files() -> None:
    assert connections_max(None, 256) == 128


def test_many_descriptors_do_not_raise_the_default_of_connections() -> None:
    assert connections_max(None, 1 << 20) == CONNECTIONS_MAX_DEFAULT


def test_a_setting_over_the_descriptor_limit_is_refused_with_advice() -> None:
    assert connections_max(512, 1024) == 512
    with pytest.raises(InvalidSettings, match=r"ulimit -n.* 512 or less"):
        connections_max(513, 1024)


def test_each_kind_gets_its_share_and_at_least_one() -> None:
    assert parts_of(128, {"frames": 2, "grpc": 1, "push": 1}) == {"frames": 64, "grpc": 32, "push": 32}
    assert parts_of(2, {"frames": 2, "grpc": 1, "push": 1}) == {"frames": 1, "grpc": 1, "push": 1}


def test_a_connection_that_never_asked_makes_room_before_the_idlest_one() -> None:
    silent, quiet, busy = Connection(True, False, 5.0), Connection(True, True, 1.0), Connection(False, False, 0.0)
    assert idlest([quiet, busy, silent]) is silent
    assert idlest([busy, quiet, Connection(True, True, 2.0)]) is quiet


def test_connections_in_use_do_not_make_room() -> None:
    assert idlest([Connection(False, True, 1.0), Connection(False, False, 0.0)]) is None
