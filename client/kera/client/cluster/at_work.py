"""Measures how long an application works on the data it took: until it has made the first record from them.

The producers and consumers of one `Client` count as one application. The work on data that a consumer has taken ends
with the first record that a producer accepts afterwards, for a stream that comes next on the path of a constraint.
(Nephele Streaming, 2.2, also takes the next item that comes out of a task, whatever the task has made it from.)

Nothing is done per record. Producers report each chunk that they open, and each batch. Records in chunks that were
already open are looked up in the chunk: when it is closed, and when a consumer asks. As long as no measured data are
being worked on, a chunk costs a look at `AtWork.pending`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol
from weakref import WeakSet

from kera.core.base.clock import Clock

OPEN_MAX = 64
"""Maximum number of a producer's open chunks to look at; if there are more, only records in these count."""


class OpenChunk(Protocol):
    """A chunk of records that are not sent yet."""

    @property
    def opened_s(self) -> float:
        """Time when its first record was accepted, on the loop's clock."""
        ...

    @property
    def times_s(self) -> Sequence[float]:
        """Times of day when its records were accepted."""
        ...


class Writer(Protocol):
    """A producer with open chunks of a stream, in order of opening."""

    @property
    def open_chunks(self) -> Mapping[int, OpenChunk]:
        """The open chunks, by streamlet."""
        ...


class Job:
    """Data that the application has taken and is working on."""

    __slots__ = ("__weakref__", "_clock", "_started_s", "begun_s", "first_us", "since_s", "streams")

    def __init__(self, streams: frozenset[int], begun_s: float, clock: Clock) -> None:
        self.streams = streams
        self.begun_s = begun_s
        self.since_s = clock.now_us() / 1e6
        """Time of day when it began."""
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self.first_us: int | None = None
        """Time until the first known record was accepted; None: there is none yet."""

    def made(self, us: float) -> None:
        """Note that a record was accepted after `us`."""
        us = max(0, round(us))
        self.first_us = us if self.first_us is None else min(self.first_us, us)

    def look(self, times_s: Sequence[float]) -> None:
        """Note the first of some records, accepted at these times of day.

        The time until it is at most the time until now, even if the time of day is set meanwhile.
        """
        first = bisect_left(times_s, self.since_s)
        if first < len(times_s):
            self.made(min(times_s[first] - self.since_s, self._clock.monotonic_s() - self._started_s) * 1e6)


class AtWork:
    """Measures the time from data that consumers took to the first record that producers made from them.

    Times in seconds are on the loop's clock, unless stated otherwise.
    """

    def __init__(self, clock: Clock) -> None:
        """`clock`: the clock that records have their time of day from."""
        self.pending = False
        """Whether data are being worked on, so that producers have to report."""
        self._clock = clock
        self._jobs: WeakSet[Job] = WeakSet()
        """Weak, so that a consumer that is dropped without being closed leaves no job."""
        self._writers: dict[int, WeakSet[Any]] = {}
        """Writers, by stream."""

    def add_writer(self, stream_id: int, writer: Writer) -> None:
        """Add a writer of a stream, which counts until it is dropped."""
        self._writers.setdefault(stream_id, WeakSet()).add(writer)

    def begin(self, streams: Iterable[int], now_s: float) -> Job:
        """Note that data were taken whose results go to these streams; `end` has to follow."""
        job = Job(frozenset(streams), now_s, self._clock)
        self._jobs.add(job)
        self.pending = True
        return job

    def accepted(self, stream_id: int, now_s: float) -> None:
        """Note that a chunk was opened for a record, or rows of a batch were accepted."""
        for job in self._jobs:
            if stream_id in job.streams:
                job.made((now_s - job.begun_s) * 1e6)

    def closing(self, stream_id: int, chunk: OpenChunk) -> None:
        """Look at the records of a chunk that is being closed."""
        for job in self._jobs:
            if stream_id in job.streams:
                job.look(chunk.times_s)

    def first_us(self, job: Job) -> int | None:
        """Return the time until the first record was accepted; None: none was."""
        for stream_id in job.streams:
            for writer in self._writers.get(stream_id, ()):
                for chunk in islice(writer.open_chunks.values(), OPEN_MAX):
                    if chunk.opened_s > job.begun_s:
                        break  # `accepted` was called for this chunk, and for those behind it
                    job.look(chunk.times_s)
        return job.first_us

    def end(self, job: Job) -> None:
        """Forget a job."""
        self._jobs.discard(job)
        self.pending = len(self._jobs) > 0
