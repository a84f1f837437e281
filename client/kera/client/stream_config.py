"""The settings of a stream, and their names on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kera.client.settings import Durability
from kera.core.errors import InvalidArgument, ProtocolError
from kera.core.format.punctuation import EPOCH_GRACE_MS, TIMESTAMP_AHEAD_MAX_MS
from kera.core.push import DEFAULT_DOMAIN
from kera.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The current settings of a stream, as created and since altered."""

    streamlets: int
    brokers: int
    entries: int
    group_segments: int
    durability: str
    codec: str
    retention_ms: int = 0
    """Age at which data are removed; 0: no such rule."""
    retention_bytes: int = 0
    """Maximum size of a streamlet; beyond it, the oldest records are removed; 0: no such rule."""
    retention_consumer_groups: tuple[str, ...] = ()
    """Consumer groups whose unread records are never removed."""
    retention_consumed: bool = False
    """Whether records are removed once all `retention_consumer_groups` have read them."""
    replication: int = 0
    """Number of backups that have each chunk, besides its broker."""
    virtual_logs: int = 1
    """Number of virtual logs that carry the stream's chunks to backups, on each broker."""
    memory_priority: int = 0
    """Priority for memory: a higher one keeps in memory for longer the data that are already on disk."""
    replication_priority: int = 0
    """Priority for replication: chunks of streams with a higher one go to backups first."""
    memory_domain: str = DEFAULT_DOMAIN
    """The shared memory that has its segments, at brokers: users who may map it can see everything in it."""
    epoch_ms: int = 0
    """Length of an epoch (docs/epochs.md); 0: the stream has no epochs."""
    punctuation: str = "clock"
    """The source of the promise that no older records follow in an entry without writers: brokers by their ``clock``,
    or ``producers``."""
    epoch_grace_ms: int = EPOCH_GRACE_MS
    """How late records may be, by the clock, before an entry counts as silent."""
    timestamp_ahead_max_ms: int = TIMESTAMP_AHEAD_MAX_MS
    """For a stream with epochs: how far ahead of the broker's clock the times of records may be; 0: unlimited."""

    @classmethod
    def from_message(cls, config: common_pb2.StreamConfig) -> StreamConfig:
        """Make a config from its wire form. Raises `ProtocolError`."""
        return cls(
            streamlets=config.streamlets,
            brokers=config.brokers,
            entries=config.entries,
            group_segments=config.group_segments,
            durability=durability_name(config.durability),
            codec=_codec_name(config.codec),
            retention_ms=config.retention_ms,
            retention_bytes=config.retention_bytes,
            retention_consumer_groups=tuple(config.retention_consumer_groups),
            retention_consumed=config.retention_consumed,
            replication=config.replication,
            virtual_logs=config.virtual_logs or 1,
            memory_priority=config.memory_priority,
            replication_priority=config.replication_priority,
            epoch_ms=config.epoch_ms,
            punctuation=_punctuation_name(config.punctuation),
            epoch_grace_ms=config.epoch_grace_ms if config.HasField("epoch_grace_ms") else EPOCH_GRACE_MS,
            timestamp_ahead_max_ms=(
                config.timestamp_ahead_max_ms if config.HasField("timestamp_ahead_max_ms") else TIMESTAMP_AHEAD_MAX_MS
            ),
            memory_domain=config.memory_domain or DEFAULT_DOMAIN,
        )


_DURABILITY_NAMES = {value: name.removeprefix("DURABILITY_").lower() for name, value in common_pb2.Durability.items()}
_CODEC_NAMES = {value: name.removeprefix("CODEC_").lower() for name, value in common_pb2.Codec.items()}
_PUNCTUATION_NAMES = {
    value: name.removeprefix("PUNCTUATION_").lower() for name, value in common_pb2.Punctuation.items()
}


def _codec_name(value: common_pb2.Codec.ValueType) -> str:
    name = _CODEC_NAMES.get(value)
    if name is None:
        raise ProtocolError(f"codec {value} is not known; is the peer newer?", codec=value)
    return name


def durability_name(value: common_pb2.Durability.ValueType) -> str:
    """Return ``leader``, ``replicated`` or ``persisted``. Raises `ProtocolError`."""
    name = _DURABILITY_NAMES.get(value)
    if name is None:
        raise ProtocolError(f"durability {value} is not known; is the peer newer?", durability=value)
    return name


def durability_value(name: str | None) -> common_pb2.Durability.ValueType:
    """Return the wire value of a level. None leaves it to the stream, or to its replication.

    Raises `InvalidArgument`.
    """
    if name is None:
        return common_pb2.DURABILITY_UNSPECIFIED
    if name not in get_args(Durability):
        raise InvalidArgument(f"durability {name!r} is not one of {', '.join(get_args(Durability))}", durability=name)
    return common_pb2.Durability.Value("DURABILITY_" + name.upper())


def _punctuation_name(value: common_pb2.Punctuation.ValueType) -> str:
    name = _PUNCTUATION_NAMES.get(value)
    if name is None:
        raise ProtocolError(f"punctuation {value} is not known; is the peer newer?", punctuation=value)
    return name


def punctuation_value(name: str) -> common_pb2.Punctuation.ValueType:
    """Return the wire value for ``clock`` or ``producers``. Raises `InvalidArgument`."""
    for value, known in _PUNCTUATION_NAMES.items():
        if known == name:
            return value
    raise InvalidArgument(
        f"punctuation {name!r} is not one of {', '.join(_PUNCTUATION_NAMES.values())}", punctuation=name
    )
