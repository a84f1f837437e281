from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.cluster.placement import place
from kera.core.errors import InvalidArgument, Unavailable

LOADS = st.dictionaries(st.integers(1, 1000), st.integers(0, 50), min_size=1, max_size=12)


@st.composite
def questions(draw: st.DrawFn) -> tuple[int, int, dict[int, int]]:
    """Streamlets, brokers and load that can be answered."""
    load = draw(LOADS)
    streamlets = draw(st.integers(1, 60))
    return streamlets, draw(st.integers(0, min(streamlets, len(load)))), load


@given(questions())
def test_every_streamlet_gets_a_live_broker_and_the_shares_differ_by_one_at_most(
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
def test_the_same_question_has_the_same_answer(question: tuple[int, int, dict[int, int]], random: object) -> None:
    streamlets, brokers, load = question
    items = list(load.items())
    random.shuffle(items)  # type: ignore[attr-defined]  # a random.Random

    assert place(streamlets, brokers, dict(items)) == place(streamlets, brokers, load)


def test_streamlets_alternate_between_brokers() -> None:
    assert place(5, 2, {1: 7, 2: 0, 3: 7}) == [2, 1, 2, 1, 2]


def test_more_brokers_than_streamlets_is_the_callers_mistake() -> None:
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
def test_too_few_live_brokers_may_become_enough(brokers: int, live: int, text: str) -> None:
    with pytest.raises(Unavailable, match=text) as error:
        place(5, brokers, dict.fromkeys(range(1, live + 1), 0))

    assert error.value.retriable
    assert error.value.attributes == {"brokers": brokers or 1, "live_brokers": live}
