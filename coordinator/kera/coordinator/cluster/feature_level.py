"""When the cluster's feature level rises. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FEATURE_LEVEL_KEY = "feature_level"
"""Key of the cluster's level, in decimal text."""


def reached(current: int, coordinators: int, members: Sequence[int]) -> int:
    """Return the new level of the cluster: the highest that all daemons have, but never lower than before.

    A cluster without members keeps its level: the first member may be of an older version.
    """
    return max(current, min(coordinators, *members)) if members else current
