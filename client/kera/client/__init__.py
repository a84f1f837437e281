"""The SDK: producers, consumers and administration, async first.

Start with `Client.connect`. Everything public is here; modules below this one are the SDK's own.
"""

from kera.client.admin.admin import Admin
from kera.client.admin.consumer_groups import (
    ConsumerGroupDescription,
    ConsumerGroupSummary,
    ConsumerLag,
    EntryProgress,
    LeasedGroup,
    MemberDescription,
)
from kera.client.admin.control import (
    BrokerLoad,
    DrainStatus,
    MoveResult,
    Rebalancing,
    RecoveryDescription,
    StreamletMove,
)
from kera.client.admin.latency import Latency, LatencyConstraint, LatencyDescription, LatencyHop
from kera.client.admin.locating import ChunkQuery, SegmentBounds
from kera.client.admin.reset_plan import CursorChange, ResetPlan, ShiftBy, ToOffset
from kera.client.chunk_batch import ChunkBatch
from kera.client.client import Client
from kera.client.consuming.consumer import Consumer
from kera.client.consuming.group_consumer import GroupConsumer
from kera.client.consuming.groups.leases import LostGroup
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.client.epochs.epoch import Epoch
from kera.client.epochs.ordered_consumer import OrderedConsumer
from kera.client.epochs.reader import Epochs
from kera.client.epochs.sorting import OrderedBatch
from kera.client.headers import Headers
from kera.client.positions import ChunkPlace
from kera.client.producing.appender import Appender, AppendResult
from kera.client.producing.producer import Producer
from kera.client.schemas.registry import RegisteredSchema, SchemaRegistry, VersionDescription
from kera.client.serializers.columns.models import arrow_schema_of
from kera.client.settings import ClientSettings, ConsumerSettings, ProducerSettings
from kera.client.stream_config import StreamConfig
from kera.client.types import (
    Assignment,
    BackupDescription,
    BrokerDescription,
    ClusterDescription,
    Delivery,
    EntryBounds,
    Interval,
    Record,
    StreamDescription,
    UnlistedStream,
)
from kera.core.base.ids import EARLIEST, PRODUCER_IDS, EntryId, Position
from kera.core.errors import KeraError
from kera.core.schemas import Compatibility, SchemaType

__all__ = [
    "EARLIEST",
    "PRODUCER_IDS",
    "Admin",
    "AppendResult",
    "Appender",
    "Assignment",
    "BackupDescription",
    "BrokerDescription",
    "BrokerLoad",
    "ChunkBatch",
    "ChunkPlace",
    "ChunkQuery",
    "Client",
    "ClientSettings",
    "ClusterDescription",
    "Compatibility",
    "Consumer",
    "ConsumerGroupDescription",
    "ConsumerGroupSummary",
    "ConsumerLag",
    "ConsumerSettings",
    "CursorChange",
    "Delivery",
    "DrainStatus",
    "EntryBounds",
    "EntryId",
    "EntryProgress",
    "Epoch",
    "Epochs",
    "GroupConsumer",
    "GroupConsumerSettings",
    "Headers",
    "Interval",
    "KeraError",
    "Latency",
    "LatencyConstraint",
    "LatencyDescription",
    "LatencyHop",
    "LeasedGroup",
    "LostGroup",
    "MemberDescription",
    "MoveResult",
    "OrderedBatch",
    "OrderedConsumer",
    "Position",
    "Producer",
    "ProducerSettings",
    "Rebalancing",
    "Record",
    "RecoveryDescription",
    "RegisteredSchema",
    "ResetPlan",
    "SchemaRegistry",
    "SchemaType",
    "SegmentBounds",
    "ShiftBy",
    "StreamConfig",
    "StreamDescription",
    "StreamletMove",
    "ToOffset",
    "UnlistedStream",
    "VersionDescription",
    "arrow_schema_of",
]
