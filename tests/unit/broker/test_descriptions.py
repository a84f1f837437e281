"""Descriptions of streamlets: the bounds of their entries."""

from typing import Any

import pytest

from kera.broker.records import Gap
from kera.broker.serving.limits import ServingLimits
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import InvalidArgument, NotOwner
from kera.core.rpc import api
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Broker, Engine, chunk, limited, stream_info


@pytest.fixture
async def broker(engine: Engine, limits: ServingLimits) -> Broker:
    """Streamlet 0: groups 1 (full) and 3 of entry 1, group 2 of entry 0. Streamlet 1: empty. Streamlet 2: elsewhere."""
    broker = Broker(engine, stream_info(owners=(BROKER_ID, BROKER_ID, BROKER_ID + 1), entries=2), limits=limits)
    broker.append(*(chunk(1, n, record_count=10, max_timestamp_us=100 + n) for n in range(8)), chunk(2, 0), chunk(1, 8))
    return broker


async def describe(broker: Broker, *streamlet_ids: int) -> Any:
    request = api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID, streamlet_ids=streamlet_ids)
    return (await broker.ask(api.DESCRIBE_STREAMLETS, request)).streamlets


def place(cursor: Any) -> Position:
    return Position(cursor.group_id, cursor.segment_id, cursor.position)


async def test_entries_are_described_with_their_ends_and_records(broker: Broker) -> None:
    (streamlet,) = await describe(broker, 0)
    even, odd = streamlet.entries

    assert (streamlet.streamlet_id, streamlet.group_count) == (0, 3)
    assert (place(even.start), place(even.end)) == ((2, 1, 0), (2, 1, 1024))
    assert (place(odd.start), place(odd.end)) == ((1, 1, 0), (3, 1, 1024))
    assert [(e.first_record, e.next_record, e.length_bytes) for e in (even, odd)] == [(0, 1, 1024), (0, 81, 9 * 1024)]
    assert [(e.start.stream_id, e.start.streamlet_id, e.start.entry) for e in (even, odd)] == [(7, 0, 0), (7, 0, 1)]


async def test_an_entry_without_chunks_starts_and_ends_at_the_earliest_position(broker: Broker) -> None:
    (streamlet,) = await describe(broker, 1)

    assert [(place(e.start), place(e.end), e.first_record, e.next_record) for e in streamlet.entries] == [
        (EARLIEST, EARLIEST, 0, 0)
    ] * 2


async def test_a_possible_loss_is_described_only_if_readers_may_have_seen_it(broker: Broker) -> None:
    even, odd = broker.streams.get(STREAM_ID).streamlets[0].entries
    even.gaps = [Gap(Position(2, 1, 1024), Position(9, 1, 0))]
    odd.gaps = [Gap(Position(3, 1, 1025), Position(9, 1, 0))]  # readers see only chunks on disk, and these are there
    (streamlet,) = await describe(broker, 0)

    assert [each.HasField("lost_from") for each in streamlet.entries] == [True, False]
    assert (place(streamlet.entries[0].lost_from), place(streamlet.entries[0].lost_to)) == ((2, 1, 1024), (9, 1, 0))
    assert streamlet.owned


async def test_all_streamlets_of_the_broker_are_described_when_none_is_named(broker: Broker) -> None:
    assert [streamlet.streamlet_id for streamlet in await describe(broker)] == [0, 1]


async def test_a_streamlet_of_another_broker_is_not_described(broker: Broker) -> None:
    with pytest.raises(NotOwner):
        await describe(broker, 0, 2)


@limited(described_entries_max=4)
async def test_the_number_of_described_entries_is_limited(broker: Broker) -> None:
    """A stream may have a million entries: too many for a message and for the broker's memory."""
    assert len(await describe(broker, 0, 0)) == 2
    with pytest.raises(InvalidArgument, match="name fewer streamlets"):
        await describe(broker, 0, 0, 0)
