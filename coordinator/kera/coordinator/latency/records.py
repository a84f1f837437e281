"""Where latency constraints are in the metadata.

latency/<name>  LatencyConstraintRecord
"""

from __future__ import annotations

CONSTRAINTS = "latency/"


def constraint_key(name: str) -> str:
    """Key of a constraint's record."""
    return CONSTRAINTS + name
