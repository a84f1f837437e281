from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.cluster.placement import place
from kera.core.errors import InvalidArgument, Unavailable

LOADS = st.dictionaries(st.integers(1, 1000), st.integers(0, 50), min_size=1, max_size=12)


@st.composite
def questions(draw: st.DrawFn) -> tuple[int, int, dict[int, int]]:
    """Numbers of streamlets and brokers, and loads of brokers, for which a placement exists."""
    load = draw(LOADS)
    streamlets = draw(st.integers(1, 60))
    return streamlets, draw(st.integers(0, min(streamlets, len(load)))), load


@given(questions())
def test_every_streamlet_gets_a_broker_and_shares_differ_by_at_most_one(
    question: tuple[int, int, dict[int, int]],
) -> None:
    streamlets, brokers, load = question
    shares = Counter(place(streamlets, brokers, load))

    assert shares.total() == streamlets
    assert shares.keys() <= load.keys()
    assert len(shares) == min(brokers or len(load), streamlets)
    assert max(shares.values()) - min(shares.values()) <= 1


@given(questions())
def test_the_least_loaded_brokers_are_chosen_and_get_the_larger_shares(
    question: tuple[int, int, dict[int, int]],
) -> None:
    streamlets, brokers, load = question
    shares = Counter(place(streamlets, brokers, load))

    ranked = sorted(load, key=lambda broker_id: (load[broker_id], broker_id))
    counts = [shares[broker_id] for broker_id in ranked]
    assert counts == sorted(counts, reverse=True)


@given(questions(), st.randoms())
def test_the_placement_does_not_depend_on_the_order_of_brokers(
    question: tuple[int, int, dict[int, int]], random: object
) -> None:
    streamlets, brokers, load = question
    items = list(load.items())
    random.shuffle(items)  # type: ignore[attr-defined]  # a random.Random

    assert place(streamlets, brokers, dict(items)) == place(streamlets, brokers, load)


def test_streamlets_alternate_between_brokers() -> None:
    assert place(5, 2, {1: 7, 2: 0, 3: 7}) == [2, 1, 2, 1, 2]


def test_more_brokers_than_streamlets_are_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="2 streamlets cannot be spread over 3 brokers"):
        place(2, 3, dict.fromkeys(range(1, 9), 0))


@pytest.mark.parametrize(
    ("brokers", "live", "text"),
    [
        (0, 0, "needs 1 live broker, there is none"),
        (3, 1, "needs 3 live brokers, there is 1;"),
        (3, 2, "there are 2;"),
    ],
)
def test_too_few_live_brokers_are_a_retriable_error(brokers: int, live: int, text: str) -> None:
    with pytest.raises(Unavailable, match=text) as error:
        place(5, brokers, dict.fromkeys(range(1, live + 1), 0))

    assert error.value.retriable
    assert error.value.attributes == {"brokers": brokers or 1, "live_brokers": live}
