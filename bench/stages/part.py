"""The measurement and its clock: a part of KerA has rounds, in which single requests are timed.

Each request of a `Load` is timed separately, by the processor time of this thread. Work outside KerA, such as making
the chunks that a broker receives, is not timed.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kera.core.base.settings import MIB

RECORD_BYTES = 100
MEMORY_BYTES = 64 * MIB
"""Memory of the broker, the backup, and the target of copies: more than caches hold; a round uses a part of it."""
ROUND_BYTES = 8 * MIB
REQUESTS_MAX = 24
"""The maximum in a round. A round is short, so that some rounds are undisturbed."""

now_ns = time.thread_time_ns


class Load(NamedTuple):
    """The content of a request."""

    chunks: int
    chunk_bytes: int

    @property
    def size_bytes(self) -> int:
        """The size of all chunks."""
        return self.chunks * self.chunk_bytes

    @property
    def requests(self) -> int:
        """The number of requests in a round."""
        return max(2, min(REQUESTS_MAX, ROUND_BYTES // self.size_bytes))


class Samples:
    """Nanoseconds of single requests by stage and load, and of single records by the work on them."""

    def __init__(self) -> None:
        self.requests: defaultdict[str, defaultdict[Load, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.records: defaultdict[str, list[float]] = defaultdict(list)
        self.turns: list[float] = []
        """Turns of the event loop without work."""


class Part(Protocol):
    """A part that can be measured."""

    @property
    def loads(self) -> Sequence[Load]:
        """The loads that it can be measured with."""
        ...

    async def rounds(self, load: Load, samples: Samples) -> None:
        """Time some requests."""


def _look_ns() -> int:
    """The time of two readings of the clock, which is subtracted from each measurement."""
    times = [now_ns() for _ in range(10_000)]
    return min(after - before for before, after in itertools.pairwise(times))


LOOK_NS = _look_ns()


def since(begun_ns: int) -> int:
    """Processor time of this thread since then."""
    return now_ns() - begun_ns - LOOK_NS
