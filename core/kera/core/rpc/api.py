"""The tables of methods that ``proto/kera/v1`` declares, with the numbers that frames use."""

from __future__ import annotations

from kera.core.rpc.method import Method
from kera.v1 import access_pb2 as access
from kera.v1 import backup_pb2 as backup
from kera.v1 import broker_pb2 as broker
from kera.v1 import consumer_group_pb2 as consumer_group
from kera.v1 import coordinator_pb2 as coordinator
from kera.v1 import daemon_pb2 as daemon
from kera.v1 import latency_pb2 as latency
from kera.v1 import schema_pb2 as schema

ACCESS = "kera.v1.Access"
AUTHENTICATION = "kera.v1.Authentication"
BACKUP = "kera.v1.Backup"
BROKER = "kera.v1.Broker"
CONSUMER_GROUPS = "kera.v1.ConsumerGroups"
COORDINATOR = "kera.v1.Coordinator"
DAEMON = "kera.v1.Daemon"
LATENCY = "kera.v1.Latency"
SCHEMA_REGISTRY = "kera.v1.SchemaRegistry"

MULTI_WRITE_CHUNKS = Method(
    BROKER, "MultiWriteChunks", 1, broker.MultiWriteChunksRequest, broker.MultiWriteChunksResponse, bulk=True
)
MULTI_READ_CHUNKS = Method(
    BROKER, "MultiReadChunks", 2, broker.MultiReadChunksRequest, broker.MultiReadChunksResponse, bulk=True
)
GET_NEXT_GROUPS = Method(BROKER, "GetNextGroups", 3, broker.GetNextGroupsRequest, broker.GetNextGroupsResponse)
GET_NEXT_SEGMENTS = Method(BROKER, "GetNextSegments", 4, broker.GetNextSegmentsRequest, broker.GetNextSegmentsResponse)
GET_AVAILABLE_GROUPS = Method(
    BROKER, "GetAvailableGroups", 5, broker.GetAvailableGroupsRequest, broker.GetAvailableGroupsResponse
)
GET_AVAILABLE_SEGMENTS = Method(
    BROKER, "GetAvailableSegments", 6, broker.GetAvailableSegmentsRequest, broker.GetAvailableSegmentsResponse
)
DESCRIBE_STREAMLETS = Method(
    BROKER, "DescribeStreamlets", 7, broker.DescribeStreamletsRequest, broker.DescribeStreamletsResponse
)
OPEN_STREAMLETS = Method(
    BROKER,
    "OpenStreamlets",
    8,
    broker.OpenStreamletsRequest,
    broker.OpenStreamletsResponse,
    large=True,
    large_request=True,
)
DROP_STREAM = Method(BROKER, "DropStream", 9, broker.DropStreamRequest, broker.DropStreamResponse)
TRUNCATE_STREAMLETS = Method(
    BROKER, "TruncateStreamlets", 10, broker.TruncateStreamletsRequest, broker.TruncateStreamletsResponse
)
COMMIT_CURSORS = Method(BROKER, "CommitCursors", 11, broker.CommitCursorsRequest, broker.CommitCursorsResponse)
MEASURE_LAG = Method(BROKER, "MeasureLag", 12, broker.MeasureLagRequest, broker.MeasureLagResponse)
SEAL_STREAMLETS = Method(
    BROKER,
    "SealStreamlets",
    13,
    broker.SealStreamletsRequest,
    broker.SealStreamletsResponse,
    large=True,
    large_request=True,
)
TAKE_OVER = Method(
    BROKER, "TakeOver", 14, broker.TakeOverRequest, broker.TakeOverResponse, large=True, large_request=True
)
LIST_GROUPS = Method(BROKER, "ListGroups", 15, broker.ListGroupsRequest, broker.ListGroupsResponse)
LOCATE_CHUNKS = Method(BROKER, "LocateChunks", 16, broker.LocateChunksRequest, broker.LocateChunksResponse)
LIST_SEGMENTS = Method(BROKER, "ListSegments", 17, broker.ListSegmentsRequest, broker.ListSegmentsResponse)
PUNCTUATE = Method(BROKER, "Punctuate", 18, broker.PunctuateRequest, broker.PunctuateResponse)

BROKER_METHODS = (
    MULTI_WRITE_CHUNKS,
    MULTI_READ_CHUNKS,
    GET_NEXT_GROUPS,
    GET_NEXT_SEGMENTS,
    GET_AVAILABLE_GROUPS,
    GET_AVAILABLE_SEGMENTS,
    DESCRIBE_STREAMLETS,
    OPEN_STREAMLETS,
    DROP_STREAM,
    TRUNCATE_STREAMLETS,
    COMMIT_CURSORS,
    MEASURE_LAG,
    SEAL_STREAMLETS,
    TAKE_OVER,
    LIST_GROUPS,
    LOCATE_CHUNKS,
    LIST_SEGMENTS,
    PUNCTUATE,
)

CREATE_STREAM = Method(
    COORDINATOR, "CreateStream", 101, coordinator.CreateStreamRequest, coordinator.CreateStreamResponse
)
GET_STREAM_ID = Method(COORDINATOR, "GetStreamId", 102, coordinator.GetStreamIdRequest, coordinator.GetStreamIdResponse)
DESCRIBE_STREAM = Method(
    COORDINATOR, "DescribeStream", 103, coordinator.DescribeStreamRequest, coordinator.DescribeStreamResponse
)
LIST_STREAMS = Method(
    COORDINATOR, "ListStreams", 104, coordinator.ListStreamsRequest, coordinator.ListStreamsResponse, large=True
)
DELETE_STREAM = Method(
    COORDINATOR, "DeleteStream", 105, coordinator.DeleteStreamRequest, coordinator.DeleteStreamResponse
)
DESCRIBE_CLUSTER = Method(
    COORDINATOR,
    "DescribeCluster",
    106,
    coordinator.DescribeClusterRequest,
    coordinator.DescribeClusterResponse,
)
INIT_PRODUCER = Method(
    COORDINATOR, "InitProducer", 107, coordinator.InitProducerRequest, coordinator.InitProducerResponse
)
REGISTER_BROKER = Method(
    COORDINATOR,
    "RegisterBroker",
    108,
    coordinator.RegisterBrokerRequest,
    coordinator.RegisterBrokerResponse,
    large=True,
    large_request=True,
)
HEARTBEAT = Method(
    COORDINATOR,
    "Heartbeat",
    109,
    coordinator.HeartbeatRequest,
    coordinator.HeartbeatResponse,
    request_bytes_max=2 << 20,
)
ALTER_STREAM = Method(
    COORDINATOR,
    "AlterStream",
    110,
    coordinator.AlterStreamRequest,
    coordinator.AlterStreamResponse,
    request_bytes_max=1 << 17,
)
REGISTER_BACKUP = Method(
    COORDINATOR, "RegisterBackup", 111, coordinator.RegisterBackupRequest, coordinator.RegisterBackupResponse
)
BACKUP_HEARTBEAT = Method(
    COORDINATOR, "BackupHeartbeat", 112, coordinator.BackupHeartbeatRequest, coordinator.BackupHeartbeatResponse
)
REPORT_BROKER = Method(
    COORDINATOR, "ReportBroker", 113, coordinator.ReportBrokerRequest, coordinator.ReportBrokerResponse
)
MOVE_STREAMLET = Method(
    COORDINATOR, "MoveStreamlet", 114, coordinator.MoveStreamletRequest, coordinator.MoveStreamletResponse
)
REBALANCE = Method(COORDINATOR, "Rebalance", 115, coordinator.RebalanceRequest, coordinator.RebalanceResponse)
DRAIN = Method(COORDINATOR, "Drain", 116, coordinator.DrainRequest, coordinator.DrainResponse)
LIST_RECOVERIES = Method(
    COORDINATOR, "ListRecoveries", 117, coordinator.ListRecoveriesRequest, coordinator.ListRecoveriesResponse
)
PREPARE_RESTART = Method(
    COORDINATOR, "PrepareRestart", 118, coordinator.PrepareRestartRequest, coordinator.PrepareRestartResponse
)
FORGET_MEMBER = Method(
    COORDINATOR, "ForgetMember", 119, coordinator.ForgetMemberRequest, coordinator.ForgetMemberResponse
)
ADOPT_STREAM = Method(COORDINATOR, "AdoptStream", 120, coordinator.AdoptStreamRequest, coordinator.AdoptStreamResponse)
READ_METADATA = Method(
    COORDINATOR, "ReadMetadata", 121, coordinator.ReadMetadataRequest, coordinator.ReadMetadataResponse, large=True
)
FIND_PRODUCERS = Method(
    COORDINATOR,
    "FindProducers",
    122,
    coordinator.FindProducersRequest,
    coordinator.FindProducersResponse,
    request_bytes_max=1 << 20,
)

COORDINATOR_METHODS = (
    CREATE_STREAM,
    GET_STREAM_ID,
    DESCRIBE_STREAM,
    LIST_STREAMS,
    DELETE_STREAM,
    DESCRIBE_CLUSTER,
    INIT_PRODUCER,
    REGISTER_BROKER,
    HEARTBEAT,
    ALTER_STREAM,
    REGISTER_BACKUP,
    BACKUP_HEARTBEAT,
    REPORT_BROKER,
    MOVE_STREAMLET,
    REBALANCE,
    DRAIN,
    LIST_RECOVERIES,
    PREPARE_RESTART,
    FORGET_MEMBER,
    ADOPT_STREAM,
    READ_METADATA,
    FIND_PRODUCERS,
)

REPLICATE = Method(BACKUP, "Replicate", 201, backup.ReplicateRequest, backup.ReplicateResponse, bulk=True)
READ_REPLICA = Method(BACKUP, "ReadReplica", 202, backup.ReadReplicaRequest, backup.ReadReplicaResponse, bulk=True)
LIST_REPLICAS = Method(BACKUP, "ListReplicas", 203, backup.ListReplicasRequest, backup.ListReplicasResponse)
FREE_REPLICAS = Method(BACKUP, "FreeReplicas", 204, backup.FreeReplicasRequest, backup.FreeReplicasResponse)
FENCE_BROKER = Method(BACKUP, "FenceBroker", 205, backup.FenceBrokerRequest, backup.FenceBrokerResponse)

BACKUP_METHODS = (REPLICATE, READ_REPLICA, LIST_REPLICAS, FREE_REPLICAS, FENCE_BROKER)

CONSUME_ROUND = Method(
    CONSUMER_GROUPS,
    "ConsumeRound",
    301,
    consumer_group.ConsumeRoundRequest,
    consumer_group.ConsumeRoundResponse,
    large=True,
    request_bytes_max=1 << 20,
)
KEEP_ALIVE = Method(
    CONSUMER_GROUPS, "KeepAlive", 302, consumer_group.KeepAliveRequest, consumer_group.KeepAliveResponse
)
LEAVE = Method(CONSUMER_GROUPS, "Leave", 303, consumer_group.LeaveRequest, consumer_group.LeaveResponse)
FETCH_CONSUMER_GROUP = Method(
    CONSUMER_GROUPS,
    "FetchConsumerGroup",
    304,
    consumer_group.FetchConsumerGroupRequest,
    consumer_group.FetchConsumerGroupResponse,
    large=True,
)
LIST_CONSUMER_GROUPS = Method(
    CONSUMER_GROUPS,
    "ListConsumerGroups",
    305,
    consumer_group.ListConsumerGroupsRequest,
    consumer_group.ListConsumerGroupsResponse,
    large=True,
)
DESCRIBE_CONSUMER_GROUP = Method(
    CONSUMER_GROUPS,
    "DescribeConsumerGroup",
    306,
    consumer_group.DescribeConsumerGroupRequest,
    consumer_group.DescribeConsumerGroupResponse,
    large=True,
)
RESET_CONSUMER_GROUP = Method(
    CONSUMER_GROUPS,
    "ResetConsumerGroup",
    307,
    consumer_group.ResetConsumerGroupRequest,
    consumer_group.ResetConsumerGroupResponse,
    large=True,
    request_bytes_max=1 << 20,
)
DELETE_CONSUMER_GROUP = Method(
    CONSUMER_GROUPS,
    "DeleteConsumerGroup",
    308,
    consumer_group.DeleteConsumerGroupRequest,
    consumer_group.DeleteConsumerGroupResponse,
)

CONSUMER_GROUPS_METHODS = (
    CONSUME_ROUND,
    KEEP_ALIVE,
    LEAVE,
    FETCH_CONSUMER_GROUP,
    LIST_CONSUMER_GROUPS,
    DESCRIBE_CONSUMER_GROUP,
    RESET_CONSUMER_GROUP,
    DELETE_CONSUMER_GROUP,
)

DESCRIBE_DAEMON = Method(DAEMON, "DescribeDaemon", 401, daemon.DescribeDaemonRequest, daemon.DescribeDaemonResponse)
READ_FIGURES = Method(DAEMON, "ReadFigures", 402, daemon.ReadFiguresRequest, daemon.ReadFiguresResponse, large=True)

DAEMON_METHODS = (DESCRIBE_DAEMON, READ_FIGURES)

AUTHENTICATE = Method(
    AUTHENTICATION,
    "Authenticate",
    501,
    access.AuthenticateRequest,
    access.AuthenticateResponse,
    request_bytes_max=1 << 16,
)
APPLY_ACCESS = Method(
    AUTHENTICATION, "ApplyAccess", 502, access.ApplyAccessRequest, access.ApplyAccessResponse, large_request=True
)

AUTHENTICATION_METHODS = (AUTHENTICATE, APPLY_ACCESS)

PUT_USER = Method(ACCESS, "PutUser", 601, access.PutUserRequest, access.PutUserResponse, request_bytes_max=1 << 16)
DELETE_USER = Method(ACCESS, "DeleteUser", 602, access.DeleteUserRequest, access.DeleteUserResponse)
LIST_USERS = Method(ACCESS, "ListUsers", 603, access.ListUsersRequest, access.ListUsersResponse, large=True)
GRANT_RIGHT = Method(ACCESS, "GrantRight", 604, access.GrantRightRequest, access.GrantRightResponse)
REVOKE_RIGHTS = Method(ACCESS, "RevokeRights", 605, access.RevokeRightsRequest, access.RevokeRightsResponse, large=True)
LIST_RIGHTS = Method(ACCESS, "ListRights", 606, access.ListRightsRequest, access.ListRightsResponse, large=True)
CHECK_RIGHT = Method(ACCESS, "CheckRight", 607, access.CheckRightRequest, access.CheckRightResponse)
ISSUE_TOKEN = Method(ACCESS, "IssueToken", 608, access.IssueTokenRequest, access.IssueTokenResponse)
RENEW_TOKEN = Method(ACCESS, "RenewToken", 609, access.RenewTokenRequest, access.RenewTokenResponse)
REVOKE_TOKEN = Method(ACCESS, "RevokeToken", 610, access.RevokeTokenRequest, access.RevokeTokenResponse)
LIST_TOKENS = Method(ACCESS, "ListTokens", 611, access.ListTokensRequest, access.ListTokensResponse, large=True)

ACCESS_METHODS = (
    PUT_USER,
    DELETE_USER,
    LIST_USERS,
    GRANT_RIGHT,
    REVOKE_RIGHTS,
    LIST_RIGHTS,
    CHECK_RIGHT,
    ISSUE_TOKEN,
    RENEW_TOKEN,
    REVOKE_TOKEN,
    LIST_TOKENS,
)

REGISTER_SCHEMA = Method(
    SCHEMA_REGISTRY, "RegisterSchema", 701, schema.RegisterSchemaRequest, schema.RegisterSchemaResponse
)
CHECK_SCHEMA = Method(SCHEMA_REGISTRY, "CheckSchema", 702, schema.CheckSchemaRequest, schema.CheckSchemaResponse)
GET_SCHEMA = Method(SCHEMA_REGISTRY, "GetSchema", 703, schema.GetSchemaRequest, schema.GetSchemaResponse)
LIST_SUBJECTS = Method(
    SCHEMA_REGISTRY, "ListSubjects", 704, schema.ListSubjectsRequest, schema.ListSubjectsResponse, large=True
)
LIST_SCHEMA_VERSIONS = Method(
    SCHEMA_REGISTRY, "ListSchemaVersions", 705, schema.ListSchemaVersionsRequest, schema.ListSchemaVersionsResponse
)
GET_COMPATIBILITY = Method(
    SCHEMA_REGISTRY, "GetCompatibility", 706, schema.GetCompatibilityRequest, schema.GetCompatibilityResponse
)
SET_COMPATIBILITY = Method(
    SCHEMA_REGISTRY, "SetCompatibility", 707, schema.SetCompatibilityRequest, schema.SetCompatibilityResponse
)
DELETE_SCHEMA = Method(SCHEMA_REGISTRY, "DeleteSchema", 708, schema.DeleteSchemaRequest, schema.DeleteSchemaResponse)

SCHEMA_REGISTRY_METHODS = (
    REGISTER_SCHEMA,
    CHECK_SCHEMA,
    GET_SCHEMA,
    LIST_SUBJECTS,
    LIST_SCHEMA_VERSIONS,
    GET_COMPATIBILITY,
    SET_COMPATIBILITY,
    DELETE_SCHEMA,
)

CREATE_LATENCY_CONSTRAINT = Method(
    LATENCY,
    "CreateLatencyConstraint",
    801,
    latency.CreateLatencyConstraintRequest,
    latency.CreateLatencyConstraintResponse,
    request_bytes_max=1 << 16,
)
ALTER_LATENCY_CONSTRAINT = Method(
    LATENCY,
    "AlterLatencyConstraint",
    802,
    latency.AlterLatencyConstraintRequest,
    latency.AlterLatencyConstraintResponse,
    request_bytes_max=1 << 16,
)
LIST_LATENCY_CONSTRAINTS = Method(
    LATENCY,
    "ListLatencyConstraints",
    803,
    latency.ListLatencyConstraintsRequest,
    latency.ListLatencyConstraintsResponse,
    large=True,
)
DELETE_LATENCY_CONSTRAINT = Method(
    LATENCY,
    "DeleteLatencyConstraint",
    804,
    latency.DeleteLatencyConstraintRequest,
    latency.DeleteLatencyConstraintResponse,
)
DESCRIBE_LATENCY_CONSTRAINT = Method(
    LATENCY,
    "DescribeLatencyConstraint",
    805,
    latency.DescribeLatencyConstraintRequest,
    latency.DescribeLatencyConstraintResponse,
)

LATENCY_METHODS = (
    CREATE_LATENCY_CONSTRAINT,
    ALTER_LATENCY_CONSTRAINT,
    LIST_LATENCY_CONSTRAINTS,
    DELETE_LATENCY_CONSTRAINT,
    DESCRIBE_LATENCY_CONSTRAINT,
)
