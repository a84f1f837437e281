"""A memory domain that gets no memory does not delay others: they still write and load segments."""

from __future__ import annotations

import errno
import os

from kera.core.base.blocks import FileCalls
from tests.unit.broker.persistence_support import MakeEngine, on_disk_only, resident
from tests.unit.broker.support import Broker, Engine, Log, Outcome, chunk, stream_info

ORDERS, PAYMENTS = 7, 8


def starve(engine: Engine, domain: str) -> None:
    """Let a domain get no memory, as if others had taken all shared memory that is not reserved."""

    def fails(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine.arena.file(domain)._calls = FileCalls(reserve=fails)


async def test_writes_to_other_domains_do_not_wait_for_a_domain_without_memory(make_engine: MakeEngine) -> None:
    broker = Broker(make_engine(8), stream_info(ORDERS, memory_domain="eu"), stream_info(PAYMENTS))
    starve(broker.engine, "eu")
    refused, taken = broker.append(chunk(stream_id=ORDERS), chunk(stream_id=PAYMENTS))

    assert (refused.error.code, taken.error.code) == ("arena_full", "")
    assert "memory domain 'eu'" in refused.error.message


def test_loads_of_other_domains_do_not_wait_for_a_domain_without_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=8)
    theirs, ours = on_disk_only(Log(engine), 1), on_disk_only(Log(engine), 1)
    starve(engine, "eu")
    theirs.entry.memory_domain = "eu"
    outcomes = [Outcome(), Outcome()]
    for log, outcome in zip((theirs, ours), outcomes, strict=True):
        engine.memory.loads.load(log.entry, (1, 1), outcome)
    engine.run()

    assert [outcome.calls for outcome in outcomes] == [[], [None]]
    assert resident(ours) == [(1, 1)]
