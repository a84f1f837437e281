"""The SDK's view of the cluster: cached metadata, cursors, and reports to the coordinator."""

import asyncio
from typing import Any

import pytest

from kera.client.admin.admin import Admin
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.timing import Timing
from kera.client.settings import ClientSettings
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import KeraError, NotOwner, StreamExists, Unavailable, Uncertain, UnknownStream
from kera.core.rpc import Method, api
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.client.fake_support import STREAM_ID, Fleet, MakeFleet
from tests.unit.client.support import stream_info, until


@pytest.fixture
async def fleet(make_fleet: MakeFleet) -> Fleet:
    return await make_fleet()


class TestMetadata:
    async def test_concurrent_lookups_share_one_request(self, fleet: Fleet) -> None:
        found = await asyncio.gather(*(fleet.cluster.stream("s") for _ in range(10)))
        assert fleet.questions() == 1
        assert all(stream is found[0] for stream in found)
        assert await fleet.cluster.stream("s") is found[0]
        assert fleet.questions() == 1

    async def test_a_stream_forgotten_during_its_lookup_is_looked_up_again(self, fleet: Fleet) -> None:
        fleet.fake.coordinator.pause()
        looking = asyncio.ensure_future(fleet.cluster.stream("s"))
        await until(lambda: fleet.questions() == 1)
        fleet.cluster.forget("s")
        fleet.fake.coordinator.resume()
        await looking
        assert fleet.questions() == 2

    async def test_a_stream_created_during_its_lookup_is_found(self, fleet: Fleet) -> None:
        """A reader of the deleted stream asks; the creator of the new one joins that request."""
        fleet.fake.coordinator.pause()
        fleet.fake.coordinator.refuse(*[UnknownStream("there is no stream 's'")])
        reader = asyncio.ensure_future(fleet.cluster.stream("s"))
        await until(lambda: fleet.questions() == 1)
        fleet.cluster.forget("s")
        creator = asyncio.ensure_future(fleet.cluster.stream("s"))
        fleet.fake.coordinator.resume()
        assert (await creator).name == "s"
        assert (await reader).name == "s"
        assert fleet.questions() == 2

    async def test_cancelling_one_lookup_does_not_end_the_shared_request(self, fleet: Fleet) -> None:
        fleet.fake.coordinator.pause()
        first, second = (asyncio.ensure_future(fleet.cluster.stream("s")) for _ in range(2))
        await until(lambda: fleet.questions() == 1)
        first.cancel()
        fleet.fake.coordinator.resume()
        assert (await second).name == "s"

    async def test_an_older_description_never_replaces_a_newer_one(self, fleet: Fleet) -> None:
        older = fleet.s.info()
        fleet.s.move(0, 2)
        assert (await fleet.cluster.stream("s")).assignments[0].broker_id == 2
        fleet.fake.coordinator.describe_as(STREAM_ID, older)
        fleet.cluster.forget("s")
        assert (await fleet.cluster.stream("s")).assignments[0].broker_id == 2
        fleet.fake.coordinator.describe_as(STREAM_ID, None)
        fleet.s.move(0, 1)
        fleet.cluster.forget("s")
        assert (await fleet.cluster.stream("s")).assignments[0].broker_id == 1

    async def test_a_deleted_stream_is_not_remembered(self, fleet: Fleet) -> None:
        await fleet.cluster.stream("s")
        fleet.fake.delete_stream("s")
        fleet.cluster.forget("s")
        for look in (fleet.cluster.stream, fleet.cluster.stream_or_last_seen):
            with pytest.raises(UnknownStream):
                await look("s")

    async def test_the_last_seen_description_serves_while_no_coordinator_answers(self, make_fleet: MakeFleet) -> None:
        fleet = await make_fleet(timing=Timing(metadata_wait_s=0.01))
        fleet.fake.coordinator.refuse_all(Unavailable("nobody leads"))
        with pytest.raises(Unavailable, match="does not say where stream 's' is"):
            await fleet.cluster.stream_or_last_seen("s")
        fleet.fake.coordinator.refuse_all(None)
        seen = await fleet.cluster.stream("s")
        fleet.cluster.forget("s")
        fleet.fake.coordinator.pause()
        fleet.s.move(0, 2)
        assert await fleet.cluster.stream_or_last_seen("s") is seen
        fleet.fake.coordinator.resume()  # the request went on in the background
        assert (await fleet.cluster.stream("s")).assignments[0].broker_id == 2

    async def test_bounds_come_from_the_current_broker_of_the_streamlet(self, fleet: Fleet) -> None:
        """The broker that had the streamlet would answer too, but not know the end."""
        await fleet.cluster.stream("s")
        fleet.s.move(0, 2)
        assert (await fleet.cluster.bounds("s"))[0][0].end == Position(2, 1, 0)

    async def test_a_broker_that_has_not_opened_a_streamlet_is_asked_for_bounds_again(self, fleet: Fleet) -> None:
        fleet.s.move(0, 2, opened=False)
        asking = asyncio.ensure_future(fleet.cluster.bounds("s"))
        await until(lambda: len(fleet.fake.brokers[2].calls) >= 2)
        fleet.s.open(0)
        assert (await asking)[0][0].end == Position(2, 1, 0)


class TestCursors:
    HERE = Position(2, 1, 128)

    async def test_truncation_reaches_all_brokers_with_older_groups(self, fleet: Fleet) -> None:
        fleet.s.move(0, 2)
        fleet.s.move(0, 3)
        entry = EntryId(STREAM_ID, 0, 0)
        assert await fleet.cluster.truncate("s", {entry: self.HERE}) == {entry: self.HERE}
        sent = {
            number: [(each.group_id, each.segment_id, each.position) for each in fleet.cursors(number)[0].cursors]
            for number in fleet.fake.brokers
            if fleet.cursors(number)
        }
        assert sent == {1: [(2, 1, 0)], 2: [self.HERE]}

    async def test_a_commit_succeeds_without_the_brokers_of_older_groups(self, make_fleet: MakeFleet) -> None:
        fleet = await make_fleet(retry_timeout_ms=20)
        fleet.s.move(0, 2)
        await fleet.fake.brokers[1].crash()
        entry = EntryId(STREAM_ID, 0, 0)
        await fleet.cluster.commit("loader", "s", {entry: self.HERE})
        assert len(fleet.cursors(2)) == 1
        with pytest.raises(Unavailable):
            await fleet.cluster.truncate("s", {entry: self.HERE})
        with pytest.raises(Unavailable):
            await fleet.cluster.commit("loader", "s", {entry: EARLIEST})

    async def test_a_commit_reaches_the_brokers_of_older_groups_too(self, fleet: Fleet) -> None:
        fleet.s.move(0, 2)
        await fleet.cluster.commit("loader", "s", {EntryId(STREAM_ID, 0, 0): self.HERE})
        (told,) = fleet.cursors(1)
        assert [(each.group_id, each.segment_id, each.position) for each in told.cursors] == [(2, 1, 0)]


class Unreachable(Cluster):
    """A cluster whose brokers cannot be reached."""

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


async def test_an_unreachable_broker_is_reported_once_per_launch() -> None:
    cluster = Unreachable()
    cluster.answer = asyncio.Event()
    for _ in range(3):
        await fail(cluster)  # this does not wait for the report
    await until(lambda: bool(cluster.reports))
    (report,) = cluster.reports
    assert (report.broker_id, report.broker_epoch) == (3, 9)
    assert "127.0.0.1:1" in report.reason
    cluster.epoch = 10
    await fail(cluster)
    await until(lambda: len(cluster.reports) == 2)
    await cluster.close()


async def test_a_broker_that_stays_unreachable_is_reported_again_after_a_while() -> None:
    cluster = Unreachable(report_again_s=0.0)
    for reports in (1, 2):
        await fail(cluster)
        await until(lambda reports=reports: len(cluster.reports) == reports)  # type: ignore[misc]
    await cluster.close()


async def test_a_report_without_an_answer_times_out() -> None:
    cluster = Unreachable(report_timeout_s=0.01)
    cluster.answer = asyncio.Event()
    await fail(cluster)
    await until(lambda: cluster.given_up == 1)
    await cluster.close()


class TestCreationAndDeletion:
    async def test_each_creation_has_its_own_id(self, fleet: Fleet) -> None:
        for name in ("a", "b"):
            await Admin(fleet.cluster).create_stream(name)
        ids = [each.creation_id for each in fleet.fake.coordinator.requests.named("CreateStream")]
        assert len(set(ids)) == 2
        assert all(len(each) == 32 for each in ids)

    @pytest.mark.parametrize(
        ("before", "deleted"), [(Uncertain("no answer"), True), (NotOwner(""), False), (None, False)]
    )
    async def test_a_retried_deletion_succeeds_only_after_an_unanswered_attempt(
        self, fleet: Fleet, before: KeraError | None, deleted: bool
    ) -> None:
        errors = [each for each in (before, UnknownStream("no such stream")) if each is not None]
        fleet.fake.coordinator.refuse(*errors)
        if deleted:
            await Admin(fleet.cluster).delete_stream("s")
        else:
            with pytest.raises(UnknownStream):
                await Admin(fleet.cluster).delete_stream("s")
        assert fleet.questions("DeleteStream") == len(errors)

    async def test_creating_an_existing_stream_is_refused(self, fleet: Fleet) -> None:
        with pytest.raises(StreamExists):
            await Admin(fleet.cluster).create_stream("s")
