"""The SDK without asyncio: the same names, and calls that wait for their results.

Start with `Client`. Values (`Record`, `Delivery`, …), settings and errors come from `kera.client`.
"""

from kera.client.sync.access import Access
from kera.client.sync.admin import Admin
from kera.client.sync.client import Client
from kera.client.sync.consumer import Consumer, GroupConsumer
from kera.client.sync.epochs import Epochs, OrderedConsumer
from kera.client.sync.handover import Sent
from kera.client.sync.latency import Latency
from kera.client.sync.producer import Producer

__all__ = [
    "Access",
    "Admin",
    "Client",
    "Consumer",
    "Epochs",
    "GroupConsumer",
    "Latency",
    "OrderedConsumer",
    "Producer",
    "Sent",
]
