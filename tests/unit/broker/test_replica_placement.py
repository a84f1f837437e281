"""Placement: which backups a virtual segment never gets, gets only if needed, and that all get their share."""

from collections import Counter
from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kera.broker.replication.placement import Candidate, place

OWN = "n0"
CANDIDATES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 3)), max_size=8).map(
    lambda items: [
        Candidate(number, f"n{node}", ("", "a", "b")[rack], free << 20)
        for number, (node, rack, free) in enumerate(items)
    ]
)


def chosen(replication: int, candidates: list[Candidate], seed: int) -> list[Candidate] | None:
    ids = place(replication, candidates, node_id=OWN, random=Random(seed))
    return None if ids is None else [candidates[id_] for id_ in ids]


def doubled(candidates: list[Candidate] | tuple[Candidate, ...]) -> int:
    """The number of replicas that share a node with another one."""
    return len(candidates) - len({each.node_id for each in candidates})


def on_own(candidates: list[Candidate] | tuple[Candidate, ...]) -> int:
    return sum(each.node_id == OWN for each in candidates)


@given(st.integers(1, 4), CANDIDATES, st.integers(0, 9))
def test_placement_gives_r_different_backups_or_none_if_there_are_too_few(
    replication: int, candidates: list[Candidate], seed: int
) -> None:
    found = chosen(replication, candidates, seed)

    assert (found is None) == (len(candidates) < replication)
    if found is not None:
        assert len({each.backup_id for each in found}) == replication


@given(st.integers(1, 4), CANDIDATES, st.integers(0, 9))
def test_nodes_differ_and_the_own_node_is_avoided_as_far_as_possible(
    replication: int, candidates: list[Candidate], seed: int
) -> None:
    found = chosen(replication, candidates, seed)
    if found is None:
        return
    choices = list(combinations(candidates, replication))
    fewest = min(doubled(choice) for choice in choices)

    assert doubled(found) == fewest
    if any(not on_own(choice) and doubled(choice) == fewest for choice in choices):
        assert not on_own(found)
    assert on_own(found) == min(on_own(choice) for choice in choices if doubled(choice) == fewest)


@given(st.integers(1, 3), st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 9))
def test_racks_differ_as_far_as_possible(replication: int, racks: list[int], seed: int) -> None:
    candidates = [Candidate(number, f"n{number + 1}", f"r{rack}", 0) for number, rack in enumerate(racks)]
    found = chosen(replication, candidates, seed)
    if found is not None:
        assert len({each.rack for each in found}) == min(replication, len(set(racks)))


def test_backups_of_unknown_racks_do_not_count_as_one_rack() -> None:
    candidates = [Candidate(0, "n1", "", 0), Candidate(1, "n2", "", 0), Candidate(2, "n3", "a", 0)]
    counts = Counter(id_ for seed in range(300) for id_ in place(2, candidates, node_id=OWN, random=Random(seed)) or ())

    assert min(counts.values()) > 150


def test_equal_backups_get_equal_shares() -> None:
    candidates = [Candidate(number, f"n{number + 1}", "", 1 << 20) for number in range(6)]
    random = Random(1)
    pairs: Counter[frozenset[int]] = Counter()
    for _ in range(3000):
        pairs[frozenset(place(2, candidates, node_id=OWN, random=random) or ())] += 1

    assert len(pairs) == 15
    assert all(150 < count < 250 for count in pairs.values())


def test_the_backup_with_more_memory_of_two_drawn_ones_is_chosen() -> None:
    candidates = [Candidate(number, f"n{number + 1}", "", number) for number in range(4)]
    random = Random(1)
    counts = Counter(id_ for _ in range(600) for id_ in place(1, candidates, node_id=OWN, random=random) or ())

    assert [counts[number] for number in range(4)] == sorted(counts[number] for number in range(4))
    assert counts[0] == 0
