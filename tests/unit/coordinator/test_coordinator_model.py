"""Random histories of a cluster, with restarts of all parts, keep the promises that others rely on."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kera.core.errors import KeraError, Unavailable
from kera.v1 import common_pb2, coordinator_pb2
from tests.examples import examples
from tests.unit.coordinator.fake_cluster import Cluster

STEPS = st.one_of(
    st.tuples(st.just("launch"), st.just(0) | st.integers(1, 3)),
    st.tuples(st.just("register again"), st.integers(1, 3)),
    st.tuples(st.just("backup"), st.just(0) | st.integers(1, 3)),
    st.tuples(st.just("create"), st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("alter"), st.sampled_from("abc"), st.integers(0, 2), st.lists(st.sampled_from("xy"), max_size=2)),
    st.tuples(st.just("delete"), st.sampled_from("abc")),
    st.tuples(st.just("broker fails"), st.integers(1, 3)),
    st.tuples(st.just("silence"), st.integers(1, 4)),
    st.tuples(st.just("heartbeats")),
    st.tuples(st.just("producer")),
    st.tuples(st.just("restart")),
)

START = [("launch", 0), ("launch", 0), ("create", "a", 2, 0, 0)]
"""A cluster in which most of the steps have an effect."""


class History:
    """A runner of steps that checks the promises after each of them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.launches: dict[int, str] = {}
        self.epochs: set[int] = set()
        self.backup_epochs: set[int] = set()
        self.ids: dict[str, set[int]] = {"stream": set(), "producer": set(), "broker": set(), "backup": set()}
        self.first_groups: dict[tuple[int, int], tuple[int, int]] = {}
        self.configs: dict[int, tuple[int, common_pb2.StreamConfig]] = {}
        """The last seen version and configuration of each stream."""

    async def run(self, steps: list[tuple[Any, ...]]) -> None:
        await self.cluster.restart()
        for step in steps:
            try:
                await self.act(*step)
            except KeraError as error:
                if error.code in {"internal", "version_conflict"}:
                    raise
            await self.check()

    async def act(self, action: str, *arguments: Any) -> None:
        cluster, coordinator = self.cluster, self.cluster.coordinator
        match action, *arguments:
            case "launch", broker_id:
                launch = f"launch-{len(self.epochs)}"
                info, streams = await cluster.register(launch, broker_id)
                assert info.broker_epoch > max(self.epochs, default=0)
                self.epochs.add(info.broker_epoch)
                self.launches[info.broker_id] = launch
                if not broker_id:
                    self.take("broker", info.broker_id)
                self.check_owned(info.broker_id, streams)
            case "register again", broker_id if broker_id in self.launches:
                info, streams = await cluster.register(self.launches[broker_id], broker_id)
                assert info.broker_epoch in self.epochs
                self.check_owned(broker_id, streams)
            case "backup", backup_id:
                backup = await cluster.register_backup(f"backup-launch-{len(self.backup_epochs)}", backup_id)
                assert backup.backup_epoch > max(self.backup_epochs, default=0)
                self.backup_epochs.add(backup.backup_epoch)
                if not backup_id:
                    self.take("backup", backup.backup_id)
            case "create", name, streamlets, brokers, replication:
                alive = len(coordinator.state.backups.live_ids())
                self.take("stream", (await cluster.create(name, streamlets, brokers, replication)).stream_id)
                assert alive >= replication
            case "alter", name, retention_ms, consumer_groups:
                await self.alter(name, retention_ms, consumer_groups)
            case "delete", name:
                await coordinator.streams.delete(name)
            case ("producer",):
                self.take("producer", (await coordinator.producers.init())[0])
            case _:
                await self.befall(action, *arguments)

    async def alter(self, name: str, retention_ms: int, consumer_groups: list[str]) -> None:
        brokers = self.cluster.brokers
        names = coordinator_pb2.ConsumerGroupNames(names=consumer_groups)
        stream = await self.cluster.alter(name, retention_ms=retention_ms, retention_consumer_groups=names)
        assert (stream.config.retention_ms, [*stream.config.retention_consumer_groups]) == (
            retention_ms,
            consumer_groups,
        )
        for owner in stream.assignments:
            if owner.broker_id not in brokers.failures:
                assert brokers.streams[owner.broker_id, stream.stream_id] == stream

    async def befall(self, event: str, *arguments: Any) -> None:
        """Carry out an event that is not a request."""
        cluster, coordinator = self.cluster, self.cluster.coordinator
        match event, *arguments:
            case "broker fails", broker_id:
                if cluster.brokers.failures.pop(broker_id, None) is None:
                    cluster.brokers.failures[broker_id] = Unavailable("away")
            case "silence", seconds:
                cluster.clock.advance(seconds)
            case ("heartbeats",):
                for broker in coordinator.state.brokers.describe_all():
                    await cluster.heartbeat(broker.broker_id)
                for backup in coordinator.state.backups.describe_all():
                    coordinator.members.backup_heartbeat(
                        coordinator_pb2.BackupHeartbeatRequest(
                            backup_id=backup.backup_id, backup_epoch=backup.backup_epoch
                        )
                    )
            case ("restart",):
                await cluster.restart()

    def take(self, kind: str, number: int) -> None:
        assert number not in self.ids[kind], f"{kind} id {number} was given before"
        self.ids[kind].add(number)

    def check_owned(self, broker_id: int, streams: list[common_pb2.StreamInfo]) -> None:
        owned = [
            stream
            for stream in self.cluster.coordinator.state.catalog.streams()
            if any(owner.broker_id == broker_id for owner in stream.assignments)
        ]
        assert sorted(stream.stream_id for stream in streams) == sorted(stream.stream_id for stream in owned)

    async def check(self) -> None:
        coordinator = self.cluster.coordinator
        epochs = {broker.broker_id: broker.broker_epoch for broker in coordinator.state.brokers.describe_all()}
        for stream in coordinator.state.catalog.streams():
            version, config = self.configs.get(stream.stream_id, (stream.config_version, stream.config))
            assert stream.config_version == version + (stream.config != config)
            self.configs[stream.stream_id] = (stream.config_version, stream.config)
            assert [owner.streamlet_id for owner in stream.assignments] == list(range(stream.config.streamlets))
            for owner in stream.assignments:
                assert owner.broker_epoch == epochs[owner.broker_id]
                key = (stream.stream_id, owner.streamlet_id)
                epoch, first_group = self.first_groups.get(key, (owner.broker_epoch, owner.first_group_id))
                assert (owner.broker_epoch > epoch) == (owner.first_group_id > first_group)
                self.first_groups[key] = (owner.broker_epoch, owner.first_group_id)
        reloaded = await self.cluster.load()
        assert reloaded.state.catalog.streams() == coordinator.state.catalog.streams()
        assert [broker.broker_id for broker in reloaded.state.brokers.describe_all()] == list(epochs)
        assert [(backup.backup_id, backup.backup_epoch) for backup in reloaded.state.backups.describe_all()] == [
            (backup.backup_id, backup.backup_epoch) for backup in coordinator.state.backups.describe_all()
        ]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_any_history_of_the_cluster_keeps_the_promises(steps: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        cluster = Cluster()
        await History(cluster).run([*START, *steps])
        await cluster.close()

    asyncio.run(run())
