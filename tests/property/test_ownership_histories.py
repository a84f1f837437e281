"""Streamlets move, brokers crash, are recovered and emptied: what was acknowledged is there, once, in its place.

Histories are drawn at random; each number is one. See ``ownership_world`` for what is real.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
import structlog

from kera.core.errors import KeraError
from kera.v1 import common_pb2, coordinator_pb2
from kera.v1.coordinator_pb2 import RECOVERY_PHASE_CANCELLED, RECOVERY_PHASE_DONE
from tests.property.ownership_world import BROKERS, REPLICATION, Client, Ref, World, eventually, world_of
from tests.unit.broker.conftest import shm_dir  # noqa: F401 - a fixture
from tests.unit.broker.takeover_support import header_of

HISTORIES = 6
STEPS = 16
ENTRIES = 2
PRODUCERS = 4
STREAMLETS = 2
STEP_WEIGHTS = {
    "write": 10,
    "unknown": 3,
    "move": 8,
    "crash": 3,
    "crash_memory": 2,
    "lose": 3,
    "come_back": 3,
    "silence": 1,
    "backup": 1,
    "drain": 1,
    "alter": 2,
    "truncate": 2,
    "check": 3,
    "repeat": 1,
    "delete": 0.5,
    "coordinator": 1,
    "wait": 2,
}
RESTARTING = (2, 7, 18)
"""In 18 a streamlet is handed over and goes back, with nothing written between, and then its owner is lost."""
RESTART_STEPS = 24
RESTART_WEIGHTS = {**STEP_WEIGHTS, "restart": 12, "come_back": 6}
"""Histories in which brokers are stopped as operators do; the others stay what they were."""


class History:
    """One of them."""

    def __init__(self, world: World, random: Random, weights: Mapping[str, float]) -> None:
        self.world = world
        self.weights = weights
        self.random = random
        self.client = Client(world, random, ENTRIES)
        self.created = 0
        self.names: list[str] = []
        self.steps: list[str] = []
        self.levels: dict[str, int] = {}
        self.silenced: set[int] = set()

    def say(self, text: str) -> None:
        self.steps.append(text)

    @property
    def refs(self) -> list[Ref]:
        return [(name, streamlet_id) for name in self.names for streamlet_id in range(STREAMLETS)]

    async def create(self) -> None:
        self.created += 1
        name = f"stream-{self.created}"
        level = self.random.choice(
            [
                common_pb2.DURABILITY_REPLICATED,
                common_pb2.DURABILITY_REPLICATED,
                common_pb2.DURABILITY_PERSISTED,
                common_pb2.DURABILITY_LEADER,
            ]
        )
        config = common_pb2.StreamConfig(
            streamlets=STREAMLETS,
            entries=ENTRIES,
            group_segments=2,
            replication=REPLICATION,
            durability=level,
            virtual_logs=self.random.randrange(1, ENTRIES + 1),
        )
        for _ in range(100):
            with contextlib.suppress(KeraError):
                await self.world.coordinator.streams.create(name, config, common_pb2.StreamSchema(schema_id=1))
                break
            await asyncio.sleep(0.05)  # sleep: until there are enough
        else:
            return
        self.names.append(name)
        self.levels[name] = level
        self.say(f"create({name}, {level})")

    async def run(self, steps: int) -> None:
        await self.create()
        await self.create()
        for _ in range(steps):
            step = self.random.choices(list(self.weights), list(self.weights.values()))[0]
            await getattr(self, step)()
            assert not self.world.defects, self.world.defects
        await self.settle()

    # -- what clients do -------------------------------------------------------------------------------------------

    def ref(self) -> Ref:
        return self.random.choice(self.refs)

    async def write(self) -> None:
        ref, producer = self.ref(), self.random.randrange(PRODUCERS)
        count = self.random.randrange(1, 7)
        self.say(f"write({ref}, {producer}, {count})")
        await self.client.write(ref, producer, count)

    async def unknown(self) -> None:
        ref, producer = self.ref(), self.random.randrange(PRODUCERS)
        self.say(f"unknown({ref}, {producer})")
        await self.client.lose_answer(ref, producer)

    async def repeat(self) -> None:
        ref = self.ref()
        self.say(f"repeat({ref})")
        await self.client.repeat_last(ref)

    async def check(self) -> None:
        ref = self.ref()
        self.say(f"check({ref})")
        await self.client.check(ref)

    async def truncate(self) -> None:
        ref = self.ref()
        self.say(f"truncate({ref})")
        await self.client.truncate(ref)

    # -- what operators do -----------------------------------------------------------------------------------------

    async def move(self) -> None:
        ref = self.ref()
        to = self.random.randrange(BROKERS) + 1
        moving = asyncio.ensure_future(self.world.coordinator.migration.move(*ref, to))
        at_once = self.random.random() < 0.3
        if at_once:
            for _ in range(self.random.randrange(30)):
                await asyncio.sleep(0)  # sleep: turns of the loop
            moving.add_done_callback(lambda done: done.cancelled() or done.exception())
            self.say(f"move({ref}, {to}, not waited for)")
            return
        try:
            await moving
            self.say(f"move({ref}, {to})")
        except KeraError as error:
            self.say(f"move({ref}, {to}): {error.code}")

    async def alter(self) -> None:
        name = self.random.choice(self.names)
        self.say(f"alter({name})")
        request = coordinator_pb2.AlterStreamRequest(name=name)
        if self.random.random() < 0.5:
            request.virtual_logs = self.random.randrange(1, ENTRIES + 1)
        else:
            request.retention_bytes = (1 << 40) + self.random.randrange(100)
        await self.world.coordinator.streams.alter(request)

    async def delete(self) -> None:
        name = self.random.choice(self.names)
        self.say(f"delete({name})")
        self.names.remove(name)
        await self.world.coordinator.streams.delete(name)
        await self.create()
        if not self.names:
            await self.create()

    async def drain(self) -> None:
        draining = [one for one in self.world.nodes if self.world.coordinator.state.brokers.is_draining(one)]
        broker_id = draining[0] if draining else self.random.randrange(BROKERS) + 1
        self.say(f"drain({broker_id}, undo={bool(draining)})")
        await self.world.coordinator.drains.drain(
            coordinator_pb2.DrainRequest(broker_id=broker_id, undo=bool(draining))
        )

    async def coordinator(self) -> None:
        self.say("coordinator()")
        await self.world.lead()

    async def wait(self) -> None:
        """Something comes to its end, or not."""
        time_s = self.random.choice([0.01, 0.05, 0.2, 0.5])
        self.say(f"wait({time_s})")
        await asyncio.sleep(time_s)  # sleep: this is what is tested

    # -- what happens ----------------------------------------------------------------------------------------------

    def running(self) -> list[int]:
        return sorted(self.world.launches)

    def losing(self) -> None:
        """What nobody waited for may be lost with a broker."""
        for ref in self.refs:
            if self.levels[ref[0]] == common_pb2.DURABILITY_LEADER:
                self.client.model(ref).lossy = True

    async def crash(self) -> None:
        """A process dies and comes back with its memory."""
        if not self.running():
            return
        broker_id = self.random.choice(self.running())
        self.say(f"crash({broker_id})")
        await self.unknown()
        await self.world.kill(broker_id, memory=False, noticed=False)
        await self.world.start(broker_id)

    async def crash_memory(self) -> None:
        """A host dies and comes back at once."""
        if not self.running():
            return
        broker_id = self.random.choice(self.running())
        self.say(f"crash_memory({broker_id})")
        await self.unknown()
        self.losing()
        await self.world.kill(broker_id, memory=True, noticed=False)
        await self.world.start(broker_id)

    async def lose(self) -> None:
        """A broker is gone; the coordinator notices."""
        running = self.running()
        if len(running) < 2:
            return
        memory = self.random.random() < 0.6
        broker_id = self.random.choice(running)
        self.say(f"lose({broker_id}, memory={memory})")
        await self.unknown()
        self.losing()
        await self.world.kill(broker_id, memory=memory)

    async def restart(self) -> None:
        """A broker is told to stop, hands over, and is back at once, or later, or not within the grace."""
        if not self.running():
            return
        broker_id = self.random.choice(self.running())
        launch = self.world.launches[broker_id]
        stays_away, said = self.random.random() < 0.3 and len(self.running()) > 1, self.random.random() < 0.9
        meanwhile = self.random.choice(["nothing", "wait", "coordinator"])
        request = coordinator_pb2.PrepareRestartRequest(broker_id=broker_id, epoch=launch.node.epoch, wait_ms=1000)
        self.say(f"restart({broker_id}, stays away={stays_away}, said={said}, meanwhile {meanwhile})")
        with contextlib.suppress(KeraError):  # it may have been given up for lost
            await self.world.coordinator.restarts.prepare(request)
            launch.node.service.orders.seal_all()
            await self.unknown()
            if said:
                request.stopping = True
                await self.world.coordinator.restarts.prepare(request)
        await self.world.kill(broker_id, memory=False, noticed=False)
        if meanwhile != "nothing":
            await getattr(self, meanwhile)()
        if stays_away:
            self.losing()
            self.world.notice(broker_id)
        else:
            await self.world.start(broker_id)

    async def come_back(self) -> None:
        away = [one for one in self.world.nodes if one not in self.world.launches]
        if away:
            broker_id = self.random.choice(away)
            self.say(f"come_back({broker_id})")
            await self.world.start(broker_id)

    async def silence(self) -> None:
        """A broker is taken for dead, and does not know."""
        running = [one for one in self.running() if not self.world.launches[one].silent]
        if len(running) < 2:
            return
        broker_id = self.random.choice(running)
        self.say(f"silence({broker_id})")
        launch = self.world.launches[broker_id]
        launch.silent = True
        self.losing()
        self.world.notice(broker_id)
        for _ in range(self.random.randrange(1, 4)):
            ref, producer = self.ref(), self.random.randrange(PRODUCERS)
            model = self.client.model(ref)
            if not model.lossy and self.levels[ref[0]] != common_pb2.DURABILITY_LEADER:
                chunks = [self.client.chunk(ref, producer, model.sequences.get(producer, 0))]
                sending = asyncio.ensure_future(self.client.send(ref, chunks, broker_id))
                await asyncio.wait([sending], timeout=0.1)
                if sending.done():
                    statuses = sending.result()
                    if statuses and not statuses[0].error.code:
                        model.sequences[producer] = model.sequences.get(producer, 0) + 1
                else:
                    sending.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await sending
        launch.silent = False

    async def backup(self) -> None:
        """A backup ends, or comes again."""
        away = [backup for backup in self.world.backups if backup.engine is None]
        self.say(f"backup({[backup.backup_id for backup in away]})")
        if away:
            await self.world.start_backup(away[0])
        else:
            await self.world.stop_backup(self.random.choice(self.world.backups))

    # -- the end ---------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        self.say("settle()")
        for backup in self.world.backups:
            if backup.engine is None:
                await self.world.start_backup(backup)
        if not self.world.launches:
            await self.world.start(1)
        for broker_id in self.world.nodes:
            if broker_id not in self.world.launches:
                if self.random.random() < 0.7:
                    await self.world.start(broker_id)
                else:
                    self.world.notice(broker_id)
        for ref in self.refs:
            await self.client.check(ref)
            await self.client.repeat_last(ref)
            for producer in range(PRODUCERS):
                await self.client.write(ref, producer, 1)
        await eventually(self.unsettled)
        for ref in self.refs:
            await self.client.check(ref)
            await self.client.repeat_last(ref)
        await eventually(self.unreplicated)
        for ref in self.refs:
            await self.client.check(ref)
        assert not self.world.defects, self.world.defects

    async def unsettled(self) -> str:
        coordinator = self.world.coordinator
        for info in coordinator.recoveries.describe_all():
            if info.phase not in {RECOVERY_PHASE_DONE, RECOVERY_PHASE_CANCELLED}:
                return f"a recovery goes on:\n{info}\n{coordinator.state.catalog.streams()}"
        for stream in coordinator.state.catalog.streams():
            for one in stream.assignments:
                if one.sources:
                    return f"{stream.name} has sources:\n{one}"
        return ""

    async def unreplicated(self) -> str:
        """What of replicas is not as it should be."""
        coordinator = self.world.coordinator
        streams = {stream.stream_id: stream.name for stream in coordinator.state.catalog.streams()}
        recovered = {
            info.broker_id: max(
                (
                    one.before_epoch
                    for one in coordinator.recoveries.describe_all()
                    if one.broker_id == info.broker_id and one.phase == RECOVERY_PHASE_DONE and one.cause != "drained"
                ),
                default=0,
            )
            for info in coordinator.recoveries.describe_all()
        }
        copies: Counter[tuple[int, int, int, int, int, int]] = Counter()
        for backup in self.world.backups:
            for broker_id in self.world.nodes:
                assert backup.engine is not None
                for replica in backup.engine.store.replicas.after(broker_id, 0, 100_000)[0]:
                    info = replica.info()
                    if info.stream_id not in streams:
                        return f"backup {backup.backup_id} has a replica of a stream that is gone: {info}"
                    if info.broker_epoch < recovered.get(broker_id, 0):
                        return f"backup {backup.backup_id} has a replica of a launch that was recovered: {info}"
                    try:
                        headers = await self.world.backup_calls.headers(backup, info)
                    except KeraError as error:
                        return f"{info} has gone meanwhile: {error}"
                    seen = set()
                    for header in headers:
                        place = (header.stream_id, header.streamlet_id, header.entry)
                        seen.add((*place, header.group_id, header.segment_id, header.first_record))
                    copies.update(seen)
        for ref in self.refs:
            model = self.client.model(ref)
            stream_id = coordinator.state.catalog.named(ref[0]).stream_id
            for id_, known in model.acknowledged.items():
                stored = model.stored.get(id_)
                if stored is None or model.lossy or known.first_record < model.removed.get(known.entry, 0):
                    continue
                header = header_of(stored)
                where = (stream_id, ref[1], header.entry, header.group_id, header.segment_id, header.first_record)
                if copies[where] < REPLICATION:
                    return f"{id_} of {ref} at {where} has {copies[where]} copies"
        return ""


async def live(number: int, steps: int, root: Path, shm: Path, weights: Mapping[str, float] = STEP_WEIGHTS) -> None:
    async with world_of(root, shm) as world:
        history = History(world, Random(number), weights)
        try:
            await history.run(steps)
        except BaseException as error:
            error.add_note(f"history {number}:\n  " + "\n  ".join(history.steps))
            raise


@pytest.mark.parametrize("number", range(HISTORIES))
async def test_what_was_acknowledged_is_there_whoever_owns_it(
    number: int,
    tmp_path: Path,
    shm_dir: Path,  # noqa: F811 - the fixture
) -> None:
    with structlog.testing.capture_logs() as logs:
        await live(number, STEPS, tmp_path, shm_dir)
    assert [entry for entry in logs if entry["event"].startswith("defect")] == []


@pytest.mark.parametrize("number", RESTARTING)
async def test_what_was_acknowledged_is_there_whoever_restarts(
    number: int,
    tmp_path: Path,
    shm_dir: Path,  # noqa: F811 - the fixture
) -> None:
    with structlog.testing.capture_logs() as logs:
        await live(number, RESTART_STEPS, tmp_path, shm_dir, RESTART_WEIGHTS)
    assert [entry for entry in logs if entry["event"].startswith("defect")] == []
