"""When the cluster's feature level rises. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FEATURE_LEVEL_KEY = "feature_level"
"""Key of the level that the cluster has, in decimal text."""


def reached(current: int, coordinators: int, members: Sequence[int]) -> int:
    """The level that a cluster has from now on: the highest that all have, and never a lower one than before.

    A cluster without members stays where it is: the first one may be of an older version.
    """
    return max(current, min(coordinators, *members)) if members else current
