"""Named producers: which id a name has, and where the epochs of its instances start. Pure.

A name keeps its id for ever, so that its chunks go to the same entries, and brokers find what they know of it. Each
instance has a share of `PRODUCER_EPOCHS` epochs for itself, above all that were given before: whatever epoch a lane of
an earlier instance has come to, that of a later one is above it, and brokers refuse the earlier one.

Records: ``producers/<name>`` → InitProducerResponse, the id and the first epoch of the latest instance.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from kera.core.errors import InvalidArgument
from kera.core.ids import PRODUCER_EPOCHS
from kera.v1 import coordinator_pb2

PRODUCERS = "producers/"
NAMES_MAX = 100_000
"""Names are never removed, as nobody can say that one will not come back; each is kept in the coordinator's memory."""
FIRST_EPOCH = 1
_EPOCH_MAX = (1 << 32) - 1
"""The field of a chunk's header."""


class Instance(NamedTuple):
    """A producer that was given out."""

    producer_id: int
    first_epoch: int

    @property
    def record(self) -> bytes:
        """As it is stored."""
        message = coordinator_pb2.InitProducerResponse(producer_id=self.producer_id, producer_epoch=self.first_epoch)
        return message.SerializeToString()


def record_key(name: str) -> str:
    """Where the record of a name is."""
    return PRODUCERS + quote(name, safe="")


def successor(name: str, record: bytes) -> Instance:
    """The instance after the one in `record`. Raises `InvalidArgument` when the name has had all that it can have."""
    last = coordinator_pb2.InitProducerResponse.FromString(record)
    first_epoch = last.producer_epoch + PRODUCER_EPOCHS
    if first_epoch + PRODUCER_EPOCHS - 1 > _EPOCH_MAX:
        raise InvalidArgument(
            f"there have been {last.producer_epoch // PRODUCER_EPOCHS + 1} producers with the name {name!r}, and their"
            " epochs are used up; take another name",
            name=name,
        )
    return Instance(last.producer_id, first_epoch)


def check_room(name: str, names: int) -> None:
    """Raises `InvalidArgument` when there are too many names for another one."""
    if names >= NAMES_MAX:
        raise InvalidArgument(
            f"no room for a producer with the new name {name!r}: there are {names} names already; a name is for a"
            " producer that comes back, others need none",
            name=name,
            limit=NAMES_MAX,
        )
