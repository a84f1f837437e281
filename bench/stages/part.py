"""The measurement and its clock: a part of KerA has rounds, in which single requests are timed.

Each request of one `Load` is timed for itself, with the processor time of this thread. What is not KerA's, such as
making the chunks that a broker is to receive, is not timed.
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
"""Memory of the broker, the backup, and the target of copies: more than caches hold, of which a round uses a part."""
ROUND_BYTES = 8 * MIB
REQUESTS_MAX = 24
"""In a round. A round is short, so that some of them are disturbed by nobody."""

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
        """In a round."""
        return max(2, min(REQUESTS_MAX, ROUND_BYTES // self.size_bytes))


class Samples:
    """Nanoseconds of single requests by stage and load, of single records by what is done with them."""

    def __init__(self) -> None:
        self.requests: defaultdict[str, defaultdict[Load, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.records: defaultdict[str, list[float]] = defaultdict(list)
        self.turns: list[float] = []
        """Turns of the event loop, with nothing to do."""


class Part(Protocol):
    """Something to measure."""

    @property
    def loads(self) -> Sequence[Load]:
        """The loads that it can be measured with."""
        ...

    async def rounds(self, load: Load, samples: Samples) -> None:
        """Some requests."""


def _look_ns() -> int:
    """The time of two looks at the clock, which is taken off each measurement."""
    times = [now_ns() for _ in range(10_000)]
    return min(after - before for before, after in itertools.pairwise(times))


LOOK_NS = _look_ns()


def since(begun_ns: int) -> int:
    """Processor time of this thread since then."""
    return now_ns() - begun_ns - LOOK_NS
