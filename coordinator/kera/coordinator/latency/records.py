"""The records of latency constraints in the metadata.

latency/<name>  LatencyConstraintRecord
"""

from __future__ import annotations

CONSTRAINTS = "latency/"


def constraint_key(name: str) -> str:
    """Return the key of a constraint's record."""
    return CONSTRAINTS + name
