"""Electing a leader, and proving leadership, on a ZooKeeper ensemble with some servers away."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from kera.coordinator.store.metadata import Check, MetadataStoreFailed, StoredRecord, Write
from kera.coordinator.store.zookeeper_election import ZooKeeperElection
from kera.coordinator.store.zookeeper_session import ZooKeeperAddress, ZooKeeperSession
from kera.coordinator.store.zookeeper_store import ZooKeeperStore
from tests.integration.zookeeper import Ensemble

SESSION_TIMEOUT_MS = 2000
WAIT_S = 60.0


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """Servers that tests share, each with a root of its own; only the last test stops one of them."""
    with Ensemble(tmp_path_factory.mktemp("ensemble")) as started:
        yield started


@pytest.fixture
async def session(ensemble: Ensemble) -> AsyncIterator[ZooKeeperSession]:
    """A session with the leading server of the ensemble only."""
    address = ZooKeeperAddress.parse(f"{ensemble.leader().address}/test")
    connected = await ZooKeeperSession.connect(address, session_timeout_ms=SESSION_TIMEOUT_MS)
    yield connected
    await connected.close()


async def test_leadership_cannot_be_proved_at_a_server_without_a_majority(
    ensemble: Ensemble, session: ZooKeeperSession
) -> None:
    store, election = await ZooKeeperStore.open(session), ZooKeeperElection(session, "here:1")
    await asyncio.wait_for(election.win(), WAIT_S)
    await store.write(Write("leader", b"", 0))
    assert await election.prove(Check("leader", 1))
    leader = ensemble.leader()
    others = [server for server in ensemble.servers if server is not leader]
    for server in others:
        server.pause()
    try:
        await session.sync()
        assert await store.get("leader") == StoredRecord(b"", 1), "it answers still, for others may lead already"
        with pytest.raises((TimeoutError, MetadataStoreFailed)):
            await election.prove(Check("leader", 1))
    finally:
        for server in others:
            server.resume()
    async with asyncio.timeout(WAIT_S):
        while not await _proves(election):
            await asyncio.sleep(0.05)


async def _proves(election: ZooKeeperElection) -> bool:
    try:
        return await election.prove(Check("leader", 1))
    except (TimeoutError, MetadataStoreFailed):
        return False


async def test_a_session_continues_at_another_server_when_its_own_is_lost(ensemble: Ensemble) -> None:
    address = ZooKeeperAddress.parse(f"{ensemble.address}/lost")
    session = await ZooKeeperSession.connect(address, session_timeout_ms=30_000)
    try:
        store, election = await ZooKeeperStore.open(session), ZooKeeperElection(session, "here:1")
        await asyncio.wait_for(election.win(), WAIT_S)
        await store.write(Write("leader", b"", 0))
        await session.make_ephemeral(f"{session.root}/mark-", b"")
        (mark,) = [name for name in await session.children(session.root) if name.startswith("mark-")]
        at = session._client._connection._socket.getpeername()[1]
        (own,) = [server for server in ensemble.servers if server.address.endswith(f":{at}")]
        await asyncio.to_thread(own.stop)

        await store.write(Write("a", b"1", 0))

        assert await _proves(election)
        assert await session.owns(f"{session.root}/{mark}"), "the session is the same"
        assert await store.list("") == {"a": StoredRecord(b"1", 1), "leader": StoredRecord(b"", 1)}
    finally:
        await session.close()
