"""Chunks acknowledged as replicated keep their copies, in any history of backups, streams and the broker."""

import os
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.property.replication_world import BACKUPS, SIZES, World


def append(world: World, a: int, b: int, c: int) -> None:
    for producer in range(1 + c % 3):
        world.append(a, b + producer, SIZES[(a + c) % len(SIZES)], (2, 2, 1, 3)[c % 4])


def disk(world: World, a: int, _b: int, _c: int) -> None:
    if a % 2:
        world.engine.memory.segments.close_all()
    world.engine.run()


def close(world: World, _a: int, _b: int, _c: int) -> None:
    world.replication.logs.close_open()
    world.wire.pump()


OPERATIONS: dict[str, tuple[int, Callable[[World, int, int, int], object]]] = {
    "nothing": (1, lambda _world, _a, _b, _c: None),
    "append": (4, append),
    "answer": (3, lambda world, a, _, c: world.answer(a, c)),
    "run one": (1, lambda world, a, _b, _c: world.wire.run(1 + a % BACKUPS)),
    "run all": (1, lambda world, _a, _b, _c: world.wire.run()),
    "lose": (2, lambda world, a, b, _: world.lose(a, b, memory=False)),
    "forget": (1, lambda world, a, b, _: world.lose(a, b, memory=True)),
    "connect": (2, lambda world, a, _b, _c: world.wire.connect(1 + a % BACKUPS)),
    "full": (1, lambda world, a, b, _: setattr(world.backups[a % BACKUPS], "full", b % 2 == 0)),
    "tick": (2, lambda world, a, _b, _c: world.wire.tick((50, 300, 1000, 2500)[a % 4])),
    "disk": (1, disk),
    "repair": (3, lambda world, _a, _b, _c: world.repairer.step()),
    "retain": (1, lambda world, a, b, _: world.retain(a, b % 3)),
    "virtual logs": (1, lambda world, a, b, _: world.set_virtual_logs(a, b)),
    "level": (1, lambda world, a, b, _: world.set_level(a, 1 + b % 3)),
    "constrain": (2, lambda world, a, b, _: world.constrain(a, (0, 20, 200, 5000)[b % 4])),
    "close": (1, close),
    "drop": (1, lambda world, a, _b, _c: world.drop(a)),
    "kill": (1, lambda world, _a, _b, _c: world.kill()),
}
"""The possible events and their weights."""
NAMES = [name for name, (weight, _) in OPERATIONS.items() for _ in range(weight)]
EXAMPLES = int(os.environ.get("KERA_FUZZ_EXAMPLES", examples(400)))
NUMBER = st.integers(0, 15)
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), NUMBER, NUMBER, NUMBER), min_size=50, max_size=60)
"""Long ones, as hypothesis would otherwise make short ones; they shrink to steps that do nothing."""


def perform(world: World, name: str, a: int, b: int, c: int) -> None:
    """Perform an event, and check the invariants."""
    OPERATIONS[name][1](world, a, b, c)
    world.check()


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_promised_chunks_keep_their_copies_on_backups_that_have_not_failed(
    steps: list[tuple[str, int, int, int]],
) -> None:
    world = World()
    try:
        for step in steps:
            perform(world, *step)
        world.settle()
    finally:
        world.close()


def test_chunks_left_only_on_backups_after_the_loss_of_memory_stay_there() -> None:
    world = World()
    try:
        for number in (0, 3):
            for _ in range(5):
                world.append(number, 1, SIZES[2], 2)
        world.wire.run()
        world.replication.logs.close_open()
        world.wire.pump()
        world.wire.run()
        world.engine.run()  # the index knows the virtual segments
        world.append(0, 1, SIZES[2], 2)
        world.wire.run()  # and not this one
        world.check()
        held = {key: set(holders) for key, holders in world.holders.items()}
        world.kill(memory=True)
        world.wire.run()
        for _ in range(10):
            world.wire.tick(3000)
            world.repairer.step()
            world.wire.run()
            world.engine.run()

        assert all(len(world.wire.holders(key)) >= len(ids) for key, ids in held.items())
    finally:
        world.close()
