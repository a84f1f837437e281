"""A coordinator with streams, their consumer groups, and a broker that reports the times of hops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kera.coordinator.latency.planning import FIRST_BEATS
from kera.coordinator.latency.service import LatencyService
from kera.v1 import common_pb2, coordinator_pb2
from kera.v1 import consumer_group_pb2 as groups
from kera.v1 import latency_pb2 as messages
from tests.unit.coordinator.fake_cluster import Cluster

PATH = ("clicks", "group:enrich", "visits", "group:dashboard")
READERS = {"clicks": "enrich", "visits": "dashboard"}
LIMIT_US = 300_000
WINDOW_S = 15.0
FIRST = 1
"""The id of the broker."""
IN = (messages.HOP_GATHER, messages.HOP_SEND, messages.HOP_REPLICATE)
OUT = (messages.HOP_HAND_OVER, messages.HOP_PREFETCH, messages.HOP_WORK)


class World:
    """Two streams; a consumer group reads each of them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.version = 0
        """The version of the budgets that the broker has."""
        self.budgets: dict[str, messages.StreamBudget] = {}
        """The budgets that the broker has, by name of the stream."""
        self.own_linger_us = 0
        """The linger time of a producer that ignores the advice."""

    @property
    def latency(self) -> LatencyService:
        return self.cluster.coordinator.latency

    async def begin(self) -> None:
        """Register a broker, create the streams, and let their consumer groups begin."""
        await self.cluster.register("a")
        for name, group in READERS.items():
            await self.cluster.create(name)
            await self.read(group, name)

    def stream_id(self, name: str) -> int:
        return self.cluster.coordinator.state.catalog.named(name).stream_id

    async def read(self, group: str, stream: str) -> None:
        """Let a consumer group begin to read a stream."""
        cursor = common_pb2.Cursor(stream_id=self.stream_id(stream), group_id=1, segment_id=1)
        start = groups.StreamletStart(stream_id=cursor.stream_id, cursors=[cursor])
        await self.cluster.coordinator.consumer_groups.reset(
            groups.ResetConsumerGroupRequest(consumer_group=group, starts=[start])
        )

    async def create(self, name: str = "checkout", **fields: Any) -> messages.LatencyConstraint:
        constraint = messages.LatencyConstraint(**{"name": name, "path": PATH, "limit_us": LIMIT_US, **fields})
        request = messages.CreateLatencyConstraintRequest(constraint=constraint)
        found = (await self.latency.create(request)).constraint
        await self.latency.planning.work.idle()
        return found

    async def alter(self, name: str = "checkout", **fields: Any) -> messages.LatencyConstraint:
        request = messages.AlterLatencyConstraintRequest(name=name, **fields)
        found = (await self.latency.alter(request)).constraint
        await self.latency.planning.work.idle()
        return found

    async def delete(self, name: str = "checkout") -> None:
        await self.latency.delete(messages.DeleteLatencyConstraintRequest(name=name))
        await self.latency.planning.work.idle()

    def describe(self, name: str = "checkout") -> messages.LatencyDescription:
        return self.latency.describe(messages.DescribeLatencyConstraintRequest(name=name)).description

    def took(self, mean_us: int = 1_000, streams: Iterable[str] = READERS, **hops: int) -> list[messages.HopFigures]:
        """Figures of all hops of streams; `hops` are other times of some hops, by their words.

        The writers follow the advised time to fill their chunks.
        """
        found = []
        for stream in streams:
            advised_us = self.budgets[stream].gather_us if stream in self.budgets else 0
            for hop in (*IN, *OUT):
                took_us = hops.get(word(hop), advised_us if word(hop) == "gather" else mean_us)
                found.append(
                    messages.HopFigures(
                        stream_id=self.stream_id(stream),
                        hop=hop,
                        consumer_group=READERS[stream] if hop in OUT else "",
                        count=100,
                        mean_us=took_us,
                        p99_us=took_us,
                        clock_error_us=2_000 if hop == messages.HOP_HAND_OVER else 0,
                        own_linger_us=self.own_linger_us if hop == messages.HOP_GATHER else 0,
                    )
                )
        return found

    async def beat(self, figures: Iterable[messages.HopFigures] = ()) -> coordinator_pb2.HeartbeatResponse:
        """Let the broker report its figures, and note the budgets in the answer."""
        epoch = self.cluster.coordinator.state.brokers.epoch(FIRST)
        answer = await self.cluster.coordinator.members.heartbeat(
            coordinator_pb2.HeartbeatRequest(
                broker_id=FIRST, broker_epoch=epoch, latency=figures, budgets_version=self.version
            )
        )
        if answer.HasField("budgets"):
            names = {each.stream_id: each.name for each in self.cluster.coordinator.state.catalog.streams()}
            self.version = answer.budgets.version
            self.budgets = {names[each.stream_id]: each for each in answer.budgets.budgets if each.stream_id in names}
        return answer

    async def window(
        self, seconds: float = WINDOW_S, *, streams: Iterable[str] = READERS, mean_us: int = 1_000, **hops: int
    ) -> None:
        """Let a window pass in which the broker measures this, see `took`, and let it get the new budgets."""
        await self.beat()
        figures = self.took(mean_us, streams, **hops)
        await self.pass_by(seconds, figures)
        await self.cluster.settle()
        await self.beat(figures)

    async def pass_by(self, seconds: float, figures: Iterable[messages.HopFigures] = ()) -> None:
        """Let time pass in which the broker sends heartbeats."""
        figures, step_s = list(figures), self.cluster.settings.heartbeat_interval_ms / 1000
        for _ in range(round(seconds / step_s)):
            self.cluster.clock.advance(step_s)
            self.cluster.coordinator.state.brokers.tick()
            await self.beat(figures)

    async def fail_over(self) -> None:
        """Start another coordinator."""
        await self.cluster.restart()

    @property
    def first_look_s(self) -> float:
        """The time until a new coordinator looks at the figures."""
        return FIRST_BEATS * self.cluster.settings.heartbeat_interval_ms / 1000


def word(hop: int) -> str:
    return messages.Hop.Name(hop).removeprefix("HOP_").lower()  # type: ignore[arg-type]
