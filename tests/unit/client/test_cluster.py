"""What the SDK remembers of the cluster, and what it tells the coordinator."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kera.client.admin.admin import Admin
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.timing import Timing
from kera.client.settings import ClientSettings
from kera.core.coordinators import Coordinators
from kera.core.errors import NotOwner, StreamExists, Unavailable, Uncertain, UnknownStream
from kera.core.ids import EARLIEST, EntryId, Position
from kera.core.rpc import Method, api
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.client.fleet import STREAM_ID, Fleet
from tests.unit.client.support import stream_info, until


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    await made.close()


class TestMetadata:
    async def test_all_who_look_share_a_question(self, fleet: Fleet) -> None:
        found = await asyncio.gather(*(fleet.stream("s") for _ in range(10)))
        assert len(fleet.asked) == 1
        assert all(stream is found[0] for stream in found)
        assert await fleet.stream("s") is found[0]
        assert len(fleet.asked) == 1

    async def test_what_was_called_stale_while_it_was_asked_for_is_asked_for_again(self, fleet: Fleet) -> None:
        fleet.answering.clear()
        looking = asyncio.ensure_future(fleet.stream("s"))
        await until(lambda: len(fleet.asked) == 1)
        fleet.forget("s")
        fleet.answering.set()
        await looking
        assert len(fleet.asked) == 2

    async def test_a_stream_that_is_created_while_it_is_asked_for_is_found(self, fleet: Fleet) -> None:
        """A reader of the one that was deleted asks; who created it anew joins its question."""
        fleet.answering.clear()
        fleet.failures = [UnknownStream("there is no stream 's'")]
        reader = asyncio.ensure_future(fleet.stream("s"))
        await until(lambda: len(fleet.asked) == 1)
        fleet.forget("s")
        creator = asyncio.ensure_future(fleet.stream("s"))
        fleet.answering.set()
        assert (await creator).name == "s"
        assert (await reader).name == "s"
        assert len(fleet.asked) == 2

    async def test_who_gives_up_does_not_end_the_question_of_others(self, fleet: Fleet) -> None:
        fleet.answering.clear()
        first, second = (asyncio.ensure_future(fleet.stream("s")) for _ in range(2))
        await until(lambda: len(fleet.asked) == 1)
        first.cancel()
        fleet.answering.set()
        assert (await second).name == "s"

    async def test_an_older_description_never_replaces_a_newer_one(self, fleet: Fleet) -> None:
        fleet.move(0, 2)
        assert (await fleet.stream("s")).assignments[0].broker_id == 2
        newest, fleet.version = fleet.version, 1
        fleet.streamlets[0].intervals.pop()
        fleet.forget("s")
        assert (await fleet.stream("s")).assignments[0].broker_id == 2
        fleet.version = newest + 1
        fleet.forget("s")
        assert (await fleet.stream("s")).assignments[0].broker_id == 1

    async def test_a_stream_that_is_gone_is_not_remembered(self, fleet: Fleet) -> None:
        await fleet.stream("s")
        fleet.deleted = True
        fleet.forget("s")
        for look in (fleet.stream, fleet.stream_or_last_seen):
            with pytest.raises(UnknownStream):
                await look("s")

    async def test_without_a_coordinator_the_last_that_was_seen_will_do(self) -> None:
        fleet = Fleet(timing=Timing(metadata_wait_s=0.01))
        fleet.failures = [Unavailable("nobody leads")] * 2
        with pytest.raises(Unavailable, match="does not say where stream 's' is"):
            await fleet.stream_or_last_seen("s")
        fleet.failures.clear()
        seen = await fleet.stream("s")
        fleet.forget("s")
        fleet.failures = [Uncertain("no answer")]
        assert await fleet.stream_or_last_seen("s") is seen

        fleet.answering.clear()
        fleet.move(0, 2)
        assert await fleet.stream_or_last_seen("s") is seen
        fleet.answering.set()  # the question has gone on
        assert (await fleet.stream("s")).assignments[0].broker_id == 2
        await fleet.close()

    async def test_bounds_are_asked_of_who_has_the_streamlet_now(self, fleet: Fleet) -> None:
        """The broker that had it would answer as well, and not know the end."""
        await fleet.stream("s")
        fleet.move(0, 2)
        assert (await fleet.bounds("s"))[0][0].end == Position(2, 1, 0)

    async def test_a_broker_that_does_not_have_it_yet_is_asked_for_its_bounds_again(self, fleet: Fleet) -> None:
        fleet.move(0, 2, opened=False)
        asking = asyncio.ensure_future(fleet.bounds("s"))
        await until(lambda: len(fleet.brokers[2].calls) >= 2)
        fleet.streamlets[0].opened = True
        assert (await asking)[0][0].end == Position(2, 1, 0)


class TestCursors:
    HERE = Position(2, 1, 128)

    async def test_all_brokers_that_have_something_before_a_position_truncate(self, fleet: Fleet) -> None:
        fleet.move(0, 2)
        fleet.move(0, 3)
        entry = EntryId(STREAM_ID, 0, 0)
        assert await fleet.truncate("s", {entry: self.HERE}) == {entry: self.HERE}
        sent = {
            number: [(each.group_id, each.segment_id, each.position) for each in broker.cursors[0].cursors]
            for number, broker in fleet.brokers.items()
            if broker.cursors
        }
        assert sent == {1: [(2, 1, 0)], 2: [self.HERE]}

    async def test_a_commit_needs_the_broker_of_the_position_only(self, fleet: Fleet) -> None:
        fleet.move(0, 2)
        fleet.settings = fleet.settings.model_copy(update={"retry_timeout_ms": 20})
        fleet.brokers[1].crash()
        entry = EntryId(STREAM_ID, 0, 0)
        await fleet.commit("loader", "s", {entry: self.HERE})
        assert len(fleet.brokers[2].cursors) == 1
        with pytest.raises(Unavailable):
            await fleet.truncate("s", {entry: self.HERE})
        with pytest.raises(Unavailable):
            await fleet.commit("loader", "s", {entry: EARLIEST})

    async def test_all_brokers_are_told_of_a_commit_if_they_can_be(self, fleet: Fleet) -> None:
        fleet.move(0, 2)
        await fleet.commit("loader", "s", {EntryId(STREAM_ID, 0, 0): self.HERE})
        (told,) = fleet.brokers[1].cursors
        assert [(each.group_id, each.segment_id, each.position) for each in told.cursors] == [(2, 1, 0)]


class Unreachable(Cluster):
    """Its brokers are nowhere."""

    def __init__(self, **timing: float) -> None:
        super().__init__("127.0.0.1:1", ClientSettings(transport="tcp"), timing=Timing(**timing))
        self.reports: list[coordinator_pb2.ReportBrokerRequest] = []
        self.answer: asyncio.Event | None = None
        self.epoch = 9
        self.given_up = 0

    async def ask(self, method: Method[Any, Any], message: Any, **_: Any) -> Any:
        if method is api.REPORT_BROKER:
            self.reports.append(message)
            if self.answer is not None:
                try:
                    await self.answer.wait()
                except asyncio.CancelledError:
                    self.given_up += 1
                    raise
            raise Unavailable("nor is the coordinator")
        broker = common_pb2.BrokerInfo(broker_id=3, broker_epoch=self.epoch, frames_address="127.0.0.1:1")
        return coordinator_pb2.DescribeStreamResponse(stream=stream_info(), brokers=[broker])


async def fail(cluster: Unreachable) -> None:
    cluster.forget("s")
    with pytest.raises(Unavailable):
        await cluster.channel(await cluster.stream("s"), 3)


async def test_a_broker_that_cannot_be_reached_is_reported_once_per_launch() -> None:
    cluster = Unreachable()
    cluster.answer = asyncio.Event()
    for _ in range(3):
        await fail(cluster)  # does not wait for the report
    await until(lambda: bool(cluster.reports))
    (report,) = cluster.reports
    assert (report.broker_id, report.broker_epoch) == (3, 9)
    assert "127.0.0.1:1" in report.reason
    cluster.epoch = 10
    await fail(cluster)
    await until(lambda: len(cluster.reports) == 2)
    await cluster.close()


async def test_a_broker_that_still_cannot_be_reached_is_reported_again_after_a_while() -> None:
    cluster = Unreachable(report_again_s=0.0)
    for reports in (1, 2):
        await fail(cluster)
        await until(lambda reports=reports: len(cluster.reports) == reports)  # type: ignore[misc]
    await cluster.close()


async def test_a_report_that_nobody_takes_is_given_up() -> None:
    cluster = Unreachable(report_timeout_s=0.01)
    cluster.answer = asyncio.Event()
    await fail(cluster)
    await until(lambda: cluster.given_up == 1)
    await cluster.close()


class TestCreationAndDeletion:
    async def test_each_creation_has_an_id_of_its_own(self) -> None:
        class Created(Fleet):
            async def ask(self, method: Method[Any, Any], message: Any, **_: Any) -> Any:
                if method is api.CREATE_STREAM:
                    self.asked.append(message)
                    return coordinator_pb2.CreateStreamResponse()
                return await super().ask(method, message)

        fleet = Created()
        for _ in range(2):
            await Admin(fleet).create_stream("s")
        ids = [each.creation_id for each in fleet.asked if isinstance(each, coordinator_pb2.CreateStreamRequest)]
        assert len(set(ids)) == 2
        assert all(len(each) == 32 for each in ids)
        await fleet.close()

    @pytest.mark.parametrize(
        ("before", "deleted"), [(Uncertain("no answer"), True), (NotOwner(""), False), (None, False)]
    )
    async def test_what_an_attempt_without_an_answer_has_deleted_is_deleted(
        self, before: Exception | None, deleted: bool
    ) -> None:
        errors = [each for each in (before, UnknownStream("no such stream")) if each is not None]

        class Failing(Coordinators):
            async def ask(self, *_: Any, **__: Any) -> Any:
                raise errors.pop(0)

        cluster = Cluster("", ClientSettings(retry_backoff_ms=1), coordinators=Failing("127.0.0.1:1", bulk_bytes_max=1))
        if deleted:
            await Admin(cluster).delete_stream("s")
        else:
            with pytest.raises(UnknownStream):
                await Admin(cluster).delete_stream("s")
        assert errors == []
        await cluster.close()

    async def test_other_errors_come_out(self) -> None:
        fleet = Fleet()
        fleet.failures = [StreamExists("there is one")]
        with pytest.raises(StreamExists):
            await Admin(fleet).create_stream("s")
        await fleet.close()
