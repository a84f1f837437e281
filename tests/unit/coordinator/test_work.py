import asyncio

import structlog

from kera.coordinator.cluster.work import Work
from kera.core.errors import Unavailable


class Job:
    """A job that counts its starts, and ends when the test lets it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.begun = 0
        self.go = asyncio.Event()
        self.failure = failure

    async def __call__(self) -> None:
        self.begun += 1
        await self.go.wait()
        if self.failure:
            raise self.failure


async def test_running_work_is_not_started_again_and_reports_success_once() -> None:
    told: list[None] = []
    work, job = Work(lambda: told.append(None)), Job()
    work.start("a", job)
    work.start("a", job)
    await asyncio.sleep(0)
    assert (job.begun, work.is_under_way("a"), work.is_under_way("b")) == (1, True, False)

    job.go.set()
    await work.idle()

    assert (len(told), work.is_under_way("a"), work.failure("a")) == (1, False, "")
    work.start("a", job)
    await work.idle()
    assert job.begun == 2


async def test_a_failure_is_kept_until_the_work_succeeds_and_is_logged_once() -> None:
    told: list[None] = []
    work, job = Work(lambda: told.append(None)), Job(Unavailable("nobody there"))
    job.go.set()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            work.start("a", job)
            await work.idle()
    assert (work.failure("a"), told, len(logs)) == ("nobody there", [], 1)

    job.failure = None
    work.start("a", job)
    await work.idle()
    assert (work.failure("a"), len(told)) == ("", 1)


async def test_an_unexpected_exception_is_logged_and_stops_no_other_work() -> None:
    work, job, other = Work(), Job(ZeroDivisionError("defect")), Job()
    job.go.set()
    with structlog.testing.capture_logs() as logs:
        work.start("a", job)
        work.start("b", other)
        other.go.set()
        await work.idle()
    assert [entry["event"] for entry in logs] == ["unexpected exception in background work"]
    assert work.failure("a") == "ZeroDivisionError('defect')"
    assert other.begun == 1


async def test_closing_ends_all_work_and_no_work_starts_afterwards() -> None:
    work, job = Work(), Job()
    work.start("a", job)
    work.start("b", job)
    await asyncio.sleep(0)
    work.cancel("a")
    work.cancel("none")

    await work.close()

    assert (work.is_under_way("a"), work.is_under_way("b"), work.failure("a")) == (False, False, "")
    work.start("c", job)
    assert not work.is_under_way("c")


async def test_closing_ends_work_that_has_not_run_yet() -> None:
    """A task that is cancelled before its first step runs no code at all, not even its own clean-up."""
    work, job = Work(), Job()
    work.start("a", job)

    await work.close()

    assert (work.is_under_way("a"), job.begun) == (False, 0)
