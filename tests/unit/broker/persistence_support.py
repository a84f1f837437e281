"""Support for tests of the persistence manager: inspection of jobs, and logs in a known state."""

from collections.abc import Callable, Sequence

from kera.broker.log.segment import Segment
from kera.broker.storage.jobs import Job, LoadJob, StoreJob
from tests.unit.broker.support import Engine, Log, Outcome

MakeEngine = Callable[..., Engine]
NEVER_MS = 1 << 40
SEGMENT = 4
"""The number of chunks that fill a segment."""


def keys(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    return [segment.key for segment in segments]


def written(jobs: Sequence[Job]) -> list[tuple[int, int]]:
    """The segments that the jobs write, in order."""
    return [part.segment.key for job in jobs if isinstance(job, StoreJob) for part in job.parts]


def loaded(jobs: Sequence[Job]) -> list[tuple[int, int]]:
    return [job.segment.key for job in jobs if isinstance(job, LoadJob)]


def finish(engine: Engine, jobs: Sequence[Job]) -> None:
    for job in jobs:
        engine.perform(job)


def resident(log: Log, entry: int = 0) -> list[tuple[int, int]]:
    return sorted(log.streamlet.entries[entry].resident)


def flushed(log: Log, segments: int) -> Log:
    """Fill `segments` segments, on disk and in memory; none stays open."""
    log.append_many(SEGMENT * segments)
    log.engine.memory.segments.close_all()
    log.engine.run()
    assert log.entry.tail == []
    return log


def on_disk_only(log: Log, segments: int) -> Log:
    """Fill `segments` segments, on disk only, and free all memory."""
    flushed(log, segments)
    slots = log.engine.fill_memory()
    slots += [log.engine.memory.slots.allocate() for _ in range(len(log.entry.resident))]
    for slot in slots:
        slot.retire()
    assert log.entry.resident == {}
    return log


def persist(log: Log, count: int = 1) -> Outcome:
    outcome = Outcome()
    appended = log.append_many(count, publish=False)[-1]
    assert appended.segment is not None
    log.engine.memory.commits.persist([(appended.segment, appended.end)], outcome)
    return outcome
