"""Repeated requests of a cluster's live view: short, and without asking twice for known answers.

A cluster may have ten thousand streams: for each there is only a summary for one row (`StreamSummary`), made without
opening its schema, and names of streams are requested once and not for each consumer group.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Self

from kera.client.admin.admin import Admin
from kera.client.admin.consumer_groups import (
    ConsumerGroupDescription,
    ConsumerGroupSummary,
    describe_consumer_group,
    list_consumer_groups,
)
from kera.client.admin.control import RecoveryDescription
from kera.client.admin.latency import Latency, LatencyDescription
from kera.client.cluster.cluster import Cluster
from kera.client.stream_config import durability_name
from kera.client.types import ClusterDescription, StreamDescription
from kera.core.rpc import Channel, api
from kera.v1 import common_pb2, coordinator_pb2

AT_ONCE = 500
"""Number of streams that are processed before other tasks get a turn."""


class StreamSummary(NamedTuple):
    """A summary of a stream, for one row."""

    stream_id: int
    name: str
    streamlets: int
    replication: int
    durability: str
    owners: Mapping[int, int]
    """Number of owned streamlets, by broker."""
    holders: frozenset[int]
    """Brokers that have records of it."""
    spread: int = 0
    """Number of streamlets that have moved, so that brokers besides the owner have records of them."""
    entries: int = 1
    """Number of entries of each streamlet."""
    created_us: int = 0
    """Time of its creation, microseconds since the Unix epoch."""
    typed: bool = False
    """Whether its values are rows with columns."""
    retention_ms: int = 0
    """Retention by age; 0: records stay, whatever their age."""
    retention_bytes: int = 0
    """Retention of a streamlet by size; 0: records stay, however many bytes they have."""
    retention_consumed: bool = False
    """Whether records are removed once the stream's consumer groups have read them."""

    @classmethod
    def from_message(cls, info: common_pb2.StreamInfo) -> Self:
        """Convert from the wire form."""
        return cls(
            info.stream_id,
            info.name,
            info.config.streamlets,
            info.config.replication,
            durability_name(info.config.durability),
            Counter(each.broker_id for each in info.assignments),
            frozenset(
                broker_id
                for each in info.assignments
                for broker_id in (each.broker_id, *(interval.broker_id for interval in each.intervals))
            ),
            sum(any(interval.broker_id != each.broker_id for interval in each.intervals) for each in info.assignments),
            info.config.entries,
            info.created_us,
            any(each.typed for each in info.schemas),
            info.config.retention_ms,
            info.config.retention_bytes,
            info.config.retention_consumed,
        )


class Watch:
    """Makes requests for a live view. The client of `admin` must stay open as long as this object is used."""

    def __init__(self, admin: Admin) -> None:
        self._cluster: Cluster = admin._cluster  # noqa: SLF001 - both are part of the SDK
        self._latency = Latency(self._cluster)
        self._names: dict[int, str] = {}
        self._infos: list[common_pb2.StreamInfo] = []

    async def cluster(self) -> ClusterDescription:
        """See `Admin.describe_cluster`."""
        return await self._cluster.describe()

    async def streams(self) -> list[StreamSummary]:
        """Return all streams that the caller may see, by name."""
        found = []
        self._infos = await self._cluster.all_streams()
        for number, info in enumerate(self._infos):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            found.append(StreamSummary.from_message(info))
        self._names = {each.stream_id: each.name for each in found}
        return found

    def descriptions(self) -> list[StreamDescription]:
        """Return full descriptions of the streams of the last `streams` call. Slow for many streams: use a thread."""
        return [StreamDescription.from_message(info) for info in self._infos]

    async def recoveries(self) -> list[RecoveryDescription]:
        """See `Admin.recoveries`."""
        answer = await self._cluster.ask(api.LIST_RECOVERIES, coordinator_pb2.ListRecoveriesRequest())
        return [RecoveryDescription.from_message(recovery) for recovery in answer.recoveries]

    async def groups(self) -> list[ConsumerGroupSummary]:
        """Return consumer groups, by name, with their streams as far as `streams` has returned them."""
        return await list_consumer_groups(self._cluster, self._names)

    async def group(self, name: str) -> ConsumerGroupDescription:
        """Describe one group in full, with such streams. Raises `InvalidArgument` if it no longer exists."""
        return await describe_consumer_group(self._cluster, name, self._names)

    async def constraints(self) -> list[LatencyDescription]:
        """See `Latency.constraints`."""
        return await self._latency.constraints()

    async def constraint(self, name: str) -> LatencyDescription:
        """See `Latency.describe`."""
        return await self._latency.describe(name)

    def channel(self, address: str) -> Channel:
        """Open a connection to any daemon, with the client's identity; the caller closes it."""
        return self._cluster.runtime.channel(address)
