"""Memory of answers that readers of replicas do not take."""

import pytest

from kera.backup.answers import Answers
from kera.core.errors import Unavailable
from kera.core.rpc.method import Peer

LARGE = 1 << 20


@pytest.fixture
def answers() -> Answers:
    """Room for eight large answers, two of them of one connection."""
    return Answers(8 * LARGE)


def peer() -> Peer:
    return Peer("tcp", "")


def test_an_answer_counts_until_its_last_reference_is_gone(answers: Answers) -> None:
    view = answers.admit(peer(), LARGE).is_made(bytearray(b"chunks"))
    part = view[2:]
    assert (bytes(view), answers.held_bytes) == (b"chunks", LARGE)
    del view
    assert answers.held_bytes == 0
    assert bytes(part) == b"unks"


def test_a_connection_gets_only_its_share_of_the_memory(answers: Answers) -> None:
    greedy = peer()
    held = [answers.admit(greedy, LARGE) for _ in range(2)]
    with pytest.raises(Unavailable, match="here 2097152 of them"):
        answers.admit(greedy, LARGE)
    others = [answers.admit(peer(), LARGE) for _ in range(6)]
    with pytest.raises(Unavailable, match="answers of 8388608 bytes"):
        answers.admit(peer(), LARGE)
    held[0].give_up()
    answers.admit(greedy, LARGE).give_up()
    for each in (held[1], *others):
        each.give_up()
    assert answers.held_bytes == 0


def test_an_answer_larger_than_the_limit_is_admitted_when_no_other_is_held(answers: Answers) -> None:
    answers.admit(peer(), 9 * LARGE)
    with pytest.raises(Unavailable):
        answers.admit(peer(), 1)
