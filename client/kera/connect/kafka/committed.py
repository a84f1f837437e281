"""The offsets that a consumer group of Kafka has committed for a topic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kera.connect.errors import Refused
from kera.connect.kafka.connection import ANSWER_S, admin_of, settings_of, translated


class CommittedOffsets(NamedTuple):
    """The offsets of one consumer group and topic."""

    offsets: Mapping[int, int | None]
    """The offset of the next record to read, per partition; None: the group has committed no offset."""
    members: int
    """Number of active consumers of the group."""


def committed_offsets(
    bootstrap: str, topic: str, partitions: int, group: str, settings: Mapping[str, str]
) -> CommittedOffsets:
    """Ask Kafka, and block meanwhile. Raises `Refused` if the group has no offset for the topic, `Unreachable`."""
    import confluent_kafka as kafka

    ours = settings_of(bootstrap, settings, group_id=group, enable_auto_commit=False)
    consumer: Any = None
    with translated(f"consumer group {group}"):
        consumer = kafka.Consumer(ours)
    try:
        with translated(f"consumer group {group}"):
            asked = [kafka.TopicPartition(topic, number) for number in range(partitions)]
            found = consumer.committed(asked, timeout=ANSWER_S)
            for each in found:
                if each.error is not None:
                    raise kafka.KafkaException(each.error)
            members = _members(group, ours)
    finally:
        consumer.close()
    offsets = {each.partition: each.offset if each.offset >= 0 else None for each in found}
    if all(offset is None for offset in offsets.values()):
        raise Refused(f"consumer group {group!r} of Kafka has committed no offset for topic {topic!r}")
    return CommittedOffsets(offsets, members)


def _members(group: str, settings: Mapping[str, Any]) -> int:
    admin = admin_of(settings)
    described = admin.describe_consumer_groups([group], request_timeout=ANSWER_S)[group].result()
    return len(described.members)
