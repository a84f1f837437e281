"""For any sequences and producer ids: an acknowledged chunk of a writer is stored, once and in its order.

Writers share producer ids here, like an impostor or a copied process. Each sends its own chunks:
next ones, repeats, gaps, and later epochs, while segments leave memory, and the broker is
killed, stopped, or loses its index.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest

from kera.broker.log.streamlet import Appended
from kera.core.base.ids import PRODUCER_IDS
from kera.core.errors import ArenaFull, OutOfSequence, ProducerFenced
from tests.unit.broker.restart_support import Launches
from tests.unit.broker.support import Log

STEPS = 400
WRITERS = (b"a", b"b", b"c")
IDS = (1, 2, PRODUCER_IDS[3])
SIZES = (192, 1024)
Key = tuple[int, int, int]
"""Producer, epoch, sequence."""


class Writers:
    """Writers that send to one broker, and remember its answers."""

    def __init__(self, launches: Launches, seed: int) -> None:
        self.random = Random(seed)
        self.launches = launches
        self.log: Log = launches.begin()
        self.stored: dict[Key, bytes] = {}
        """The writer of each stored chunk, with the chunk's size."""
        self.told: dict[Key, set[bytes]] = defaultdict(set)
        """The writers whose chunk was acknowledged."""

    def send(self) -> None:
        """Send one chunk of a random writer, under a random id."""
        producer, writer = self.random.choice(IDS), self.random.choice(WRITERS)
        epoch, expected = self.log.streamlet.producers.get(producer, (0, 0))
        step = self.random.choice((0, 0, 0, -1, -1, -2, -7, 1))
        if self.random.random() < 0.03:
            epoch, expected = epoch + 1, 0
        sequence = max(0, expected + step)
        key = producer, epoch, sequence
        mine = self.stored.get(key, b"?")[:1] == writer and self.random.random() < 0.8
        size = int(self.stored[key][1:]) if mine else self.random.choice(SIZES)
        content = writer + b"%d" % size
        try:
            appended = self.log.append(producer, sequence, producer_epoch=epoch, fill=writer, size=size)
        except (ArenaFull, OutOfSequence, ProducerFenced):
            return
        self.check(key, content, appended)

    def check(self, key: Key, content: bytes, appended: Appended) -> None:
        """Check the answer to a writer."""
        if not appended.duplicate:
            assert key not in self.stored
            self.stored[key] = content
        elif key[0] in PRODUCER_IDS:  # such a writer compares the chunk itself, unless the answer has the result
            assert appended.same in {None, self.stored[key] == content}
            return
        self.told[key].add(content)
        assert self.told[key] == {self.stored[key]}, "the other one's records are nowhere"

    def befall(self) -> None:
        """An event that moves chunks out of memory."""
        launches = self.launches
        match self.random.randrange(6):
            case 0:
                launches.kill()
                self.log = launches.begin()
            case 1:
                launches.stop()
                self.log = launches.begin()
            case 2:
                launches.stop()
                shutil.rmtree(launches.root / "index")
                self.log = launches.begin()
            case _:
                launches.engine.run()

    def check_log(self) -> None:
        """Check that stored chunks are in the order of sequences, without a gap."""
        following: dict[tuple[int, int], int] = {}
        for producer, epoch, sequence in self.stored:
            assert sequence == following.get((producer, epoch), 0)
            following[producer, epoch] = sequence + 1


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 30))])
def test_acknowledged_chunks_are_stored_although_writers_share_ids(tmp_path: Path, seed: int) -> None:
    shm_dir = tmp_path / "shm"
    shm_dir.mkdir()
    root = tmp_path / "data"
    root.mkdir()
    launches = Launches(shm_dir, root)
    writers = Writers(launches, seed)
    for step in range(STEPS):
        writers.send()
        if step % 12 == 11:
            writers.befall()
    writers.check_log()
    assert len(writers.stored) > STEPS // 20
    launches.stop()
