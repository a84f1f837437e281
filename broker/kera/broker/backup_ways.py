"""How a broker reaches backups: by a unix socket on its own node, and by frames over TCP otherwise."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from kera.core.errors import Unavailable
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.method import Introduction
from kera.core.security import Tls
from kera.v1 import common_pb2

MESSAGE_BYTES_MAX = 1 << 30
"""A chunk, which may fill a segment, is sent as one piece."""


class BackupWays(NamedTuple):
    """Opens a broker's connection to a backup: a unix socket on the same node, TCP otherwise."""

    node_id: str = ""
    """Node id of the broker; empty: no unix socket is used."""
    tls: Tls | None = None
    """TLS for connections over TCP."""
    introduction: Introduction | None = None
    """The broker's credentials for connections over TCP; both ends of a unix socket belong to the same user."""

    async def connect(self, info: common_pb2.BackupInfo, *, timeout_s: float) -> FrameChannel:
        """Connect to a backup. Raises `Unavailable`."""
        if self.node_id and info.node_id == self.node_id and info.frames_unix_path:
            with contextlib.suppress(Unavailable):
                return await FrameChannel.connect_unix(
                    info.frames_unix_path, timeout_s=timeout_s, bulk_bytes_max=MESSAGE_BYTES_MAX
                )
        return await FrameChannel.connect_tcp(
            info.frames_address,
            timeout_s=timeout_s,
            bulk_bytes_max=MESSAGE_BYTES_MAX,
            tls=self.tls,
            introduction=self.introduction,
        )


OVER_TCP = BackupWays()
"""Reaches all backups over TCP, on any node."""
