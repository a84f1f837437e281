"""Getting what is to come in the background: nothing that goes wrong ends it, and what nobody has becomes a hole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kera.broker.records import TO_COME, SegmentAddress, SegmentRecord
from kera.broker.recovery.rebuild import Rebuild, RebuildLimits, keep_doing
from kera.broker.recovery.scan import Scanned
from kera.broker.recovery.survey import Materials
from kera.broker.storage.disk import LocalDisk
from kera.core.errors import KeraError, Unavailable
from kera.core.ids import Position

REF = (1, 0)
ADDRESS = SegmentAddress(*REF, 0, 1, 1)
RECORD = SegmentRecord(TO_COME, 4096, False, 2, 0, 0, 2, 0, 0, 0)
LIMITS = RebuildLimits(retry_s=0.01, rescan_s=0.01)


class World:
    """One segment that is to come, and what a rebuild needs of a broker."""

    def __init__(self, root: Path) -> None:
        self.record = RECORD
        self.entry: Any = SimpleNamespace(exists=lambda _: True, address=lambda _: ADDRESS, committed={})
        self.looks: list[Exception | str] = []
        """What the next looks for it end with: an error, or why a backup is away. Then all answer, and have nothing."""
        index = SimpleNamespace(
            segment=lambda _: self.record, segments_of_streamlet=lambda *_: iter([(ADDRESS, self.record)])
        )
        store: Any = SimpleNamespace(
            index=index, disk=LocalDisk(root), arriving_path=lambda number: root / "arriving" / f"{number}"
        )
        memory: Any = SimpleNamespace(take_physical_id=lambda: 5, install=self.install)
        coverage = SimpleNamespace(covers=lambda *_: False, is_settled=lambda _: True)
        replication: Any = SimpleNamespace(
            coverage=coverage, rests=True, recovered=lambda *_: None, close_soon=lambda _: None
        )
        self.rebuild = Rebuild(
            store,
            memory,
            replication,
            find=lambda _: self.entry,
            backups=list,
            rescan=self.rescan,
            limits=LIMITS,
        )

    def install(self, _entry: Any, _key: Any, record: SegmentRecord, done: Callable[[KeraError | None], None]) -> None:
        self.record = record
        done(None)

    async def rescan(self, _refs: Any) -> Materials:
        match self.looks.pop(0) if self.looks else None:
            case Exception() as error:
                raise error
            case str() as away:
                return Materials([], Scanned(away={1: away}))
        return Materials([], Scanned())

    def begin(self, materials: Materials | None) -> None:
        self.rebuild.begin(REF, frozenset({(9, 3)}), 0, materials, {0: Position(1, 1, 0)})

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)  # sleep: between looks

    @property
    def waits_for(self) -> list[str]:
        return self.rebuild.book.streamlets[REF].waits_for


async def test_what_no_backup_has_becomes_a_hole(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.looks = ["it is not alive"] * 5
    world.begin(Materials([], Scanned()))
    await world.until(lambda: any("are on no backup that answers; [1] do not" in each for each in world.waits_for))
    await world.until(lambda: world.rebuild.book.streamlets[REF].readable)

    assert world.record == RECORD._replace(physical_id=5)
    assert world.rebuild.book.totals.chunks_lost == 2
    world.rebuild.book.look()
    assert world.rebuild.book.streamlets[REF].restored, "holes need not be covered"
    await world.rebuild.close()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("error", [Unavailable("a bad moment"), RuntimeError("a defect")])
async def test_a_look_that_fails_is_made_again(tmp_path: Path, error: Exception, known: bool) -> None:
    world = World(tmp_path)
    world.looks = [error] * 3
    world.begin(Materials([], Scanned()) if known else None)
    if not known:
        await world.until(lambda: bool(world.waits_for))
        expected = "a bad moment" if isinstance(error, KeraError) else "unexpected error"
        assert expected in world.waits_for[0]
    await world.until(lambda: world.rebuild.book.streamlets[REF].readable)
    assert world.looks == []
    await world.rebuild.close()


async def test_a_streamlet_that_is_gone_is_got_no_more(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.looks = ["it is not alive"] * 1000
    world.begin(Materials([], Scanned()))
    await world.until(lambda: bool(world.waits_for))
    world.rebuild.end(REF)
    assert world.rebuild.book.streamlets == {}
    assert world.rebuild.book.totals.segments_to_come == 0
    await world.rebuild.close()


async def test_what_was_not_foreseen_is_no_end() -> None:
    results = iter([None, RuntimeError("a defect"), False, True])

    async def step() -> bool | None:
        await asyncio.sleep(0)
        result = next(results)
        if isinstance(result, RuntimeError):
            raise result
        return result

    await keep_doing(step, retry_s=0.001)
    assert list(results) == []
