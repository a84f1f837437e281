"""The keys of the records in the metadata store, and the kind of value of each. Pure."""

from __future__ import annotations

STREAMS = "streams/"
"""``streams/<id, 16 hexadecimal digits>`` → StreamInfo."""
HANDOVERS = "handover/"
"""``handover/<stream id>/<streamlet id, 8 hexadecimal digits>`` → StreamletState that its last move gave the owner."""
STARTS = "starts/"
"""``starts/<stream id>/<streamlet id>`` → TakeOverStream, only its `starts`: where entries start."""
MOVES = "moves/"
"""``moves/<stream id>/<streamlet id>`` → Move that is under way, see ``migration``."""
HANDED_OVER = "handed-over/"
"""``handed-over/<broker id, 8 hexadecimal digits>`` → HandedOver: what a broker gets back, see ``restarts``."""
RECOVERIES = "recoveries/"
"""``recoveries/<broker id, 8 digits>/<before_epoch, 16 digits>`` → RecoveryInfo."""


def stream_key(stream_id: int) -> str:
    """Return the key of a stream's record."""
    return f"{STREAMS}{stream_id:016x}"


def streamlets_path(prefix: str, stream_id: int) -> str:
    """Return the path above the keys of records about a stream's streamlets."""
    return f"{prefix}{stream_id:016x}"


def streamlet_key(prefix: str, stream_id: int, streamlet_id: int) -> str:
    """Return the key of a record about a streamlet."""
    return f"{streamlets_path(prefix, stream_id)}/{streamlet_id:08x}"


def members_prefix(noun: str) -> str:
    """Return the prefix of the keys of a kind of member.

    ``brokers/<id, 8 hexadecimal digits>`` → RegisterBrokerRequest, see `Admission.record`; likewise for backups.
    """
    return f"{noun}s/"


def member_key(noun: str, member_id: int) -> str:
    """Return the key of a member's record."""
    return f"{members_prefix(noun)}{member_id:08x}"


def forgotten_prefix(noun: str) -> str:
    """Return the prefix of the records of forgotten members; ``forgotten/<noun>s/<id>`` → JSON, see `Membership`."""
    return f"forgotten/{members_prefix(noun)}"


def forgotten_key(noun: str, member_id: int) -> str:
    """Return the key of a forgotten member's record."""
    return f"{forgotten_prefix(noun)}{member_id:08x}"


def handed_over_key(broker_id: int) -> str:
    """Return the key of the record of what a broker gave away before it stopped."""
    return f"{HANDED_OVER}{broker_id:08x}"


def last_id(noun: str) -> str:
    """Return the key of the last id that was given to a member of a kind."""
    return f"last/{noun}_id"


def last_epoch(noun: str) -> str:
    """Return the key of the last epoch of any launch of a kind."""
    return f"last/{noun}_epoch"


LAST_SCHEMA_ID = last_id("schema")
"""Key of the last id of a schema of values, see ``kera.coordinator.schemas``."""
