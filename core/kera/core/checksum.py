"""The checksum of all that KerA writes and sends: CRC-32C (Castagnoli)."""

from __future__ import annotations

from crc32c import crc32c as _crc32c

from kera.core.native import accelerated

__all__ = ["crc32c"]

crc32c = accelerated()(_crc32c)
"""``crc32c(data, value=0)``: of `data` behind what has the checksum `value`."""
