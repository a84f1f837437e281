"""The parts of a group in the record of a streamlet's progress.

They are within the group's own entry, which describes the whole: a coordinator that knows nothing of parts reads on at
the first place that is not done, and leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Iterator

from kera.v1 import consumer_group_pb2 as messages


def parts_in(progress: messages.StreamletProgress) -> Iterator[messages.GroupProgress]:
    """The groups of a record, and of those that are in parts the parts."""
    for group in progress.groups:
        yield from group.parts or (group,)


def describe_whole(whole: messages.GroupProgress) -> None:
    """Say of a group in parts how far it is as a whole. Nobody holds it: it has no lease, so no step is about it."""
    first, last = whole.parts[0], whole.parts[-1]
    reached = next((part for part in whole.parts if not part.done), last)
    whole.next.CopyFrom(reached.next)
    whole.done = reached.done
    whole.joined = first.joined
    if first.HasField("first_record"):
        whole.first_record = first.first_record
    if reached.HasField("next_record"):
        whole.next_record = reached.next_record
    if last.HasField("end_record"):
        whole.end_record = last.end_record
    for part in whole.parts:
        whole.lost.extend(part.lost)
