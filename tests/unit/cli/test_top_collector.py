"""Requests of `kera top`: slow or missing daemons do not delay the others, and their last answers are kept."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from kera.cli.top import _collector
from kera.cli.top._collector import GROUPS_LOOKED_AT, Collector
from kera.cli.top._polling import SLOW_S, Poll, all_within
from kera.cli.top._sample import Trouble
from kera.client import ClusterDescription, ConsumerGroupDescription, ConsumerGroupSummary, LatencyDescription
from kera.client.admin.daemons import read_figures
from kera.client.admin.watching import StreamSummary, Watch
from kera.client.diagnosis import asking
from kera.core.errors import InvalidArgument, NotAllowed, ProtocolError, Unavailable, UnknownLatencyConstraint
from kera.v1 import daemon_pb2
from tests.unit.cli.top_support import cluster, constraint, group, hop, stream

pytestmark = pytest.mark.timeout(60)


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.s = 1000.0

    def monotonic_s(self) -> float:
        return self.s

    def now_us(self) -> int:
        return round(self.s * 1e6)


class Asked:
    """A question whose answers are set by a test."""

    def __init__(self) -> None:
        self.count = 0
        self.answers: list[Any] = []
        self.hold: asyncio.Event | None = None

    async def __call__(self) -> Any:
        self.count += 1
        if self.hold is not None:
            await self.hold.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
async def asked(now: Now) -> AsyncIterator[tuple[Asked, Poll[int]]]:
    question = Asked()
    poll: Poll[int] = Poll(question, cast("Any", now), timeout_s=30, every_s=5)
    yield question, poll
    await poll.close()


async def test_a_poll_keeps_the_last_two_answers_across_failures(asked: tuple[Asked, Poll[int]], now: Now) -> None:
    question, poll = asked
    question.answers = [1, 2, Unavailable("away"), Unavailable("still away"), 3]
    for _ in range(2):
        await all_within([poll], 10)
        now.s += 5
    assert (poll.previous, poll.answer, poll.trouble) == (1, 2, None)
    since_us = now.now_us()
    for text in ("away", "still away"):
        await all_within([poll], 10)
        now.s += 5
        assert (poll.answer, poll.trouble) == (2, Trouble(text, since_us))
    await all_within([poll], 10)
    assert (poll.previous, poll.answer, poll.trouble) == (2, 3, None)


async def test_a_poll_asks_only_when_its_interval_has_passed(asked: tuple[Asked, Poll[int]], now: Now) -> None:
    question, poll = asked
    question.answers = [1, 2]
    for _ in range(3):
        await all_within([poll], 10)
        now.s += 2
    assert question.count == 1
    await all_within([poll], 10)
    assert question.count == 2


async def test_a_pending_question_does_not_block_and_is_not_repeated(asked: tuple[Asked, Poll[int]], now: Now) -> None:
    question, poll = asked
    question.answers, question.hold = [1], asyncio.Event()
    asked_us = now.now_us()
    for _ in range(3):
        await all_within([poll], 0)
        now.s += 10 * SLOW_S
    assert (question.count, poll.answer, poll.trouble) == (1, None, Trouble("no answer yet", asked_us))
    question.hold.set()
    await all_within([poll], 10)
    assert (poll.answer, poll.trouble) == (1, None)


async def test_a_time_out_and_a_refusal_are_distinguished(now: Now) -> None:
    question = Asked()
    question.hold = asyncio.Event()
    late: Poll[int] = Poll(question, cast("Any", now), timeout_s=0)
    refused: Poll[int] = Poll(Asked(), cast("Any", now), timeout_s=10)
    cast("Asked", refused._ask).answers = [NotAllowed("user:eve may not")]
    await all_within([late, refused], 10)
    assert late.trouble == Trouble("no answer within 0 s", now.now_us())
    assert refused.trouble == Trouble("user:eve may not", now.now_us(), refused=True)


async def test_an_unexpected_error_of_a_question_is_raised(asked: tuple[Asked, Poll[int]]) -> None:
    question, poll = asked
    question.answers = [ValueError("bug")]
    await all_within([poll], 10)
    with pytest.raises(ValueError, match="bug"):
        await all_within([poll], 10)
    question.answers = [1]


# -- the collector -------------------------------------------------------------------------------------------------


class FakeChannel:
    """A daemon that gives its `answers` in turn and repeats the last one."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.closed = False

    async def submit(self, method: Any, request: Any, bulk: Any = (), **_: Any) -> Any:
        del method, bulk
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        if isinstance(answer, Exception):
            raise answer

        class Reply:
            message = answer(request) if callable(answer) else answer

        return Reply

    async def close(self) -> None:
        self.closed = True


class FakeWatch:
    """A cluster whose answers are set by a test."""

    def __init__(self) -> None:
        self.described: ClusterDescription | Exception = cluster(brokers=2)
        self.known = [stream(1, "s", 1)]
        self.listed: list[ConsumerGroupSummary] = []
        self.late: list[LatencyDescription] | Exception = []
        self.looked_at: list[str] = []
        self.gone: set[str] = set()
        self.channels: dict[str, FakeChannel] = {
            f"b:{number}": FakeChannel(daemon_pb2.ReadFiguresResponse(launch_id="a", uptime_us=1)) for number in (1, 2)
        }

    async def cluster(self) -> ClusterDescription:
        if isinstance(self.described, Exception):
            raise self.described
        return self.described

    async def streams(self) -> list[StreamSummary]:
        return self.known

    def descriptions(self) -> list[Any]:
        return []

    async def recoveries(self) -> list[Any]:
        return []

    async def groups(self) -> list[ConsumerGroupSummary]:
        return self.listed

    async def group(self, name: str) -> ConsumerGroupDescription:
        self.looked_at.append(name)
        if name in self.gone:
            raise InvalidArgument("it is gone")
        return ConsumerGroupDescription(name, (), ())

    async def constraints(self) -> list[LatencyDescription]:
        if isinstance(self.late, Exception):
            raise self.late
        return self.late

    async def constraint(self, name: str) -> LatencyDescription:
        self.looked_at.append(name)
        if name in self.gone:
            raise UnknownLatencyConstraint(f"there is no latency constraint {name!r}", name=name)
        return constraint(name, hops=(hop("clicks", "send", 1),))

    def channel(self, address: str) -> FakeChannel:
        return self.channels[address]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> FakeWatch:
    async def nobody(_: dict[str, str]) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(asking, "describe_all", nobody)
    return FakeWatch()


@pytest.fixture
async def collector(watch: FakeWatch, now: Now) -> AsyncIterator[Collector]:
    made = Collector(cast("Watch", watch), cast("Any", now), patience_s=10)
    yield made
    await made.close()


async def test_a_hanging_broker_is_reported_and_the_others_still_have_figures(
    collector: Collector, watch: FakeWatch, now: Now
) -> None:
    hangs = asyncio.Event()
    watch.channels["b:2"].answers = [hangs]
    found = await collector.sample(patience_s=0.05)
    now.s += 2
    found = await collector.sample(patience_s=0.05)

    assert set(found.figures) == {"broker 1"}
    assert set(found.troubles) == {"broker 2"}
    assert [each.name for each in found.streams] == ["s"]
    assert found.findings is not None


async def test_a_daemon_that_stops_answering_causes_an_early_diagnosis(
    collector: Collector, watch: FakeWatch, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []

    async def describe(_: dict[str, str]) -> dict[str, Any]:
        made.append(now.s)
        return {}

    monkeypatch.setattr(asking, "describe_all", describe)
    answer = watch.channels["b:2"].answers[0]
    for second in range(30):
        watch.channels["b:2"].answers = [Unavailable("away") if second >= 15 else answer]
        await collector.sample()
        now.s += 1
    assert [at - made[0] for at in made] == [0, 2, 12, 16, 26]


async def test_the_last_description_is_kept_while_the_coordinator_is_lost(
    collector: Collector, watch: FakeWatch
) -> None:
    known = watch.described
    await collector.sample()
    watch.described = Unavailable("nobody is there")
    lost = await collector.sample()
    assert (lost.cluster, lost.cluster_trouble and lost.cluster_trouble.text) == (known, "nobody is there")
    assert set(lost.figures) == {"broker 1", "broker 2"}
    watch.described = known
    assert (await collector.sample()).cluster_trouble is None


async def test_a_removed_broker_is_no_longer_asked_and_its_channel_is_closed(
    collector: Collector, watch: FakeWatch
) -> None:
    await collector.sample()
    watch.described = cluster(brokers=1)
    found = await collector.sample()
    assert set(found.figures) == {"broker 1"}
    assert (watch.channels["b:1"].closed, watch.channels["b:2"].closed) == (False, True)


async def test_many_groups_take_turns_and_the_open_group_is_always_included(
    collector: Collector, watch: FakeWatch, now: Now
) -> None:
    watch.listed = [group(f"g{number:03}") for number in range(GROUPS_LOOKED_AT + 5)]
    collector.wanted_group = "g000"
    for _ in range(2):
        watch.looked_at.clear()
        lags = (await collector.sample()).lags
        now.s += 1
        assert len(watch.looked_at) == GROUPS_LOOKED_AT
        assert "g000" in watch.looked_at
        assert len(lags) >= GROUPS_LOOKED_AT
    assert len((await collector.sample()).lags) == len(watch.listed)

    watch.gone, watch.listed = {"g001"}, watch.listed[:3]
    found = await collector.sample()
    assert set(found.lags) == {"g000", "g001", "g002"}  # the last look at g001 is kept and gets older


async def test_groups_that_fail_do_not_take_the_turns_of_others(
    collector: Collector, watch: FakeWatch, now: Now
) -> None:
    failing = [group(f"g{number:03}") for number in range(GROUPS_LOOKED_AT)]
    watch.gone, watch.listed = {each.consumer_group for each in failing}, [*failing, group("last")]
    await collector.sample()
    now.s += 1
    assert set((await collector.sample()).lags) == {"last"}


@pytest.mark.parametrize(("internal", "shown"), [(False, ["s"]), (True, ["_connect.s", "s"])])
async def test_internal_streams_and_groups_are_shown_only_on_request(
    internal: bool, shown: list[str], watch: FakeWatch, now: Now
) -> None:
    watch.known = [stream(number, name, 1) for number, name in enumerate(("_connect.s", "s"), 1)]
    watch.listed = [group("_connect.s"), group("s")]
    collector = Collector(cast("Watch", watch), cast("Any", now), patience_s=10, internal=internal)
    try:
        found = await collector.sample()
    finally:
        await collector.close()

    assert [each.name for each in found.streams] == shown
    assert [each.consumer_group for each in found.groups] == shown
    assert sorted(watch.looked_at) == shown


async def test_a_limited_number_of_daemons_is_asked_at_once(collector: Collector, watch: FakeWatch) -> None:
    numbers = range(1, _collector.DAEMONS_AT_ONCE + 6)
    watch.described = cluster(brokers=len(numbers))
    watch.channels = {f"b:{number}": FakeChannel(asyncio.Event()) for number in numbers}
    await collector.sample(patience_s=0.05)
    assert sum(each.asked for each in watch.channels.values()) == _collector.DAEMONS_AT_ONCE


async def test_figures_are_read_in_pages_up_to_the_maximum_of_streams() -> None:
    def answer(request: daemon_pb2.ReadFiguresRequest) -> daemon_pb2.ReadFiguresResponse:
        found = daemon_pb2.ReadFiguresResponse(launch_id="a", uptime_us=7, more_streams=request.after_stream_id < 4)
        found.figures.add(name="x", labels=["of", "loop"], value=2)
        for stream_id in range(request.after_stream_id + 1, request.after_stream_id + 3):
            found.streams.add(stream_id=stream_id, records_appended=stream_id)
        found.streams[0].epoch_lag_ms, found.streams[0].epoch_entry = 0, 2
        return found

    found = await read_figures(cast("Any", FakeChannel(answer)), streams_max=100, timeout_s=1)
    assert {key: each.records_appended for key, each in found.streams.items()} == {n: n for n in range(1, 7)}
    assert (found.value("x", "of", "loop"), found.value("x"), found.value("y")) == (2, None, None)
    assert [(each.epoch_lag_ms, each.epoch_entry) for each in found.streams.values()][:2] == [(0, (0, 2)), (None, None)]
    few = await read_figures(cast("Any", FakeChannel(answer)), streams_max=2, timeout_s=1)
    assert set(few.streams) == {1, 2}


async def test_a_daemon_that_repeats_streams_is_a_protocol_error() -> None:
    odd = daemon_pb2.ReadFiguresResponse(more_streams=True)
    odd.streams.add(stream_id=3)
    with pytest.raises(ProtocolError, match="out of order"):
        await read_figures(cast("Any", FakeChannel(odd)), streams_max=100, timeout_s=1)


# -- latency constraints -------------------------------------------------------------------------------------------


async def test_a_live_view_reads_the_hops_of_only_the_open_constraint(collector: Collector, watch: FakeWatch) -> None:
    watch.late = [constraint("a"), constraint("b")]
    found = await collector.sample()
    assert ([each.constraint.name for each in found.constraints], found.hops) == (["a", "b"], {})
    collector.wanted_constraint = "b"
    assert set((await collector.sample()).hops) == {"b"}
    watch.gone = {"b"}
    assert (await collector.sample()).hops == {}


async def test_a_document_reads_the_hops_of_violated_constraints_first(watch: FakeWatch, now: Now) -> None:
    collector = Collector(cast("Watch", watch), cast("Any", now), patience_s=10, hops_of_max=3)
    watch.late = [constraint(f"c{number}", "violated" if number > 7 else "held") for number in range(10)]
    assert set((await collector.sample()).hops) == {"c8", "c9", "c0"}
    await collector.close()


async def test_many_constraints_are_listed_less_often_and_a_refusal_is_reported(
    collector: Collector, watch: FakeWatch, now: Now
) -> None:
    watch.late = [constraint(f"c{number}") for number in range(_collector.MANY_CONSTRAINTS + 1)]
    assert len((await collector.sample()).constraints) == _collector.MANY_CONSTRAINTS + 1
    watch.late = NotAllowed("you may not")
    for seconds, refused in ((_collector.MANY_EVERY_S - 1, False), (2, True)):
        now.s += seconds
        trouble = (await collector.sample()).constraints_trouble
        assert (trouble is not None and trouble.refused) is refused
