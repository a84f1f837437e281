"""The cluster stores a query's cursor: it shows the query's lag, and retention keeps unread records."""

from pathlib import Path

import pytest

from kera.client import Client
from tests.spark.support import Kera, Sent, columnar_first, send_mib, start, wait_until

pytestmark = columnar_first


def test_the_lag_of_a_query_is_shown_under_its_name(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2)
    group = f"{stream}-loader"
    produced = kera.send(stream, range(100))

    kera.read_new(stream, tmp_path / "checkpoint", startingOffsets="earliest", **{"kera.group.id": group})
    assert kera.lag(group) == 0
    kera.send(stream, range(100, 130))
    assert kera.lag(group) == 30
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", **{"kera.group.id": group})

    assert (len(produced), len(found)) == (100, 30)
    assert kera.lag(group) == 0


@pytest.mark.slow
def test_the_lag_of_a_running_query_goes_down_to_zero(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    kera.send(stream, range(100))
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, startingOffsets="earliest", **{"kera.group.id": stream})
    query = start(frame, tmp_path / "checkpoint", found)
    try:
        wait_until(lambda: query.exception() or stream in kera.groups(), "the cursor")
        wait_until(lambda: query.exception() or kera.lag(stream) == 0, "the end")
        kera.send(stream, range(100, 200))
        wait_until(lambda: query.exception() or sum(map(len, found.values())) == 200, "the records")
        wait_until(lambda: query.exception() or kera.lag(stream) == 0, "the end")
    finally:
        query.stop()
    assert query.exception() is None


@pytest.mark.slow
def test_a_query_without_a_group_id_keeps_its_generated_name(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    for _ in range(2):
        kera.send(stream, range(10))
        kera.read_new(stream, tmp_path / "checkpoint", startingOffsets="earliest", groupIdPrefix=stream)

    (group,) = [name for name in kera.groups() if name.startswith(f"{stream}-")]
    assert len(group) == len(stream) + 1 + 8
    assert kera.lag(group) == 0


@pytest.mark.slow
def test_retention_removes_only_records_that_the_query_has_read(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, retention_consumer_groups=[stream], retention_consumed=True, group_segments=1)
    named = {"startingOffsets": "earliest", "kera.group.id": stream, "maxOffsetsPerTrigger": "100"}

    async def first_record(client: Client) -> int:
        return (await client.bounds(stream))[0][0].first_record

    sent = send_mib(kera, stream, 4, streamlets=1)
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, **named).selectExpr(
        "coalesce(key, binary('')) key", "value", "streamlet", "entry", "offset"
    )
    stopping = start(frame, tmp_path / "checkpoint", found)
    try:
        wait_until(lambda: stopping.exception() or len(found) >= 2, "two micro-batches")
    finally:
        stopping.stop()
    assert kera.run(first_record) <= sum(map(len, found.values()))

    rest, _ = kera.read_new(stream, tmp_path / "checkpoint", **named)

    taken = sorted({record.offset for batch in found.values() for record in batch} | {each.offset for each in rest})
    assert taken == list(range(sent))
    wait_until(lambda: kera.run(first_record) > 0, "retention")
    assert kera.lag(stream) == 0
