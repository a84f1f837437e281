"""Parts of the ZooKeeper store without a ZooKeeper; ``tests/integration/test_metadata_store.py`` tests the rest."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.store import zookeeper_session
from kera.coordinator.store.metadata import StoredRecord
from kera.coordinator.store.zookeeper_layout import key_of, may_have, path_of, record_path
from kera.coordinator.store.zookeeper_session import Node, NodeMissing, ZooKeeperAddress
from kera.coordinator.store.zookeeper_store import ZooKeeperStore
from kera.core.errors import InvalidArgument


class FakeSession:
    """A session with fixed nodes that counts its calls."""

    def __init__(self, nodes: dict[str, bytes]) -> None:
        self.root = "/kera"
        self.hosts = "host:1"
        self.nodes = nodes
        self.asked: Counter[str] = Counter()

    async def sync(self) -> None:
        self.asked["sync"] += 1

    async def get(self, path: str) -> Node:
        self.asked["get"] += 1
        if path not in self.nodes:
            raise NodeMissing(path)
        return Node(self.nodes[path], 0)


REPOSITORY = Path(__file__).parents[3]
KEYS = st.text(st.sampled_from("a/+%.ä\0 ") | st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(KEYS)
def test_a_key_can_be_read_back_from_its_path(key: str) -> None:
    directory, name = path_of(key)

    assert key_of(directory, name) == key
    for part in (directory, name):
        assert re.fullmatch(r"[A-Za-z0-9_%+-]+", part), "ZooKeeper takes no other names of one component"


@given(KEYS, KEYS)
def test_every_directory_with_a_key_of_the_prefix_is_included(key: str, other: str) -> None:
    directory, _ = path_of(key)

    assert all(may_have(directory, key[:length]) for length in range(len(key) + 1))
    if not may_have(directory, other):
        assert not key.startswith(other)


@pytest.mark.parametrize("text", ["", "host", "host:1,", "host:1//a", "host:1/a/../b", ":1", "host:port"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        ZooKeeperAddress.parse(text)


def test_an_address_has_hosts_and_a_root() -> None:
    assert ZooKeeperAddress.parse("a:1,b:2") == ("a:1,b:2", "/kera")
    assert ZooKeeperAddress.parse("a:1/") == ("a:1", "/kera")
    assert ZooKeeperAddress.parse("a:1/x/y/") == ("a:1", "/x/y")


async def test_records_read_together_need_one_sync() -> None:
    keys = [f"streams/{number:016x}" for number in range(3)]
    session: Any = FakeSession({record_path("/kera", key): b"value" for key in keys[:2]})

    found = await ZooKeeperStore(session, 1000).get_each(keys)

    assert found == [StoredRecord(b"value", 1)] * 2 + [None]
    assert session.asked == {"sync": 1, "get": 4}  # the fourth `get` looks for a decided write


def test_only_one_module_imports_kazoo() -> None:
    roots = ("core", "broker", "backup", "coordinator", "client", "spark_connector", "bench", "demo")
    importing = re.compile(r"^\s*(from|import) kazoo\b", re.MULTILINE)
    files = [path for root in roots for path in (REPOSITORY / root).rglob("*.py") if importing.search(path.read_text())]

    assert files == [Path(zookeeper_session.__file__)]
