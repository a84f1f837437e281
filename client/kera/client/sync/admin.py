"""`kera.client.Admin` without asyncio: calls wait for their results. Made by `scripts.sync_sdk`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from kera.client.admin.admin import GROUP_SEGMENTS_DEFAULT
from kera.client.admin.admin import Admin as AsyncAdmin
from kera.client.admin.consumer_groups import ConsumerGroupDescription, ConsumerGroupSummary
from kera.client.admin.control import DrainStatus, MoveResult, Rebalancing, RecoveryDescription
from kera.client.admin.reset_plan import ResetPlan, ResetTo
from kera.client.positions import Positions
from kera.client.sync.loop_thread import LoopThread
from kera.client.types import ClusterDescription, StreamDescription
from kera.core.base.ids import Position
from kera.core.format.punctuation import EPOCH_GRACE_MS, TIMESTAMP_AHEAD_MAX_MS
from kera.core.push import DEFAULT_DOMAIN


class Admin:
    """Creates, lists, describes, alters, truncates and deletes streams. Get it as `Client.admin`.

    Its methods do the same as those of `kera.client.Admin`; the docstrings there name the errors.
    """

    def __init__(self, thread: LoopThread, admin: AsyncAdmin) -> None:
        self._thread = thread
        self._admin = admin

    def create_stream(  # noqa: PLR0913 - as many as the other one has
        self,
        name: str,
        *,
        streamlets: int = 1,
        brokers: int = 0,
        entries: int = 1,
        group_segments: int = GROUP_SEGMENTS_DEFAULT,
        durability: str | None = None,
        codec: str = "none",
        schema: pa.Schema | type | None = None,
        key_column: str | None = None,
        timestamp_column: str | None = None,
        retention_ms: int = 0,
        retention_bytes: int = 0,
        retention_consumer_groups: Sequence[str] = (),
        retention_consumed: bool = False,
        replication: int | None = None,
        virtual_logs: int = 1,
        memory_priority: int = 0,
        replication_priority: int = 0,
        memory_domain: str = DEFAULT_DOMAIN,
        epoch_ms: int = 0,
        punctuation: str = "clock",
        epoch_grace_ms: int = EPOCH_GRACE_MS,
        timestamp_ahead_max_ms: int = TIMESTAMP_AHEAD_MAX_MS,
    ) -> StreamDescription:
        """Create a stream (thesis table 6.1, createStream)."""
        return self._thread.run(
            self._admin.create_stream(
                name,
                streamlets=streamlets,
                brokers=brokers,
                entries=entries,
                group_segments=group_segments,
                durability=durability,
                codec=codec,
                schema=schema,
                key_column=key_column,
                timestamp_column=timestamp_column,
                retention_ms=retention_ms,
                retention_bytes=retention_bytes,
                retention_consumer_groups=retention_consumer_groups,
                retention_consumed=retention_consumed,
                replication=replication,
                virtual_logs=virtual_logs,
                memory_priority=memory_priority,
                replication_priority=replication_priority,
                memory_domain=memory_domain,
                epoch_ms=epoch_ms,
                punctuation=punctuation,
                epoch_grace_ms=epoch_grace_ms,
                timestamp_ahead_max_ms=timestamp_ahead_max_ms,
            )
        )

    def stream_id(self, name: str) -> int:
        """Return the id of a stream (thesis table 6.1, getStreamId)."""
        return self._thread.run(self._admin.stream_id(name))

    def list_streams(self) -> list[StreamDescription]:
        """Return all streams, by name."""
        return self._thread.run(self._admin.list_streams())

    def describe_stream(self, name: str) -> StreamDescription:
        """Return the present description of a stream."""
        return self._thread.run(self._admin.describe_stream(name))

    def alter_stream(  # noqa: PLR0913 - as many as the other one has
        self,
        name: str,
        *,
        durability: str | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        retention_consumer_groups: Sequence[str] | None = None,
        retention_consumed: bool | None = None,
        virtual_logs: int | None = None,
        memory_priority: int | None = None,
        replication_priority: int | None = None,
        memory_domain: str | None = None,
        epoch_ms: int | None = None,
        punctuation: str | None = None,
        epoch_grace_ms: int | None = None,
        timestamp_ahead_max_ms: int | None = None,
        brokers: int | None = None,
        add_columns: pa.Schema | None = None,
    ) -> StreamDescription:
        """Change durability, retention, virtual logs, priorities, memory or epochs of a stream; None: no change."""
        return self._thread.run(
            self._admin.alter_stream(
                name,
                durability=durability,
                retention_ms=retention_ms,
                retention_bytes=retention_bytes,
                retention_consumer_groups=retention_consumer_groups,
                retention_consumed=retention_consumed,
                virtual_logs=virtual_logs,
                memory_priority=memory_priority,
                replication_priority=replication_priority,
                memory_domain=memory_domain,
                epoch_ms=epoch_ms,
                punctuation=punctuation,
                epoch_grace_ms=epoch_grace_ms,
                timestamp_ahead_max_ms=timestamp_ahead_max_ms,
                brokers=brokers,
                add_columns=add_columns,
            )
        )

    def truncate_stream(self, name: str, to: Positions | Literal["latest"]) -> dict[int, list[Position]]:
        """Remove the records before `to`, for ever; returns where the entries start now."""
        return self._thread.run(self._admin.truncate_stream(name, to))

    def commit_cursors(self, consumer_group: str, stream: str, positions: Positions) -> None:
        """Tell brokers that a consumer group has read a stream up to `positions`, for retention."""
        self._thread.run(self._admin.commit_cursors(consumer_group, stream, positions))

    def delete_stream(self, name: str) -> None:
        """Delete a stream and its data."""
        self._thread.run(self._admin.delete_stream(name))

    def move_streamlet(self, stream: str, streamlet_id: int, broker_id: int) -> MoveResult:
        """Make a broker the owner of a streamlet; older records stay where they are, and can be read there."""
        return self._thread.run(self._admin.move_streamlet(stream, streamlet_id, broker_id))

    def rebalance(self, *, dry_run: bool = False) -> Rebalancing:
        """Move streamlets so that brokers have about the same load; with `dry_run`, only return moves and reasons."""
        return self._thread.run(self._admin.rebalance(dry_run=dry_run))

    def drain_broker(self, broker_id: int, *, undo: bool = False, ask: bool = False) -> DrainStatus:
        """Begin to empty a broker so that it can be stopped, or with `undo` take that back."""
        return self._thread.run(self._admin.drain_broker(broker_id, undo=undo, ask=ask))

    def drain_backup(self, backup_id: int, *, undo: bool = False, ask: bool = False) -> DrainStatus:
        """Like `drain_broker`, for a backup: brokers make its replicas again on other backups."""
        return self._thread.run(self._admin.drain_backup(backup_id, undo=undo, ask=ask))

    def forget_broker(self, broker_id: int, *, force: bool = False) -> list[str]:
        """Remove a broker that is gone for good from the metadata."""
        return self._thread.run(self._admin.forget_broker(broker_id, force=force))

    def forget_backup(self, backup_id: int, *, force: bool = False) -> list[str]:
        """Like `forget_broker`, for a backup; with `force` also if brokers may need its replicas."""
        return self._thread.run(self._admin.forget_backup(backup_id, force=force))

    def adopt_stream(self, stream: str, name: str = "") -> StreamDescription:
        """Add a stream that brokers hold and that is missing in the metadata, given by its name or its id."""
        return self._thread.run(self._admin.adopt_stream(stream, name))

    def backup_metadata(self) -> bytes:
        """Return a consistent copy of the cluster's metadata, to be kept as a file for ``kera cluster restore``."""
        return self._thread.run(self._admin.backup_metadata())

    def recoveries(self) -> list[RecoveryDescription]:
        """Return current and recent recoveries of lost brokers, the last one first."""
        return self._thread.run(self._admin.recoveries())

    def consumer_groups(self) -> list[ConsumerGroupSummary]:
        """Return the consumer groups whose consumers share streams (`Client.group_consumer`), by name."""
        return self._thread.run(self._admin.consumer_groups())

    def describe_consumer_group(self, name: str) -> ConsumerGroupDescription:
        """Return consumers, cursors and lag of a consumer group."""
        return self._thread.run(self._admin.describe_consumer_group(name))

    def reset_consumer_group(
        self, name: str, stream: str, to: ResetTo, *, force: bool = False, streamlets: Sequence[int] | None = None
    ) -> None:
        """Set the cursors of a consumer group in a stream, back or forward: its consumers go on from there."""
        self._thread.run(self._admin.reset_consumer_group(name, stream, to, force=force, streamlets=streamlets))

    def plan_reset(self, name: str, stream: str, to: ResetTo, *, streamlets: Sequence[int] | None = None) -> ResetPlan:
        """Plan a `reset_consumer_group`, entry by entry: old and new cursors, records read again and skipped."""
        return self._thread.run(self._admin.plan_reset(name, stream, to, streamlets=streamlets))

    def delete_consumer_group(self, name: str, *, idle_ms: int = 0) -> None:
        """Delete a consumer group and its cursors."""
        self._thread.run(self._admin.delete_consumer_group(name, idle_ms=idle_ms))

    def describe_cluster(self) -> ClusterDescription:
        """Return the cluster's id, its brokers and its backups."""
        return self._thread.run(self._admin.describe_cluster())
