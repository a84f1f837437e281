"""The SDK: producers, consumers and administration, async first.

Start with `Client.connect`. Everything public is here; modules below this one are the SDK's own.
"""

from kera.client.admin import Admin
from kera.client.client import Client
from kera.client.consumer import Consumer
from kera.client.producer import Producer
from kera.client.settings import ClientSettings, ConsumerSettings, ProducerSettings
from kera.client.types import (
    Assignment,
    BackupDescription,
    BrokerDescription,
    ChunkBatch,
    ClusterDescription,
    Delivery,
    EntryBounds,
    Record,
    StreamConfig,
    StreamDescription,
)
from kera.core.errors import KeraError
from kera.core.ids import EARLIEST, EntryId, Position

__all__ = [
    "EARLIEST",
    "Admin",
    "Assignment",
    "BackupDescription",
    "BrokerDescription",
    "ChunkBatch",
    "Client",
    "ClientSettings",
    "ClusterDescription",
    "Consumer",
    "ConsumerSettings",
    "Delivery",
    "EntryBounds",
    "EntryId",
    "KeraError",
    "Position",
    "Producer",
    "ProducerSettings",
    "Record",
    "StreamConfig",
    "StreamDescription",
]
