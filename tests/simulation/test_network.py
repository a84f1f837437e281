"""The promises of the simulated network, which are those of real ones."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from tests.simulation.engine.network import Network
from tests.simulation.engine.scheduler import Scheduler


def test_messages_due_at_the_same_moment_arrive_in_the_order_of_sending() -> None:
    scheduler = Scheduler(1)
    network = Network(scheduler)
    got: list[bytes] = []
    machine: Any = SimpleNamespace(name="one")
    peer: Any = SimpleNamespace(machine=machine, arrived=lambda _kind, data: got.append(data))
    sender: Any = SimpleNamespace(machine=machine, peer=peer, arrives_s=1.0, sent=deque(), held=deque())
    pieces = [bytes([number]) for number in range(20)]
    for piece in pieces:
        network.carry(sender, "data", piece)

    assert scheduler.run_until(lambda: len(got) == len(pieces), 2.0)
    assert got == pieces
