"""Administration: streams and the cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pyarrow as pa

from kera.client import arguments
from kera.client.admin.consumer_groups import (
    ConsumerGroupDescription,
    ConsumerGroupSummary,
    delete_consumer_group,
    describe_consumer_group,
    list_consumer_groups,
)
from kera.client.admin.control import (
    BrokerLoad,
    DrainStatus,
    MoveResult,
    Rebalancing,
    RecoveryDescription,
    StreamletMove,
)
from kera.client.admin.reset_plan import ResetPlan, ResetTo
from kera.client.admin.resetting import plan_reset, reset_consumer_group
from kera.client.cluster.cluster import Cluster
from kera.client.positions import Positions, check_place
from kera.client.serializers.columns.models import arrow_schema_of
from kera.client.stream_config import durability_value, punctuation_value
from kera.client.types import ClusterDescription, StreamDescription
from kera.core.base.ids import EntryId, Position
from kera.core.errors import InvalidArgument, Uncertain, UnknownStream
from kera.core.format.punctuation import EPOCH_GRACE_MS, TIMESTAMP_AHEAD_MAX_MS
from kera.core.format.schema import schema_to_bytes
from kera.core.push import DEFAULT_DOMAIN
from kera.core.rpc import api
from kera.v1 import common_pb2, coordinator_pb2

GROUP_SEGMENTS_DEFAULT = 16


class Admin:
    """Creates, lists, describes, alters, truncates and deletes streams. Get it as `Client.admin`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def create_stream(  # noqa: PLR0913 - what a stream is made of, each named by the caller
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
        """Create a stream (thesis table 6.1, createStream).

        `streamlets` (M) is fixed for ever; they are spread over `brokers` (N; 0: all). `entries` (Q) is the number of
        append-only chains per streamlet: 1 gives a total order per streamlet, more let producers append in parallel. A
        group has `group_segments` (P) segments, also fixed; the consumers of a consumer group are assigned whole groups
        or parts of them (docs/consumer-groups.md). With a `schema`, the stream takes batches of it; `key_column`
        partitions them, `timestamp_column` gives their time. A dataclass or a pydantic model stands for the schema with
        its fields (`kera.client.arrow_schema_of`).

        Without retention, records stay. With it, whole segments are removed, oldest first, once one of the rules
        applies: `retention_ms` removes older segments, `retention_bytes` the bytes of a streamlet beyond this number
        (0: no such rule), `retention_consumed` segments that all `retention_consumer_groups` have read. No rule removes
        records that one of `retention_consumer_groups` has yet to read; they report their progress with
        `Consumer.commit`.

        `replication` (R) is the number of backups that have each chunk in addition to its broker, fixed for ever; None:
        the cluster's default. On each broker, `virtual_logs` (V, at most M·Q) replicate the chunks, each with one
        request at a time to a backup: more of them replicate more in parallel, and need more memory of the backups.
        `durability` is the level at which a chunk is acknowledged and can be read: ``leader``, ``replicated`` or
        ``persisted``; None: ``replicated`` with replication, else ``leader``.

        Priorities (0 to 9) are relative to the other streams of a broker: data that are on disk stay in memory longer
        with a higher `memory_priority`; chunks with a higher `replication_priority` go to backups first.

        Brokers keep streams of different `memory_domain` apart in shared memory: a process that may map one domain sees
        the data of all its streams, and of no others.

        With `epoch_ms`, the stream has epochs of this length, by the times of its records (docs/epochs.md).
        `punctuation` decides how epochs close in entries that get no records: brokers punctuate by their ``clock``,
        `epoch_grace_ms` later, or only ``producers`` do. Brokers refuse records with times further ahead than
        `timestamp_ahead_max_ms` (0: any).

        Raises `StreamExists`, `InvalidArgument`, `SchemaMismatch`, `Unavailable`, `TooFewBackups`, and
        `IncompatibleSchema` when the schema registry has other columns for the stream's values, which readers may rely
        on.
        """
        request = coordinator_pb2.CreateStreamRequest(
            name=arguments.text("name", name, "the name of a stream"),
            # So that a retry after an attempt without an answer finds the stream that this attempt made.
            creation_id=self._cluster.runtime.new_id(),
            config=common_pb2.StreamConfig(
                streamlets=_count("streamlets", streamlets),
                brokers=_count("brokers", brokers),
                entries=_count("entries", entries),
                group_segments=_count("group_segments", group_segments),
                durability=durability_value(durability),
                codec=_enum(common_pb2.Codec, "CODEC_", codec),  # type: ignore[arg-type]
                retention_ms=_limit("retention_ms", retention_ms),
                retention_bytes=_limit("retention_bytes", retention_bytes),
                retention_consumer_groups=arguments.names("retention_consumer_groups", retention_consumer_groups),
                retention_consumed=arguments.flag("retention_consumed", retention_consumed),
                replication=None if replication is None else _count("replication", replication),
                virtual_logs=_count("virtual_logs", virtual_logs),
                memory_priority=_count("memory_priority", memory_priority),
                replication_priority=_count("replication_priority", replication_priority),
                memory_domain=arguments.text("memory_domain", memory_domain, "the name of a memory domain"),
                epoch_ms=_limit("epoch_ms", epoch_ms),
                punctuation=punctuation_value(punctuation),
                epoch_grace_ms=_limit("epoch_grace_ms", epoch_grace_ms),
                timestamp_ahead_max_ms=_limit("timestamp_ahead_max_ms", timestamp_ahead_max_ms),
            ),
        )
        columns = {"key_column": key_column, "timestamp_column": timestamp_column}
        for parameter, column in columns.items():
            if column is not None:
                arguments.text(parameter, column, "the name of a column")
        if isinstance(schema, type):
            schema = arrow_schema_of(schema)
        if schema is not None:
            request.schema.arrow_schema = _schema("schema", schema)
            request.schema.key_column = key_column or ""
            request.schema.timestamp_column = timestamp_column or ""
        elif key_column or timestamp_column:
            raise InvalidArgument("key_column and timestamp_column go with a schema")
        await self._cluster.ask(api.CREATE_STREAM, request)
        self._cluster.forget(name)
        return await self._cluster.stream(name)

    async def stream_id(self, name: str) -> int:
        """Return the id of a stream (thesis table 6.1, getStreamId). Raises `UnknownStream`."""
        request = coordinator_pb2.GetStreamIdRequest(name=arguments.text("name", name, "the name of a stream"))
        return (await self._cluster.ask(api.GET_STREAM_ID, request)).stream_id

    async def list_streams(self) -> list[StreamDescription]:
        """Return all streams, by name."""
        return [StreamDescription.from_message(info) for info in await self._cluster.all_streams()]

    async def describe_stream(self, name: str) -> StreamDescription:
        """Return the present description of a stream. Raises `UnknownStream`."""
        self._cluster.forget(name)
        return await self._cluster.stream(name)

    async def alter_stream(  # noqa: PLR0913 - a setting each
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
        """Change durability, retention, virtual logs, priorities, memory or epochs of a stream; None: no change.

        See `create_stream` for the parameters.

        `add_columns` adds columns to a typed stream, behind the present ones. They are nullable: existing records have
        nulls in them, and producers may go on without them. Existing columns do not change.

        Another `memory_domain` applies to data that are written or loaded from now on; data in memory stay where they
        are until their place is needed.

        `retention_consumer_groups` replaces the list. A broker that is away follows when it is back. `brokers` (0: all)
        moves streamlets until the stream is spread over this many brokers; older records stay where they are.

        Raises `UnknownStream`, `InvalidArgument`; with `brokers`, also `Unavailable`; with `add_columns`, also
        `SchemaMismatch` when the stream has a column of that name with another type.
        """
        request = coordinator_pb2.AlterStreamRequest(name=arguments.text("name", name, "the name of a stream"))
        changes = {
            "durability": durability,
            "retention_ms": retention_ms,
            "retention_bytes": retention_bytes,
            "retention_consumed": retention_consumed,
            "virtual_logs": virtual_logs,
            "memory_priority": memory_priority,
            "replication_priority": replication_priority,
            "memory_domain": memory_domain,
            "epoch_ms": epoch_ms,
            "punctuation": punctuation,
            "epoch_grace_ms": epoch_grace_ms,
            "timestamp_ahead_max_ms": timestamp_ahead_max_ms,
            "brokers": brokers,
            "add_columns": add_columns,
        }
        for field, value in changes.items():
            if value is not None:
                setattr(request, field, _ON_THE_WIRE[field](field, value))
        if retention_consumer_groups is not None:
            names = arguments.names("retention_consumer_groups", retention_consumer_groups)
            request.retention_consumer_groups.CopyFrom(coordinator_pb2.ConsumerGroupNames(names=names))
        await self._cluster.ask(api.ALTER_STREAM, request)
        return await self.describe_stream(name)

    async def truncate_stream(self, name: str, to: Positions | Literal["latest"]) -> dict[int, list[Position]]:
        """Remove the records before `to`, for ever; returns where the entries start now.

        `to` is positions per streamlet and entry, in the form of `Consumer.positions`, or ``"latest"``: all present
        records. Streamlets missing in `to`, and entries with `EARLIEST`, do not change.

        When one streamlet fails, others may have been truncated; the same call may be repeated. Raises `UnknownStream`,
        `StreamletOutOfRange`, `InvalidArgument`, `InvalidCursor` when a position is not the start of a chunk or is
        beyond the end, and `Unavailable` or `Uncertain` when a broker cannot be reached.
        """
        check_place("to", to, ("latest",))
        if isinstance(to, str):
            bounds = await self._cluster.bounds(name)
            to = {streamlet_id: [entry.end for entry in entries] for streamlet_id, entries in bounds.items()}
        starts = await self._cluster.truncate(name, await _by_entry(self._cluster, name, to))
        found: dict[int, list[Position]] = {}
        for entry, start in sorted(starts.items()):
            found.setdefault(entry.streamlet_id, []).append(start)
        return found

    async def commit_cursors(self, consumer_group: str, stream: str, positions: Positions) -> None:
        """Tell brokers that a consumer group has read a stream up to `positions`, for retention.

        (See ``retention_consumer_groups``.) This does not change where a consumer starts: `Consumer.commit` does both,
        and `reset_consumer_group` moves a consumer group. Raises the errors of `truncate_stream`, and `InvalidArgument`
        when `consumer_group` is empty.
        """
        await self._cluster.commit(consumer_group, stream, await _by_entry(self._cluster, stream, positions))

    async def delete_stream(self, name: str) -> None:
        """Delete a stream and its data. Raises `UnknownStream`."""
        arguments.text("name", name, "the name of a stream")
        try:
            await self._cluster.ask(api.DELETE_STREAM, coordinator_pb2.DeleteStreamRequest(name=name))
        except UnknownStream as error:
            if not isinstance(error.__cause__, Uncertain):
                raise
            # Most likely an earlier attempt without an answer has deleted it; in any case it does not exist now.
        finally:
            self._cluster.forget(name)

    async def move_streamlet(self, stream: str, streamlet_id: int, broker_id: int) -> MoveResult:
        """Make a broker the owner of a streamlet; older records stay where they are, and can be read there.

        Raises `UnknownStream`, `StreamletOutOfRange`, `InvalidArgument`, and `Unavailable` when one of the two brokers
        is away or cannot make its data durable in time.
        """
        request = coordinator_pb2.MoveStreamletRequest(
            stream=arguments.text("stream", stream, "the name of a stream"),
            streamlet_id=_count("streamlet_id", streamlet_id),
            broker_id=_count("broker_id", broker_id),
        )
        answer = await self._cluster.ask(api.MOVE_STREAMLET, request)
        return MoveResult(await self.describe_stream(stream), answer.stall_us)

    async def rebalance(self, *, dry_run: bool = False) -> Rebalancing:
        """Move streamlets so that brokers have about the same load; with `dry_run`, only return moves and reasons."""
        request = coordinator_pb2.RebalanceRequest(dry_run=arguments.flag("dry_run", dry_run))
        answer = await self._cluster.ask(api.REBALANCE, request)
        return Rebalancing(
            moves=[StreamletMove.from_message(move) for move in answer.moves],
            loads=[BrokerLoad.from_message(load) for load in answer.loads],
        )

    async def drain_broker(self, broker_id: int, *, undo: bool = False, ask: bool = False) -> DrainStatus:
        """Begin to empty a broker so that it can be stopped, or with `undo` take that back. Returns the progress.

        The drain goes on in the background; with `ask`, the call only returns the progress. Raises `InvalidArgument`.
        """
        return await self._drain(coordinator_pb2.DrainRequest(broker_id=_member_id("broker", broker_id)), undo, ask)

    async def drain_backup(self, backup_id: int, *, undo: bool = False, ask: bool = False) -> DrainStatus:
        """Like `drain_broker`, for a backup: brokers make its replicas again on other backups."""
        return await self._drain(coordinator_pb2.DrainRequest(backup_id=_member_id("backup", backup_id)), undo, ask)

    async def _drain(self, request: coordinator_pb2.DrainRequest, undo: object, ask: object) -> DrainStatus:
        request.undo, request.ask = arguments.flag("undo", undo), arguments.flag("ask", ask)
        return DrainStatus.from_message(await self._cluster.ask(api.DRAIN, request))

    async def forget_broker(self, broker_id: int, *, force: bool = False) -> list[str]:
        """Remove a broker that is gone for good from the metadata. Returns descriptions of what was lost by that.

        Raises `InvalidArgument` when it is alive, expected back, or still needed: `force` gives up records that only it
        has.
        """
        request = coordinator_pb2.ForgetMemberRequest(
            broker_id=_member_id("broker", broker_id), force=arguments.flag("force", force)
        )
        return list((await self._cluster.ask(api.FORGET_MEMBER, request)).lost)

    async def forget_backup(self, backup_id: int, *, force: bool = False) -> list[str]:
        """Like `forget_broker`, for a backup; with `force` also if brokers may need its replicas."""
        request = coordinator_pb2.ForgetMemberRequest(
            backup_id=_member_id("backup", backup_id), force=arguments.flag("force", force)
        )
        return list((await self._cluster.ask(api.FORGET_MEMBER, request)).lost)

    async def adopt_stream(self, stream: str, name: str = "") -> StreamDescription:
        """Add a stream that brokers hold and that is missing in the metadata, given by its name or its id.

        It keeps its id and all acknowledged records, and gets `name`, or keeps its old name.

        For a stream that is in the metadata, and for which `UnlistedStream.problem` says that brokers know another
        history, the brokers' history counts: records written to other brokers since the metadata were restored are
        lost.

        Raises `UnknownStream`, `StreamExists`, `InvalidArgument`, and `Unavailable` while a broker that has a part of
        it is away.
        """
        request = coordinator_pb2.AdoptStreamRequest(
            stream=arguments.text("stream", stream, "the name of a stream, or its id as text"),
            name=arguments.text("name", name, "the name that the stream gets"),
        )
        answer = await self._cluster.ask(api.ADOPT_STREAM, request)
        self._cluster.forget(answer.stream.name)
        return StreamDescription.from_message(answer.stream)

    async def backup_metadata(self) -> bytes:
        """Return a consistent copy of the cluster's metadata, to be kept as a file for ``kera cluster restore``."""
        return (await self._cluster.ask(api.READ_METADATA, coordinator_pb2.ReadMetadataRequest())).copy

    async def recoveries(self) -> list[RecoveryDescription]:
        """Return current and recent recoveries of lost brokers, the last one first."""
        answer = await self._cluster.ask(api.LIST_RECOVERIES, coordinator_pb2.ListRecoveriesRequest())
        return [RecoveryDescription.from_message(recovery) for recovery in answer.recoveries]

    async def consumer_groups(self) -> list[ConsumerGroupSummary]:
        """Return the consumer groups whose consumers share streams (`Client.group_consumer`), by name."""
        return await list_consumer_groups(self._cluster)

    async def describe_consumer_group(self, name: str) -> ConsumerGroupDescription:
        """Return consumers, cursors and lag of a consumer group. Raises `InvalidArgument` if it does not exist."""
        return await describe_consumer_group(self._cluster, name)

    async def reset_consumer_group(
        self, name: str, stream: str, to: ResetTo, *, force: bool = False, streamlets: Sequence[int] | None = None
    ) -> None:
        """Set the cursors of a consumer group in a stream, back or forward: its consumers go on from there.

        `to` is ``"earliest"``, ``"latest"``, a time, `ToOffset` or `ShiftBy` (the start of the chunk that has the first
        such record), positions per streamlet and entry, or a plan from `plan_reset`. `streamlets` are the ones to reset
        (None: all). Raises `InvalidArgument` while consumers are active, unless `force`: then they lose the groups that
        they hold of the stream. A consumer group with a new name begins there.
        """
        await reset_consumer_group(self._cluster, name, stream, to, force=force, streamlets=streamlets)

    async def plan_reset(
        self, name: str, stream: str, to: ResetTo, *, streamlets: Sequence[int] | None = None
    ) -> ResetPlan:
        """Plan a `reset_consumer_group`, entry by entry: old and new cursors, records read again and skipped.

        It changes nothing; `reset_consumer_group` takes the plan as its `to`. Raises `UnknownStream`,
        `StreamletOutOfRange`, and `InvalidArgument` for a place that does not exist, or for `ShiftBy` in an entry in
        which the consumer group has no cursor.
        """
        return await plan_reset(self._cluster, name, stream, to, streamlets)

    async def delete_consumer_group(self, name: str, *, idle_ms: int = 0) -> None:
        """Delete a consumer group and its cursors. Raises `InvalidArgument` if it is active or does not exist.

        `idle_ms`: delete it only if it has not been used for so long and no stream's retention waits for it; otherwise
        raise `InvalidArgument`, too.
        """
        await delete_consumer_group(self._cluster, name, idle_ms=idle_ms)

    async def describe_cluster(self) -> ClusterDescription:
        """Return the cluster's id, its brokers and its backups."""
        return await self._cluster.describe()


async def _by_entry(cluster: Cluster, name: str, positions: Positions) -> dict[EntryId, Position]:
    check_place("positions", positions, ())
    stream = await cluster.stream(name)
    return {
        stream.entry_id(streamlet_id, entry): Position(*position)
        for streamlet_id, entries in positions.items()
        for entry, position in enumerate(entries)
    }


def _limit(name: str, value: int) -> int:
    """Check a limit here, because -1, which means no limit in other systems, does not fit into the message."""
    return arguments.whole(name, value, 0, (1 << 63) - 1, what=" (0: no such rule)")


def _count(name: str, value: int) -> int:
    """Check that a count is in the range of the message; the coordinator knows the real limits."""
    return arguments.whole(name, value, 0, arguments.UINT32_MAX)


def _member_id(noun: str, value: int) -> int:
    """Check the id of a broker or a backup. In the message, 0 means the other kind, so it must not be sent."""
    member_id = _count(f"{noun}_id", value)
    if not member_id:
        raise InvalidArgument(f"there is no {noun} 0", **{f"{noun}_id": 0})
    return member_id


def _schema(name: str, value: pa.Schema) -> bytes:
    return schema_to_bytes(arguments.instance(name, value, pa.Schema, "a pyarrow.Schema"))


def _enum(kind: object, prefix: str, name: str) -> int:
    names: list[str] = [full.removeprefix(prefix).lower() for full in kind.keys()]  # type: ignore[attr-defined]  # noqa: SIM118
    if name not in names or name == "unspecified":
        choices = ", ".join(choice for choice in names if choice != "unspecified")
        raise InvalidArgument(f"{prefix.rstrip('_').lower()} {name!r} is not one of {choices}")
    return int(kind.Value(prefix + name.upper()))  # type: ignore[attr-defined]


_ON_THE_WIRE: dict[str, Callable[[str, Any], Any]] = {
    "durability": lambda _, name: durability_value(name),
    "retention_ms": _limit,
    "retention_bytes": _limit,
    "retention_consumed": arguments.flag,
    "virtual_logs": _count,
    "memory_priority": _count,
    "replication_priority": _count,
    "memory_domain": lambda field, name: arguments.text(field, name, "the name of a memory domain"),
    "epoch_ms": _limit,
    "punctuation": lambda _, name: punctuation_value(name),
    "epoch_grace_ms": _limit,
    "timestamp_ahead_max_ms": _limit,
    "brokers": _count,
    "add_columns": _schema,
}
"""Conversions of the settings with fields of the same name in an `AlterStreamRequest`. Raise `InvalidArgument`."""
