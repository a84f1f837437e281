"""Unsure tails of entries that were taken over: which there are, and which are no more. See `UnsureTail`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kera.broker.log.entry import Entry
from kera.broker.records import SegmentAddress, UnsureTail
from kera.broker.recovery.plan import StreamletPlan
from kera.broker.recovery.scan import Ref
from kera.broker.storage.unsure import Index, unsure_tail
from kera.core.base.ids import EntryId


def found_unsure(index: Index, ref: Ref, plan: StreamletPlan) -> dict[int, UnsureTail]:
    """By entry, where unsure tails begin; what was found before may be unsure still."""
    found = {}
    for number, entry in enumerate(plan.entries):
        if entry.unsure is not None:
            known = unsure_tail(index, EntryId(*ref, number))
            found[number] = entry.unsure if known is None else min(known, entry.unsure)
    return found


def settled(entries: Iterable[Entry], uncovered: Collection[SegmentAddress]) -> list[Entry]:
    """Entries whose unsure tails have their replicas, and are unsure no more; `uncovered`: segments that have not."""
    found = []
    for entry in entries:
        tail = entry.unsure
        if tail is not None and not any(
            address.entry == entry.index and address[3:] >= tail.position[:2] for address in uncovered
        ):
            entry.unsure = None
            found.append(entry)
    return found
