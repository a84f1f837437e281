"""The index's record of a stream: its description, as the coordinator sent it when the stream was opened here.

A coordinator whose metadata was restored from an older copy may not know the stream any more, or only an older version.
With the record, the broker still knows what its data is, and whether the coordinator's version is older than its own.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError

from kera.broker.records import Change
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import sealed
from kera.v1 import common_pb2

_KEY = struct.Struct(">cQ")


def put_stream(info: common_pb2.StreamInfo) -> Change:
    """Return the change that records a stream."""
    return sealed(_KEY.pack(b"i", info.stream_id), _lasting(info).SerializeToString())


def _lasting(info: common_pb2.StreamInfo) -> common_pb2.StreamInfo:
    """Return a stream's description without the fields that streamlets have only while they are being recovered."""
    if not any(one.starts or one.HasField("handed_over") for one in info.assignments):
        return info
    lasting = common_pb2.StreamInfo()
    lasting.CopyFrom(info)
    for one in lasting.assignments:
        del one.starts[:]
        one.ClearField("handed_over")
    return lasting


def stream_record(index: SegmentIndex, stream_id: int) -> common_pb2.StreamInfo | None:
    """Return the record of a stream; None if it is damaged or missing: earlier releases wrote none."""
    value = index.record(_KEY.pack(b"i", stream_id))
    try:
        return None if value is None else common_pb2.StreamInfo.FromString(value)
    except DecodeError:
        return None


def assignments_version(index: SegmentIndex, stream_id: int) -> int:
    """Return the latest recorded version of the stream's assignments; 0: unknown."""
    record = stream_record(index, stream_id)
    return 0 if record is None else record.assignments_version


def is_news(index: SegmentIndex, info: common_pb2.StreamInfo) -> bool:
    """Whether `info` has to be recorded, because it differs from the record and is not older."""
    record = stream_record(index, info.stream_id)
    return record is None or (
        record != _lasting(info)
        and info.config_version >= record.config_version
        and info.assignments_version >= record.assignments_version
    )
