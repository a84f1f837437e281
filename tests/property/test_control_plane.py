"""Whatever crashes, stops or wakes, whenever: streamlets have one owner at most, and in the end one that lives."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.core.errors import KeraError
from kera.v1 import common_pb2, coordinator_pb2
from tests.examples import examples
from tests.property.control_world import BACKUPS, BROKERS, World

ROUNDS_MAX = 60
"""More than any plan of faults needs, until all has come to its end."""


def kill(broker_id: int) -> Callable[[World], None]:
    return lambda world: world.kill(broker_id)


def wake(broker_id: int, *, lost_memory: bool) -> Callable[[World], None]:
    """The process, if there is one, ends, and is started again in the next round."""

    def fault(world: World) -> None:
        world.kill(broker_id)
        world.waking.append((broker_id, lost_memory))

    return fault


def pause(broker_id: int, paused: bool) -> Callable[[World], None]:
    def fault(world: World) -> None:
        if broker := world.brokers.get(broker_id):
            broker.paused = paused

    return fault


def crash_coordinator(world: World) -> None:
    """It does not know, and goes on; in the next round another one leads."""
    world.wants_coordinator = True
    world.epoch += 1


BROKER_IDS = st.integers(1, BROKERS)
FAULTS = st.one_of(
    st.builds(kill, BROKER_IDS),
    st.builds(wake, BROKER_IDS, lost_memory=st.booleans()),
    st.builds(pause, BROKER_IDS, st.booleans()),
    st.just(crash_coordinator),
)
PLANS = st.lists(st.tuples(st.integers(1, 250), FAULTS), max_size=12)
MOVES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), BROKER_IDS), max_size=6)


async def build(world: World) -> None:
    await world.lead()
    for broker_id in range(1, BROKERS + 1):
        await world.start_broker(broker_id)
    for number in range(BACKUPS):
        backup = common_pb2.BackupInfo(grpc_address=f"backup-{number}:1")
        request = coordinator_pb2.RegisterBackupRequest(backup=backup, launch_id=f"backup-{number}")
        await world.coordinator.members.register_backup(request)
    for name, replication in (("copied", 1), ("twice", 2), ("plain", 0)):
        config = common_pb2.StreamConfig(streamlets=3, entries=1, group_segments=4, replication=replication)
        await world.coordinator.streams.create(name, config, common_pb2.StreamSchema())


def run(plan: list[Any], moves: list[tuple[int, int, int]], draining: int, slowness: int = 0) -> None:
    """The life of a cluster. A promise that is broken in the background shows in the log."""
    with structlog.testing.capture_logs() as logs:
        asyncio.run(live(plan, moves, draining, slowness))
    assert [entry for entry in logs if entry["event"].startswith("defect")] == []


async def live(plan: list[Any], moves: list[tuple[int, int, int]], draining: int, slowness: int = 0) -> None:
    world = World(slowness)
    await build(world)
    world.faults = sorted(((world.steps + at, fault) for at, fault in plan), key=lambda fault: fault[0])
    for number in range(ROUNDS_MAX):
        tasks = [asyncio.create_task(move(world, *where)) for at, *where in moves if at == number]
        if number == 1 and draining:
            await drain(world, draining)
        await world.round()
        await asyncio.gather(*tasks)
        if not world.faults and number > 5:
            break
    # Faults end: those who run go on running, at least two of them, and nobody is stopped.
    world.faults.clear()
    for broker in world.brokers.values():
        broker.paused = False
    for broker_id in range(1, BROKERS + 1):
        if len(world.brokers) + len(world.waking) < 2 and broker_id not in world.brokers:
            world.waking.append((broker_id, False))
    for _ in range(ROUNDS_MAX):
        await world.round()
        try:
            world.check_settled()
        except AssertionError:
            continue
        break
    world.check_settled()
    await world.close()


async def move(world: World, streamlet_id: int, broker_id: int) -> None:
    with contextlib.suppress(KeraError):
        await world.coordinator.migration.move("copied", streamlet_id, broker_id)


async def drain(world: World, broker_id: int) -> None:
    with contextlib.suppress(KeraError):
        await world.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=broker_id))


@settings(max_examples=examples(200), deadline=None)
@given(PLANS, MOVES, st.sampled_from([0, 0, 1]), st.integers(0, 3))
def test_replicated_streamlets_come_to_one_living_owner(
    plan: list[Any], moves: list[tuple[int, int, int]], draining: int, slowness: int
) -> None:
    run(plan, moves, draining, slowness)


def test_a_lost_broker_at_each_step_of_its_recovery_loses_its_successor_and_its_coordinator() -> None:
    """The systematic part: one more fault at each step after the first one."""
    for second in (kill(2), kill(3), crash_coordinator, wake(1, lost_memory=False), wake(1, lost_memory=True)):
        for step in range(2, 60):
            run([(1, kill(1)), (step, second)], [], 0)
