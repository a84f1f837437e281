"""A broker and the consumer groups of a coordinator in this process, for tests of `GroupConsumer`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kera.broker.log.read_plan import ordinal_of
from kera.client.consuming.group_consumer import GroupConsumer
from kera.core.base.ids import Position
from kera.core.errors import InvalidArgument, KeraError, UnknownStream
from kera.core.rpc import Method, api
from kera.v1 import common_pb2, consumer_group_pb2
from tests.unit.client.support import WAIT_S, FakeCluster, stream_info
from tests.unit.coordinator.fake_cluster import Cluster

ROW = bytes(4000)
GROUPS = 8
ROWS = 30 * GROUPS
"""Rows of 4 KB: they fill about `GROUPS` groups of two segments of 64 KiB."""


class GroupCluster(FakeCluster):
    """A cluster with one broker and a coordinator that can fail to answer."""

    coordinator_addresses = ("127.0.0.1:1",)
    """No server listens there: other tests cover the heartbeats of the thread."""

    def __init__(self, directory: Path, coordinator: Cluster, **stream: Any) -> None:
        super().__init__(directory, stream_info(**stream))
        (self.info,) = self.infos.values()
        self.coordinator = coordinator
        coordinator.coordinator.state.catalog.add(self.info)
        self.consumer_groups = coordinator.coordinator.consumer_groups
        self.consumer_groups.start()
        self.failures: deque[KeraError] = deque()
        """The errors of the next rounds."""
        self.lose_answers = 0
        """The answers of this many rounds get lost, after the rounds were carried out."""
        self.rounds = 0
        self.steps: list[int] = []
        """The number of steps in each round, and in each request to leave."""
        self.ended: list[str] = []
        """The conversations that have ended."""
        self.spoil: Callable[[Any], object] = lambda _: None
        """Changes the answer of each round."""
        self.reset: list[int] = []
        """The number of streamlets that each request has moved to another position."""

    async def ask(self, method: Method[Any, Any], message: Any, **_: Any) -> Any:
        if method.service != api.CONSUME_ROUND.service:
            return await super().ask(method, message)
        request = method.request.FromString(message.SerializeToString())
        if method in (api.CONSUME_ROUND, api.LEAVE):
            self.steps.append(len(request.steps))
        if method is api.RESET_CONSUMER_GROUP:
            self.reset.append(len(request.starts))
        if method is api.CONSUME_ROUND:
            self.rounds += 1
            if self.failures:
                raise self.failures.popleft()
            if self.info.name not in self.infos:
                raise UnknownStream("there is no such stream")
            if self.lose_answers and (request.steps or request.seen):
                self.lose_answers -= 1
                await self.consumer_groups.handlers()[method](request)
        answer = await self.consumer_groups.handlers()[method](request)
        if method is api.CONSUME_ROUND:
            self.spoil(answer)
        return answer

    def end_conversation(self, conversation: str) -> None:
        self.ended.append(conversation)

    async def all_streams(self) -> list[common_pb2.StreamInfo]:
        return list(self.infos.values())

    async def say(self, method: Method[Any, Any], request: Any) -> Any:
        """Ask the coordinator, past all faults."""
        return await self.consumer_groups.handlers()[method](request)

    async def expel(self, member_id: str) -> None:
        """The coordinator gives the member's groups to others; the member did nothing."""
        await self.say(api.LEAVE, consumer_group_pb2.LeaveRequest(consumer_group="app", member_id=member_id))
        self.consumer_groups._left.clear()  # the member did not leave by its own will, and may come back

    async def described(self) -> consumer_group_pb2.DescribeConsumerGroupResponse:
        """The consumer group of the tests, as the coordinator knows it."""
        request = consumer_group_pb2.DescribeConsumerGroupRequest(consumer_group="app")
        answer = consumer_group_pb2.DescribeConsumerGroupResponse()
        with contextlib.suppress(InvalidArgument):  # the consumer group does not exist yet
            answer = await self.say(api.DESCRIBE_CONSUMER_GROUP, request)
        return answer

    async def restart_coordinator(self) -> None:
        await self.consumer_groups.close()
        for _ in range(100):
            await asyncio.sleep(0)  # sleep: the old one finishes its writes before the next one reads
        await self.coordinator.restart()
        self.coordinator.coordinator.state.catalog.add(self.info)
        self.consumer_groups = self.coordinator.coordinator.consumer_groups
        self.consumer_groups.start()

    async def close(self) -> None:
        await self.consumer_groups.close()
        if self.open_channel is not None:
            await self.open_channel.close()
        await asyncio.sleep(0)


def numbered(number: int) -> bytes:
    return b"%06d" % number + ROW


async def take(consumer: GroupConsumer, count: int) -> list[int]:
    """Take `count` records and leave the loop, as a caller may."""
    taken: list[int] = []
    async with asyncio.timeout(WAIT_S):
        async for record in consumer:
            assert record.value is not None
            taken.append(int(record.value[:6]))
            if len(taken) == count:
                break
    return taken


async def take_batches(consumer: GroupConsumer, count: int) -> list[int]:
    taken: list[int] = []
    async with asyncio.timeout(WAIT_S):
        async for chunk in consumer.batches():
            taken += [int(value[:6]) for value in chunk.batch["value"].to_pylist()]
            if len(taken) >= count:
                break
    return taken


def truncate(groups: GroupCluster, group_id: int) -> int:
    """Delete all groups before this one; returns the ordinal of its first record."""
    (entry,) = groups.streams.get(groups.info.stream_id).streamlet(0).entries
    start = Position(group_id, 1, 0)
    record = ordinal_of(entry, start)
    groups.streams.move_start(entry, start, record)
    return record
