"""A coordinator with streams that consumer groups read, and brokers that tell what hops of them took."""

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
"""The broker."""
IN = (messages.HOP_GATHER, messages.HOP_SEND, messages.HOP_REPLICATE)
OUT = (messages.HOP_HAND_OVER, messages.HOP_PREFETCH, messages.HOP_WORK)


class World:
    """Two streams, each of which a consumer group reads."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.version = 0
        """Of the budgets that the broker goes by."""
        self.budgets: dict[str, messages.StreamBudget] = {}
        """By stream, likewise."""
        self.own_linger_us = 0
        """Of a producer that goes by no advice."""

    @property
    def latency(self) -> LatencyService:
        return self.cluster.coordinator.latency

    async def begin(self) -> None:
        """A broker registers, and streams are created and read."""
        await self.cluster.register("a")
        for name, group in READERS.items():
            await self.cluster.create(name)
            await self.read(group, name)

    def stream_id(self, name: str) -> int:
        return self.cluster.coordinator.state.catalog.named(name).stream_id

    async def read(self, group: str, stream: str) -> None:
        """A consumer group begins a stream."""
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
        """Figures of all hops of streams; `hops`: those that took something else, by their words.

        Writers let their chunks fill for as long as they are advised to.
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
        """The broker says what it has measured, and notes what it is told."""
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
        """A window goes by, at whose end the broker has measured this, see `took`; then it is told what follows."""
        await self.beat()
        figures = self.took(mean_us, streams, **hops)
        await self.pass_by(seconds, figures)
        await self.cluster.settle()
        await self.beat(figures)

    async def pass_by(self, seconds: float, figures: Iterable[messages.HopFigures] = ()) -> None:
        """Time in which the broker is heard of."""
        figures, step_s = list(figures), self.cluster.settings.heartbeat_interval_ms / 1000
        for _ in range(round(seconds / step_s)):
            self.cluster.clock.advance(step_s)
            self.cluster.coordinator.state.brokers.tick()
            await self.beat(figures)

    async def fail_over(self) -> None:
        """Another coordinator leads, and has heard the broker for long enough to look."""
        await self.cluster.restart()

    @property
    def first_look_s(self) -> float:
        """After which a new coordinator looks."""
        return FIRST_BEATS * self.cluster.settings.heartbeat_interval_ms / 1000


def word(hop: int) -> str:
    return messages.Hop.Name(hop).removeprefix("HOP_").lower()  # type: ignore[arg-type]
