"""The lag of a query behind its streams, in the form of Spark's Kafka source."""

from __future__ import annotations

from kera.spark_connector.planning.offsets import Offsets


def behind_latest(consumed: Offsets | None, heads: Offsets | None) -> dict[str, str]:
    """Return the records between `consumed` and `heads`, over the entries in both; empty without such entries."""
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
