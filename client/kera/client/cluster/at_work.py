"""Until when an application is at work on what it took: until the first record that it makes of it was accepted.

Producers and consumers of one `Client` count as one application. Of what a consumer has taken, the first record counts
that a producer accepts from then on, for a stream that comes next on the path of a constraint. (Nephele Streaming, 2.2,
likewise goes by the next item that comes out of a task, whatever that has made it of.)

Nothing is done per record. Producers tell of chunks that they open, and of batches; what went into a chunk that was
open already is looked up in it: when it is closed, and when somebody asks. As long as nobody is at work on anything
that is measured, chunks cost a look at `AtWork.pending`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol
from weakref import WeakSet

from kera.core.base.clock import Clock

OPEN_MAX = 64
"""So many open chunks of a producer are looked at; where there are more, the first record of those counts."""


class OpenChunk(Protocol):
    """Records that are not sent yet."""

    @property
    def opened_s(self) -> float:
        """When the first one was accepted, on the loop's clock."""
        ...

    @property
    def times_s(self) -> Sequence[float]:
        """When each was accepted, by the time of day."""
        ...


class Writer(Protocol):
    """A producer with open chunks of a stream, in the order in which they were opened."""

    @property
    def open_chunks(self) -> Mapping[int, OpenChunk]:
        """By streamlet."""
        ...


class Job:
    """Data that the application has taken and is working on."""

    __slots__ = ("__weakref__", "_clock", "_started_s", "begun_s", "first_us", "since_s", "streams")

    def __init__(self, streams: frozenset[int], begun_s: float, clock: Clock) -> None:
        self.streams = streams
        self.begun_s = begun_s
        self.since_s = clock.now_us() / 1e6
        """The same by the time of day."""
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self.first_us: int | None = None
        """How long it took until the first record that is known; None: there is none yet."""

    def made(self, us: float) -> None:
        """A record was accepted after so long."""
        us = max(0, round(us))
        self.first_us = us if self.first_us is None else min(self.first_us, us)

    def look(self, times_s: Sequence[float]) -> None:
        """Some records were accepted then: whatever the time of day is set to, no longer after than it is now."""
        first = bisect_left(times_s, self.since_s)
        if first < len(times_s):
            self.made(min(times_s[first] - self.since_s, self._clock.monotonic_s() - self._started_s) * 1e6)


class AtWork:
    """Measures the time from records that consumers took to the first record that producers made of them.

    Times in seconds are on the loop's clock, where nothing else is said.
    """

    def __init__(self, clock: Clock) -> None:
        """`clock`: that by which records have their time of day."""
        self.pending = False
        """Somebody is at work: producers have to tell."""
        self._clock = clock
        self._jobs: WeakSet[Job] = WeakSet()
        """Consumers that are dropped without being closed leave none."""
        self._writers: dict[int, WeakSet[Any]] = {}
        """By stream."""

    def add_writer(self, stream_id: int, writer: Writer) -> None:
        """Somebody writes to a stream, until it is dropped."""
        self._writers.setdefault(stream_id, WeakSet()).add(writer)

    def begin(self, streams: Iterable[int], now_s: float) -> Job:
        """Something was taken, and what is made of it goes to these streams; `end` has to follow."""
        job = Job(frozenset(streams), now_s, self._clock)
        self._jobs.add(job)
        self.pending = True
        return job

    def accepted(self, stream_id: int, now_s: float) -> None:
        """A chunk was opened for a record, or rows of a batch were accepted."""
        for job in self._jobs:
            if stream_id in job.streams:
                job.made((now_s - job.begun_s) * 1e6)

    def closing(self, stream_id: int, chunk: OpenChunk) -> None:
        """A chunk is not open any more."""
        for job in self._jobs:
            if stream_id in job.streams:
                job.look(chunk.times_s)

    def first_us(self, job: Job) -> int | None:
        """How long it took until the first record was accepted; None: none was."""
        for stream_id in job.streams:
            for writer in self._writers.get(stream_id, ()):
                for chunk in islice(writer.open_chunks.values(), OPEN_MAX):
                    if chunk.opened_s > job.begun_s:
                        break  # it was told, and so were those behind it
                    job.look(chunk.times_s)
        return job.first_us

    def end(self, job: Job) -> None:
        """Nobody asks any more."""
        self._jobs.discard(job)
        self.pending = len(self._jobs) > 0
