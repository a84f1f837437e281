"""What of the store on ZooKeeper needs no ZooKeeper; the rest is in ``tests/integration/test_metadata_store.py``."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.store import zookeeper_session
from kera.coordinator.store.zookeeper_layout import key_of, may_have, path_of
from kera.coordinator.store.zookeeper_session import ZooKeeperAddress
from kera.core.errors import InvalidArgument

REPOSITORY = Path(__file__).parents[3]
KEYS = st.text(st.sampled_from("a/+%.ä\0 ") | st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(KEYS)
def test_a_key_is_found_again_in_its_path(key: str) -> None:
    directory, name = path_of(key)

    assert key_of(directory, name) == key
    for part in (directory, name):
        assert re.fullmatch(r"[A-Za-z0-9_%+-]+", part), "ZooKeeper takes no other names of one component"


@given(KEYS, KEYS)
def test_no_directory_is_left_out_that_has_a_key_with_the_prefix(key: str, other: str) -> None:
    directory, _ = path_of(key)

    assert all(may_have(directory, key[:length]) for length in range(len(key) + 1))
    if not may_have(directory, other):
        assert not key.startswith(other)


@pytest.mark.parametrize("text", ["", "host", "host:1,", "host:1//a", "host:1/a/../b", ":1", "host:port"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        ZooKeeperAddress.parse(text)


def test_an_address_has_hosts_and_a_root() -> None:
    assert ZooKeeperAddress.parse("a:1,b:2") == ("a:1,b:2", "/kera")
    assert ZooKeeperAddress.parse("a:1/") == ("a:1", "/kera")
    assert ZooKeeperAddress.parse("a:1/x/y/") == ("a:1", "/x/y")


def test_one_module_knows_the_client_of_zookeeper() -> None:
    roots = ("core", "broker", "backup", "coordinator", "client", "spark_connector", "bench", "demo")
    importing = re.compile(r"^\s*(from|import) kazoo\b", re.MULTILINE)
    files = [path for root in roots for path in (REPOSITORY / root).rglob("*.py") if importing.search(path.read_text())]

    assert files == [Path(zookeeper_session.__file__)]
