"""Brokers with a hostile writer's chunks in their logs are lost and drained: the short form of chaos program
`hostile`.
"""

import os
from pathlib import Path

import pytest

from tests.chaos import hostile
from tests.chaos.hostile_chunks import KINDS

ALL = bool(os.environ.get("KERA_HOSTILE_ALL"))
"""The whole matrix, which takes about five minutes."""
SHORT = {("memory", True): (1, "replicated"), ("drain --wait", False): (2, "persisted")}
"""Events, and whether hostile chunks are in the log: with how many replicas and which durability."""
KINDS_SHORT = 15
"""How many kinds of chunks; they include all kinds that are not about one field."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_log", [False, True], ids=["refused", "in the log"])
@pytest.mark.parametrize("event", hostile.EVENTS)
async def test_recoveries_and_drains_with_hostile_chunks_keep_acknowledged_records(
    tmp_path: Path, event: str, in_log: bool
) -> None:
    if not (ALL or (event, in_log) in SHORT):
        pytest.skip("part of the whole matrix, with KERA_HOSTILE_ALL=1")
    if ALL:
        rows = await hostile.one(event, tmp_path, in_log=in_log)
    else:
        replication, level = SHORT[event, in_log]
        kinds = KINDS[:KINDS_SHORT]
        rows = await hostile.one(
            event, tmp_path, in_log=in_log, replications=[replication], levels=[level], kinds=kinds
        )
    for row in rows:
        print(row)  # noqa: T201 - pytest shows it
        assert row.acknowledged > 0
        assert row.sent > row.taken > 0
        assert bool(row.seen.empty) is in_log
