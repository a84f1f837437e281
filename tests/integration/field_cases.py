"""For each method a valid request, and a like request about somebody else: `field_mutants` starts from these.

The requests are about a stream, a producer and a consumer group of the sender's own. Requests that are *meant* to
affect somebody else, such as deleting a stream by its name, are not sent: that is a matter of rights, not of fields.
`Case.rights` names these fields, with all that is within them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kera.core.rpc import Method, api
from kera.v1 import backup_pb2 as backup
from kera.v1 import broker_pb2 as broker
from kera.v1 import common_pb2 as common
from kera.v1 import consumer_group_pb2 as consumer_group
from kera.v1 import coordinator_pb2 as coordinator
from kera.v1 import latency_pb2 as latency
from kera.v1 import schema_pb2 as schema

STRANGER_ID = 900_001
"""The id of a broker or backup that does not exist."""
WAIT_MS = 1
RETENTION_MS = 3_600_000


@dataclass(frozen=True)
class Theirs:
    """The things that a request can be about: the sender's, or somebody else's."""

    stream: common.StreamInfo
    consumer_group: str
    member: str
    producer: str
    cursors: tuple[common.Cursor, ...]
    """A place within the stream for each of two streamlets."""
    broker: common.BrokerInfo
    """The owner of its first streamlet."""
    coordinator_epoch: int

    @property
    def at(self) -> common.Cursor:
        return self.cursors[0]


Build = Callable[[Theirs], Message]


@dataclass(frozen=True)
class Case:
    """See the head of this module."""

    build: Build
    rights: tuple[str, ...] = ()
    """The paths of fields that say whom the request is about."""
    internal: bool = False
    """Only daemons send it."""


def _constraint(theirs: Theirs) -> latency.LatencyConstraint:
    return latency.LatencyConstraint(
        name=theirs.stream.name,
        path=[theirs.stream.name],
        limit_us=1_000_000,
        window_ms=1_000,
        statistic=latency.LATENCY_STATISTIC_MEAN,
    )


def _schema() -> schema.SchemaDefinition:
    return schema.SchemaDefinition(type=schema.SCHEMA_TYPE_AVRO, definition='"string"')


def _group_step(theirs: Theirs) -> consumer_group.GroupStep:
    return consumer_group.GroupStep(
        next=theirs.at,
        lease=7,
        finished=False,
        next_record=3,
        told=[consumer_group.RecordRange(first_record=1, end_record=2)],
        part=1,
        split=theirs.at,
        split_record=3,
    )


def _round(theirs: Theirs) -> Message:
    at = theirs.at
    return consumer_group.ConsumeRoundRequest(
        consumer_group=theirs.consumer_group,
        member_id=theirs.member,
        client="fields",
        session_timeout_ms=30_000,
        progress_timeout_ms=300_000,
        busy_ms=5,
        bytes_consumed=100,
        groups_max=2,
        stream_ids=[theirs.stream.stream_id],
        steps=[_group_step(theirs)],
        starts=[_start(theirs)],
        seen=[
            consumer_group.SeenGroups(
                stream_id=at.stream_id,
                streamlet_id=at.streamlet_id,
                after_group_id=0,
                through_group_id=at.group_id,
                groups=[consumer_group.SeenGroup(start=at, first_record=0, end_record=5)],
            )
        ],
        wait_ms=WAIT_MS,
        ended=[_group_step(theirs)],
        splits=True,
        in_order=True,
    )


def _start(theirs: Theirs) -> consumer_group.StreamletStart:
    return consumer_group.StreamletStart(
        stream_id=theirs.at.stream_id,
        streamlet_id=theirs.at.streamlet_id,
        cursors=[theirs.at],
        records=[consumer_group.StartRecord(record=3)],
    )


def _query(theirs: Theirs) -> broker.ChunkQuery:
    return broker.ChunkQuery(start=theirs.at, end=theirs.at, records_max=10)


def _streamlet(theirs: Theirs) -> dict[str, int]:
    return {"stream_id": theirs.at.stream_id, "streamlet_id": theirs.at.streamlet_id}


def _stranger(_: Theirs) -> common.BrokerInfo:
    return common.BrokerInfo(
        broker_id=STRANGER_ID,
        broker_epoch=1,
        node_id="elsewhere/1",
        grpc_address="127.0.0.1:1",
        frames_address="127.0.0.1:1",
        segment_bytes=1 << 16,
        arena_bytes=1 << 24,
    )


def _taken_over(theirs: Theirs) -> Message:
    return broker.TakeOverRequest(
        coordinator_epoch=theirs.coordinator_epoch,
        source=common.RecoverySource(broker_id=theirs.broker.broker_id, before_epoch=2),
        streams=[
            broker.TakeOverStream(
                stream=theirs.stream,
                streamlet_ids=[theirs.at.streamlet_id],
                starts=[common.EntryStart(start=theirs.at, first_record=3)],
                cursors=[theirs.at],
                handed_over=[_state(theirs)],
            )
        ],
    )


def _state(theirs: Theirs) -> common.StreamletState:
    return common.StreamletState(
        streamlet_id=theirs.at.streamlet_id,
        next_group_id=theirs.at.group_id + 1,
        next_records=[10],
        producers=[common.ProducerState(producer_id=5, producer_epoch=1, next_sequence=3)],
    )


CASES: dict[Method[Any, Any], Case] = {
    api.MULTI_WRITE_CHUNKS: Case(lambda _: broker.MultiWriteChunksRequest(chunk_count=1)),
    api.MULTI_READ_CHUNKS: Case(
        lambda t: broker.MultiReadChunksRequest(
            ranges=[
                broker.ReadRange(start=cursor, end=cursor, handle=number + 1) for number, cursor in enumerate(t.cursors)
            ],
            bytes_max=1 << 16,
            wait_ms=WAIT_MS,
            consumer_group=t.consumer_group,
            session_id=5,
            step=0,
            removed=[9],
        )
    ),
    api.GET_NEXT_GROUPS: Case(
        lambda t: broker.GetNextGroupsRequest(**_streamlet(t), consumer_group=t.consumer_group, groups_max=2),
        rights=("consumer_group",),
    ),
    api.GET_NEXT_SEGMENTS: Case(lambda t: broker.GetNextSegmentsRequest(**_streamlet(t), group_id=t.at.group_id)),
    api.GET_AVAILABLE_GROUPS: Case(lambda t: broker.GetAvailableGroupsRequest(**_streamlet(t))),
    api.GET_AVAILABLE_SEGMENTS: Case(
        lambda t: broker.GetAvailableSegmentsRequest(**_streamlet(t), group_id=t.at.group_id)
    ),
    api.DESCRIBE_STREAMLETS: Case(
        lambda t: broker.DescribeStreamletsRequest(stream_id=t.stream.stream_id, streamlet_ids=[0, 1])
    ),
    api.TRUNCATE_STREAMLETS: Case(
        lambda t: broker.TruncateStreamletsRequest(cursors=list(t.cursors)), rights=("cursors",)
    ),
    api.COMMIT_CURSORS: Case(
        lambda t: broker.CommitCursorsRequest(consumer_group=t.consumer_group, cursors=list(t.cursors)),
        rights=("consumer_group",),
    ),
    api.MEASURE_LAG: Case(lambda t: broker.MeasureLagRequest(cursors=list(t.cursors))),
    api.LIST_GROUPS: Case(lambda t: broker.ListGroupsRequest(**_streamlet(t), groups_max=3)),
    api.LOCATE_CHUNKS: Case(lambda t: broker.LocateChunksRequest(queries=[_query(t), _query(t)])),
    api.LIST_SEGMENTS: Case(lambda t: broker.ListSegmentsRequest(start=t.at, end=t.at, segments_max=3)),
    api.PUNCTUATE: Case(
        lambda t: broker.PunctuateRequest(stream_id=t.stream.stream_id, streamlet_ids=[0, 1], timestamp_us=5),
        rights=("stream_id",),
    ),
    api.SEAL_STREAMLETS: Case(
        lambda t: broker.SealStreamletsRequest(
            coordinator_epoch=t.coordinator_epoch,
            stream_id=t.stream.stream_id,
            streamlet_ids=[t.at.streamlet_id],
            wait_ms=WAIT_MS,
            assignments_version=t.stream.assignments_version,
        ),
        rights=("stream_id",),
        internal=True,
    ),
    api.TAKE_OVER: Case(_taken_over, rights=("streams",), internal=True),
    api.OPEN_STREAMLETS: Case(
        lambda t: broker.OpenStreamletsRequest(
            stream=t.stream, coordinator_epoch=t.coordinator_epoch, handed_over=[_state(t)]
        ),
        rights=("stream",),
        internal=True,
    ),
    api.DROP_STREAM: Case(
        lambda t: broker.DropStreamRequest(stream_id=1 << 40, coordinator_epoch=t.coordinator_epoch),
        rights=("stream_id",),
        internal=True,
    ),
    # -- the coordinator
    api.CREATE_STREAM: Case(
        lambda t: coordinator.CreateStreamRequest(
            name=t.stream.name, config=t.stream.config, schema=t.stream.schemas[0], creation_id=t.member
        ),
    ),
    api.GET_STREAM_ID: Case(lambda t: coordinator.GetStreamIdRequest(name=t.stream.name)),
    api.DESCRIBE_STREAM: Case(lambda t: coordinator.DescribeStreamRequest(name=t.stream.name)),
    api.LIST_STREAMS: Case(lambda _: coordinator.ListStreamsRequest(after="a")),
    api.ALTER_STREAM: Case(
        lambda t: coordinator.AlterStreamRequest(
            name=t.stream.name,
            retention_ms=RETENTION_MS,
            retention_bytes=1 << 40,
            retention_consumer_groups=coordinator.ConsumerGroupNames(names=[t.consumer_group]),
            virtual_logs=1,
            memory_priority=1,
            replication_priority=2,
        ),
        rights=("name",),
    ),
    api.DELETE_STREAM: Case(lambda t: coordinator.DeleteStreamRequest(name=f"no-{t.stream.name}"), rights=("name",)),
    api.DESCRIBE_CLUSTER: Case(lambda _: coordinator.DescribeClusterRequest()),
    api.INIT_PRODUCER: Case(lambda t: coordinator.InitProducerRequest(name=t.producer), rights=("name",)),
    api.REPORT_BROKER: Case(
        lambda t: coordinator.ReportBrokerRequest(
            broker_id=t.broker.broker_id, broker_epoch=t.broker.broker_epoch, reason="it does not answer"
        )
    ),
    api.MOVE_STREAMLET: Case(
        lambda t: coordinator.MoveStreamletRequest(
            stream=t.stream.name, streamlet_id=t.at.streamlet_id, broker_id=t.broker.broker_id
        ),
        rights=("stream",),
    ),
    api.REBALANCE: Case(lambda _: coordinator.RebalanceRequest(dry_run=True)),
    api.DRAIN: Case(lambda _: coordinator.DrainRequest(broker_id=STRANGER_ID, ask=True), rights=("broker_id",)),
    api.LIST_RECOVERIES: Case(lambda _: coordinator.ListRecoveriesRequest()),
    api.ADOPT_STREAM: Case(
        lambda t: coordinator.AdoptStreamRequest(stream=f"no-{t.stream.name}", name=f"anew-{t.stream.name}"),
        rights=("stream",),
    ),
    api.READ_METADATA: Case(lambda _: coordinator.ReadMetadataRequest()),
    api.FIND_PRODUCERS: Case(
        lambda t: coordinator.FindProducersRequest(
            uses=[coordinator.ProducerUse(producer_id=1, stream_id=t.stream.stream_id, principal="user:alice")]
        ),
        rights=("uses",),
        internal=True,
    ),
    api.PREPARE_RESTART: Case(
        lambda _: coordinator.PrepareRestartRequest(broker_id=STRANGER_ID, epoch=1, wait_ms=WAIT_MS),
        rights=("broker_id", "backup_id"),
        internal=True,
    ),
    api.FORGET_MEMBER: Case(
        lambda _: coordinator.ForgetMemberRequest(broker_id=STRANGER_ID), rights=("broker_id", "backup_id")
    ),
    api.REGISTER_BROKER: Case(
        lambda t: coordinator.RegisterBrokerRequest(
            broker=_stranger(t),
            launch_id="launch",
            lost_memory=False,
            known_coordinator_epoch=1,
            held_streams=[coordinator.HeldStream(stream_id=t.stream.stream_id, assignments_version=1)],
        ),
        rights=("broker",),
        internal=True,
    ),
    api.HEARTBEAT: Case(
        lambda t: coordinator.HeartbeatRequest(
            broker_id=STRANGER_ID,
            broker_epoch=1,
            loads=[coordinator.StreamletLoad(**_streamlet(t), bytes_per_s=5, records_per_s=1, read_bytes_per_s=2)],
            bytes_per_s=5,
            starts=[common.EntryStart(start=t.at, first_record=1)],
            recoveries=[
                coordinator.RecoveryProgress(
                    source=common.RecoverySource(broker_id=STRANGER_ID, before_epoch=2),
                    readable=[common.StreamletRef(**_streamlet(t))],
                )
            ],
            empty_intervals=[coordinator.EmptyInterval(**_streamlet(t), first_group_id=1, end_group_id=2)],
            unneeded_backup_ids=[STRANGER_ID],
            fences_version=1,
            loop_busy_permille=500,
            unknown_streams=[coordinator.UnknownStream(stream=t.stream, bytes=5, records=1, broker_ids=[1])],
            held_streams=[
                coordinator.HeldStream(stream_id=t.stream.stream_id, assignments_version=1, config_version=1)
            ],
            held_streams_told=True,
        ),
        rights=("broker_id",),
        internal=True,
    ),
    api.REGISTER_BACKUP: Case(
        lambda _: coordinator.RegisterBackupRequest(
            backup=common.BackupInfo(backup_id=STRANGER_ID, backup_epoch=1, grpc_address="127.0.0.1:1"),
            launch_id="launch",
        ),
        rights=("backup",),
        internal=True,
    ),
    api.BACKUP_HEARTBEAT: Case(
        lambda _: coordinator.BackupHeartbeatRequest(backup_id=STRANGER_ID, backup_epoch=1, free_memory_bytes=1),
        rights=("backup_id",),
        internal=True,
    ),
    # -- consumer groups
    api.CONSUME_ROUND: Case(_round, rights=("consumer_group", "member_id")),
    api.KEEP_ALIVE: Case(
        lambda t: consumer_group.KeepAliveRequest(consumer_group=t.consumer_group, member_id=t.member, busy_ms=1),
        rights=("consumer_group", "member_id"),
    ),
    api.LEAVE: Case(
        lambda t: consumer_group.LeaveRequest(
            consumer_group=t.consumer_group, member_id="nobody", steps=[_group_step(t)]
        ),
        rights=("consumer_group", "member_id"),
    ),
    api.FETCH_CONSUMER_GROUP: Case(
        lambda t: consumer_group.FetchConsumerGroupRequest(
            consumer_group=t.consumer_group, stream_id=t.stream.stream_id
        )
    ),
    api.LIST_CONSUMER_GROUPS: Case(lambda _: consumer_group.ListConsumerGroupsRequest()),
    api.DESCRIBE_CONSUMER_GROUP: Case(
        lambda t: consumer_group.DescribeConsumerGroupRequest(consumer_group=t.consumer_group)
    ),
    api.RESET_CONSUMER_GROUP: Case(
        lambda t: consumer_group.ResetConsumerGroupRequest(
            consumer_group=t.consumer_group, starts=[_start(t)], forward_only=True, unnamed=True
        ),
        rights=("consumer_group",),
    ),
    api.DELETE_CONSUMER_GROUP: Case(
        lambda t: consumer_group.DeleteConsumerGroupRequest(consumer_group=f"no-{t.consumer_group}", idle_ms=7),
        rights=("consumer_group",),
    ),
    # -- schemas
    api.REGISTER_SCHEMA: Case(
        lambda t: schema.RegisterSchemaRequest(subject=f"{t.stream.name}-value", schema=_schema()), rights=("subject",)
    ),
    api.CHECK_SCHEMA: Case(
        lambda t: schema.CheckSchemaRequest(subject=f"{t.stream.name}-value", schema=_schema()), rights=("subject",)
    ),
    api.GET_SCHEMA: Case(lambda t: schema.GetSchemaRequest(subject=f"{t.stream.name}-value", version=1)),
    api.LIST_SUBJECTS: Case(lambda t: schema.ListSubjectsRequest(prefix=t.stream.name, after="a")),
    api.LIST_SCHEMA_VERSIONS: Case(lambda t: schema.ListSchemaVersionsRequest(subject=f"{t.stream.name}-value")),
    api.GET_COMPATIBILITY: Case(lambda t: schema.GetCompatibilityRequest(subject=f"{t.stream.name}-value")),
    api.SET_COMPATIBILITY: Case(
        lambda t: schema.SetCompatibilityRequest(
            subject=f"{t.stream.name}-value", compatibility=schema.COMPATIBILITY_FULL
        ),
        rights=("subject",),
    ),
    api.DELETE_SCHEMA: Case(
        lambda t: schema.DeleteSchemaRequest(subject=f"no-{t.stream.name}-value", version=1), rights=("subject",)
    ),
    # -- latency constraints
    api.CREATE_LATENCY_CONSTRAINT: Case(
        lambda t: latency.CreateLatencyConstraintRequest(constraint=_constraint(t)), rights=("constraint.path",)
    ),
    api.ALTER_LATENCY_CONSTRAINT: Case(
        lambda t: latency.AlterLatencyConstraintRequest(name=t.stream.name, limit_us=3_000_000, window_ms=2_000),
        rights=("name", "path"),
    ),
    api.LIST_LATENCY_CONSTRAINTS: Case(lambda _: latency.ListLatencyConstraintsRequest()),
    api.DELETE_LATENCY_CONSTRAINT: Case(
        lambda t: latency.DeleteLatencyConstraintRequest(name=f"no-{t.stream.name}"), rights=("name",)
    ),
    api.DESCRIBE_LATENCY_CONSTRAINT: Case(lambda t: latency.DescribeLatencyConstraintRequest(name=t.stream.name)),
    # -- backups
    api.REPLICATE: Case(
        lambda t: backup.ReplicateRequest(
            broker_id=STRANGER_ID, broker_epoch=1, stream_id=t.stream.stream_id, virtual_segment_id=1 << 32 | 1
        ),
        rights=("broker_id",),
        internal=True,
    ),
    api.READ_REPLICA: Case(
        lambda t: backup.ReadReplicaRequest(
            broker_id=t.broker.broker_id,
            virtual_segment_id=t.broker.broker_epoch << 32 | 1,
            bytes_max=1 << 16,
            streamlets=[backup.StreamletSet(stream_id=t.stream.stream_id, streamlet_ids=[0, 1])],
        ),
        internal=True,
    ),
    api.LIST_REPLICAS: Case(
        lambda t: backup.ListReplicasRequest(broker_id=t.broker.broker_id, replicas_max=3), internal=True
    ),
    api.FREE_REPLICAS: Case(
        lambda _: backup.FreeReplicasRequest(
            broker_id=STRANGER_ID, broker_epoch=1, virtual_segment_ids=[1, 2], before_epoch=1
        ),
        rights=("broker_id",),
        internal=True,
    ),
    api.FENCE_BROKER: Case(
        lambda _: backup.FenceBrokerRequest(broker_id=STRANGER_ID, broker_epoch=1),
        rights=("broker_id",),
        internal=True,
    ),
}
