"""The working time of an application, against a model that keeps the time of each record."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from kera.client.cluster.at_work import AtWork, Job
from kera.core.base.clock import FakeClock

STREAMS = st.integers(0, 2)
STREAMLETS = st.integers(0, 3)
CLOCKS_APART_S = 1_000_000.0
"""The time of day, against the loop's clock."""


@dataclass
class Chunk:
    opened_s: float
    times_s: list[float] = field(default_factory=list)


class Writer:
    def __init__(self) -> None:
        self.open_chunks: dict[int, Chunk] = {}


class Application(RuleBasedStateMachine):
    """Takes chunks and makes records, in any order; the writers report as a producer does."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(round((1.0 + CLOCKS_APART_S) * 1e6))
        self.at_work = AtWork(self.clock)
        self.writers = [Writer() for _ in range(3)]
        for stream_id, writer in enumerate(self.writers):
            self.at_work.add_writer(stream_id, writer)
        self.made: list[tuple[int, float]] = []
        """All records: their stream, and the time of acceptance."""
        self.jobs_begun: dict[Job, float] = {}

    @property
    def now_s(self) -> float:
        """The time on the loop's clock."""
        return self.clock.now_us() / 1e6 - CLOCKS_APART_S

    @rule(ms=st.integers(1, 1_000))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms / 1000)

    @rule(stream_id=STREAMS, streamlet=STREAMLETS)
    def send(self, stream_id: int, streamlet: int) -> None:
        """Accept a record; a producer reports it only if it opens a chunk."""
        open_chunks = self.writers[stream_id].open_chunks
        if streamlet not in open_chunks:
            open_chunks[streamlet] = Chunk(self.now_s)
            if self.at_work.pending:
                self.at_work.accepted(stream_id, self.now_s)
        open_chunks[streamlet].times_s.append(self.now_s + CLOCKS_APART_S)
        self.made.append((stream_id, self.now_s))

    @rule(stream_id=STREAMS, streamlet=STREAMLETS)
    def close(self, stream_id: int, streamlet: int) -> None:
        chunk = self.writers[stream_id].open_chunks.pop(streamlet, None)
        if chunk is not None and self.at_work.pending:
            self.at_work.closing(stream_id, chunk)

    @rule(stream_id=STREAMS)
    def send_batch(self, stream_id: int) -> None:
        if self.at_work.pending:
            self.at_work.accepted(stream_id, self.now_s)
        self.made.append((stream_id, self.now_s))

    @rule(target=jobs, streams=st.sets(STREAMS, min_size=1))
    def take(self, streams: set[int]) -> Job:
        self.clock.advance(0.001)
        job = self.at_work.begin(streams, self.now_s)
        self.jobs_begun[job] = self.now_s
        return job

    @rule(job=jobs)
    def ask(self, job: Job) -> None:
        if job in self.jobs_begun:
            begun_s = self.jobs_begun[job]
            first_s = min(
                (at_s for stream, at_s in self.made if stream in job.streams and at_s >= begun_s), default=None
            )
            found_us = self.at_work.first_us(job)
            assert (found_us is None) == (first_s is None)
            if found_us is not None and first_s is not None:
                assert abs(found_us - (first_s - begun_s) * 1e6) <= 2

    @rule(job=consumes(jobs))
    def done(self, job: Job) -> None:
        self.ask(job)
        self.at_work.end(job)
        self.jobs_begun.pop(job, None)
        assert self.at_work.pending == bool(self.jobs_begun)


TestApplication = Application.TestCase
TestApplication.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
