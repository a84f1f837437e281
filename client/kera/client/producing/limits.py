"""Bounds of a producer that no setting says: constants of the protocol, of which tests need not reach the end."""

from __future__ import annotations

from typing import NamedTuple

from kera.core.base.ids import PRODUCER_EPOCHS
from kera.core.rpc.limits import REQUEST_CHUNKS_MAX


class ProducerLimits(NamedTuple):
    """See the head of this module."""

    epochs: int = PRODUCER_EPOCHS
    """Producer epochs of one instance of a named producer."""
    request_chunks_max: int = REQUEST_CHUNKS_MAX


LIMITS = ProducerLimits()
