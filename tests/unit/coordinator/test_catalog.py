from collections import Counter
from contextlib import nullcontext

import pytest

from kera.coordinator.cluster.catalog import (
    GROUPS_PER_LAUNCH,
    MEMORY_DOMAINS_MAX,
    Catalog,
    broker_ids_of,
    relaunched,
)
from kera.core.base.turns import at_once
from kera.core.errors import InternalError, InvalidArgument, StreamExists, Unavailable, UnknownStream
from kera.v1 import common_pb2


def stream(name: str, stream_id: int, *owners: tuple[int, int]) -> common_pb2.StreamInfo:
    """A stream whose streamlets have these brokers and epochs."""
    return common_pb2.StreamInfo(
        name=name,
        stream_id=stream_id,
        assignments=[
            common_pb2.StreamletAssignment(
                streamlet_id=number, broker_id=broker_id, broker_epoch=epoch, first_group_id=1
            )
            for number, (broker_id, epoch) in enumerate(owners)
        ],
    )


def owners(info: common_pb2.StreamInfo) -> list[tuple[int, int, int]]:
    return [(owner.broker_id, owner.broker_epoch, owner.first_group_id) for owner in info.assignments]


def reserve(catalog: Catalog, creating: common_pb2.StreamInfo) -> None:
    catalog.reserve(creating, Counter(one.broker_id for one in creating.assignments))


def test_streams_are_found_by_name_and_by_id_and_listed_by_name() -> None:
    catalog = Catalog()
    b, a = stream("b", 1), stream("a", 2)
    catalog.add(b)
    catalog.add(a)

    assert catalog.named("a") is a
    assert catalog.with_id(1) is b
    assert catalog.streams() == [a, b]
    assert len(catalog) == 2


def test_each_page_of_streams_continues_after_the_previous_page() -> None:
    catalog, names = Catalog(), [f"stream-{number}" for number in range(20)]
    for number, name in enumerate(reversed(names)):
        catalog.add(stream(name, 20 - number))
    size = stream("stream-0", 1).ByteSize()
    catalog.remove(catalog.named("stream-7"))
    names.remove("stream-7")
    found, pages, more, after = [], [], True, ""
    while more:
        page, more = catalog.page(after, 3 * size + 3)
        found += [each.name for each in page]
        pages.append(len(page))
        after = found[-1]
    assert found == sorted(names)
    assert pages == [3] * 6 + [1]
    assert catalog.page("", 0) == ([catalog.named("stream-0")], True)  # a page has at least one stream
    assert catalog.page("stream-9", 0) == ([], False)
    assert [each.name for each in catalog.page("stream-7", 1000)[0]] == ["stream-8", "stream-9"]


def test_the_streamlets_that_a_broker_owns_exclude_those_being_created() -> None:
    catalog = Catalog()
    catalog.add(stream("a", 1, (1, 1), (1, 1), (2, 1)))
    reserve(catalog, stream("b", 2, (1, 1)))
    assert [catalog.owned_count(broker_id) for broker_id in (1, 2, 3)] == [2, 1, 0]
    catalog.add(stream("b", 2, (1, 1)))
    assert catalog.owned_count(1) == 3
    catalog.remove(catalog.named("a"))
    assert [catalog.owned_count(broker_id) for broker_id in (1, 2)] == [1, 0]


def test_a_removed_stream_is_unknown_and_its_name_is_free() -> None:
    catalog = Catalog()
    catalog.add(stream("a", 1))
    catalog.remove(catalog.named("a"))

    with pytest.raises(UnknownStream, match="there is no stream 'a'"):
        catalog.named("a")
    with pytest.raises(UnknownStream, match="there is no stream with id 1"):
        catalog.with_id(1)
    catalog.check_free("a")


def test_a_name_belongs_to_one_stream() -> None:
    catalog = Catalog()
    catalog.add(stream("a", 1))

    with pytest.raises(StreamExists) as error:
        catalog.check_free("a")
    assert error.value.attributes == {"stream": "a", "stream_id": 1}
    with pytest.raises(InternalError):
        catalog.add(stream("a", 2))


def test_a_stream_being_created_reserves_its_name_and_is_visible_only_to_its_brokers() -> None:
    catalog = Catalog()
    creating = stream("a", 1, (1, 5), (2, 6))
    reserve(catalog, creating)

    with pytest.raises(Unavailable, match="is being created"):
        catalog.check_free("a")
    with pytest.raises(UnknownStream):
        catalog.named("a")
    assert catalog.streams() == []
    assert len(catalog) == 0
    assert catalog.creating(1, 5) == [creating]
    assert catalog.creating(1, 6) == []
    assert catalog.streamlet_counts() == {1: 1, 2: 1}

    catalog.release(creating)
    catalog.check_free("a")
    assert catalog.creating(1, 5) == []


def test_a_new_launch_takes_over_its_brokers_streamlets_and_skips_group_ids() -> None:
    catalog = Catalog()
    shared, other = stream("shared", 1, (1, 5), (2, 6), (1, 5)), stream("other", 2, (2, 6))
    catalog.add(shared)
    catalog.add(other)
    reserve(catalog, stream("creating", 3, (1, 5)))

    (moved,) = at_once(relaunched(catalog, 1, 9, coordinator_epoch=2))

    assert owners(moved) == [(1, 9, 9 * GROUPS_PER_LAUNCH), (2, 6, 1), (1, 9, 9 * GROUPS_PER_LAUNCH)]
    assert at_once(relaunched(catalog, 1, 9, coordinator_epoch=2, but={1})) == []
    assert catalog.with_id(1) is shared  # decided, not done
    assert owners(shared) == [(1, 5, 1), (2, 6, 1), (1, 5, 1)]
    catalog.add(moved)
    assert catalog.concerning(1) == [moved]
    assert catalog.streamlet_counts() == {1: 3, 2: 2}


def test_the_total_size_of_stream_descriptions_is_limited() -> None:
    third = stream("c", 3, (1, 1))
    for bytes_max, fits in ((3 * third.ByteSize(), True), (3 * third.ByteSize() - 1, False)):
        catalog = Catalog(bytes_max=bytes_max)
        catalog.add(stream("a", 1, (1, 1)))
        reserve(catalog, stream("b", 2, (1, 1)))
        with nullcontext() if fits else pytest.raises(InvalidArgument, match="delete streams"):
            catalog.check_room(third)
        catalog.add(third)
        with nullcontext() if fits else pytest.raises(InvalidArgument, match="delete streams"):
            catalog.check_room(third)  # a new description takes the place of the old one
        with pytest.raises(InvalidArgument, match="delete streams"):
            catalog.check_room(stream("d", 4, (1, 1)))


def test_the_number_of_memory_domains_is_limited() -> None:
    catalog = Catalog()
    for number in range(1, MEMORY_DOMAINS_MAX + 1):
        each = stream(f"s{number}", number, (1, 1))
        each.config.memory_domain = f"domain-{number}"
        catalog.check_room(each)
        catalog.add(each)
    one_more = stream("one-more", 100, (1, 1))
    one_more.config.memory_domain = "another"
    with pytest.raises(InvalidArgument, match="no room for 'another'"):
        catalog.check_room(one_more)
    one_more.config.memory_domain = "domain-3"

    catalog.check_room(one_more)


def test_each_broker_of_a_stream_is_listed_once() -> None:
    assert broker_ids_of(stream("a", 1, (3, 1), (2, 1), (3, 1))) == [2, 3]
