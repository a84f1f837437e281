"""Support for tests of restarts: one broker, launch after launch, and reads of the log that each launch finds."""

from pathlib import Path
from typing import Any

import pytest

from kera.broker.log.arena import Arena
from kera.broker.log.arena_file import remove_orphans
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_repair import StartFindings
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, StartError
from tests.unit.broker.support import SLOT_BYTES, Engine, FailingDisk, Log, Outcome

SEGMENT = 4
"""The number of chunks that fill a segment."""


class Launches:
    """One broker with one streamlet, launch after launch."""

    def __init__(self, shm_dir: Path, root: Path) -> None:
        self.shm_dir = shm_dir
        self.root = root
        self.engine: Engine
        self.found: StartFindings
        self.running = False

    def start(self, *, index_whole: bool = True, was_closed: bool = False, slot_bytes: int = SLOT_BYTES) -> Engine:
        index = SegmentIndex.open(self.root / "index", durable=False)
        index.was_closed = was_closed
        arena = Arena.attach(self.shm_dir, self.root)
        remove_orphans(self.shm_dir, self.root, keep=arena.paths if arena is not None else ())
        restart = Restart(arena, index, SegmentStore(self.root, FailingDisk(self.root), index))
        try:
            restart.look(index_whole=index_whole, slot_bytes=slot_bytes)
        except StartError:
            index.close()
            if arena is not None:
                arena.close(keep=True)
            raise
        self.found = restart.found
        arena = arena or Arena.create(
            self.shm_dir, arena_bytes=8 * SLOT_BYTES, slot_bytes=SLOT_BYTES, data_dir=self.root, ephemeral=False
        )
        self.engine = Engine(arena, self.root, restart)
        self.running = True
        return self.engine

    def log(self, **options: Any) -> Log:
        return Log(self.engine, streamlet_id=0, **options)

    def begin(self) -> Log:
        """Launch the broker, for the first time or on the log of earlier launches."""
        self.start()
        return self.log()

    def kill(self) -> None:
        """Kill the process, but not the machine."""
        self.engine.index.close()
        self.engine.arena.close(keep=True)
        self.running = False

    def lose_host(self) -> None:
        """Kill the machine: its memory is gone."""
        self.kill()
        self.engine.arena.path.unlink()

    def stop(self) -> None:
        """End the process cleanly."""
        self.engine.memory.segments.close_all()
        self.engine.run()
        self.engine.index.commit([], dict(self.engine.memory.ids.meta, clean=True))
        self.lose_host()


def commit(log: Log) -> None:
    """Put everything on disk, open segments included."""
    outcome = Outcome()
    log.engine.memory.commits.persist([(segment, segment.head) for segment in log.entry.tail], outcome)
    log.engine.run()
    assert outcome.calls == [None]


def read_all(log: Log) -> tuple[list[int], list[Position]]:
    """Read all: sequences of the chunks, and the positions where a reader gets `data_lost` and skips the loss."""
    sequences: list[int] = []
    losses: list[Position] = []
    position, following = Position(-1, 0, 0), EARLIEST
    while following != position:
        position = following
        try:
            found, following = log.read(position)
            sequences += found
        except DataLost:
            losses.append(position)
            following = lost(log, position)
    return sequences, losses


def lost(log: Log, position: Position) -> Position:
    """Read at `position`, which fails with `data_lost`; return the position to go on from in that error."""
    with pytest.raises(DataLost) as raised:
        log.read(position)
    assert raised.value.attributes["lost_from"] == list(position)
    return Position(*raised.value.attributes["available_from"])
