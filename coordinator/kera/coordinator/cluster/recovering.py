"""The facts that a broker needs about a streamlet under recovery, before any of the streamlet's data are found."""

from __future__ import annotations

from kera.coordinator.cluster.keys import HANDOVERS, STARTS, streamlet_key
from kera.coordinator.cluster.starts import starts_at
from kera.coordinator.store.ledger import Ledger
from kera.v1 import broker_pb2, common_pb2


def known_starts(
    ledger: Ledger, broker_id: int, stream: common_pb2.StreamInfo, streamlet_id: int
) -> list[common_pb2.EntryStart]:
    """Return where the entries of a broker's part of a streamlet start, as far as that is known."""
    value = ledger.get(streamlet_key(STARTS, stream.stream_id, streamlet_id))
    known = broker_pb2.TakeOverStream.FromString(value or b"").starts
    return starts_at(stream.assignments[streamlet_id], broker_id, known)


def last_handover(ledger: Ledger, stream_id: int, streamlet_id: int) -> common_pb2.StreamletState | None:
    """Return the state that the last move of a streamlet gave its owner, or None."""
    value = ledger.get(streamlet_key(HANDOVERS, stream_id, streamlet_id))
    return None if value is None else common_pb2.StreamletState.FromString(value)


def as_told_to(ledger: Ledger, broker_id: int, stream: common_pb2.StreamInfo) -> common_pb2.StreamInfo:
    """Return a stream with the facts that the broker needs about its streamlets under recovery."""
    recovered = [one.streamlet_id for one in stream.assignments if one.sources and one.broker_id == broker_id]
    if not recovered:
        return stream
    told = common_pb2.StreamInfo()
    told.CopyFrom(stream)
    for streamlet_id in recovered:
        assignment = told.assignments[streamlet_id]
        assignment.starts.extend(known_starts(ledger, broker_id, stream, streamlet_id))
        if (state := last_handover(ledger, stream.stream_id, streamlet_id)) is not None:
            assignment.handed_over.CopyFrom(state)
    return told
