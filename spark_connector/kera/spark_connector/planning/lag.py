"""How far a query is behind its streams, as Spark's Kafka source tells it."""

from __future__ import annotations

from kera.spark_connector.planning.offsets import Offsets


def behind_latest(consumed: Offsets | None, heads: Offsets | None) -> dict[str, str]:
    """Records between `consumed` and `heads`, over the entries that are in both; empty where there are none."""
    if consumed is None or heads is None:
        return {}
    done, ids = consumed.places(), consumed.stream_ids()
    behind = [
        max(head.record - done[entry].record, 0)
        for entry, head in heads.entries()
        if entry in done and ids[entry.stream] == heads.streams[entry.stream].stream_id
    ]
    if not behind:
        return {}
    return {
        "minOffsetsBehindLatest": str(min(behind)),
        "maxOffsetsBehindLatest": str(max(behind)),
        "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
    }
