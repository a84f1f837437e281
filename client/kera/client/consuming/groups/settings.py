"""Settings of consumers that share streams: section ``[group_consumer]``."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from kera.client.settings import ConsumerSettings


class GroupConsumerSettings(ConsumerSettings):
    """How a `GroupConsumer` takes part in its consumer group. Variables ``KERA_GROUP_CONSUMER_*``."""

    section: ClassVar[str] = "group_consumer"

    start: Literal["earliest", "latest"] = Field(
        "earliest",
        description="Start of a consumer group that has no cursor in a stream yet. earliest: with all present"
        " records; latest: with new records only.",
    )
    session_timeout_ms: int = Field(
        10_000,
        ge=100,
        description="Time without a heartbeat after which the consumer counts as dead, and others get its groups, in"
        " ms.",
    )
    progress_timeout_ms: int = Field(
        300_000,
        ge=100,
        description="Time in the code that takes its records after which the consumer counts as stuck, in ms.",
    )
    heartbeat_interval_ms: int = Field(
        1_000, ge=10, description="How often the consumer says that it lives, in ms; well below session_timeout_ms."
    )
    commit_interval_ms: int = Field(
        1_000,
        ge=0,
        description="How often the consumer commits processed records, in ms. 0: only by commit(); then a group goes"
        " to another consumer only when all of its delivered records are committed.",
    )
    groups_max: int = Field(
        2048,
        ge=1,
        le=16_384,
        description="Groups of segments that the consumer holds at once. All consumers of a consumer group together"
        " should take a group for each entry of its streams: else some wait until others come to their ends.",
    )
    in_order: bool = Field(
        default=False,
        description="Whether each entry is read in order by the consumer group: no consumer gets records of an entry"
        " before all earlier ones are processed and committed, so records with the same key are processed in their"
        " order. It holds for all consumers of the consumer group as soon as one of them asks for it. Then no more"
        " consumers work at once than the streams have entries.",
    )

    @model_validator(mode="after")
    def _heartbeats_come_in_time(self) -> Self:
        if 2 * self.heartbeat_interval_ms > self.session_timeout_ms:
            raise ValueError(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) is at most half of session_timeout_ms"
                f" ({self.session_timeout_ms}): one heartbeat may be lost"
            )
        return self
