"""The features of this version that other daemons have to understand, as one number.

Daemons of a cluster are upgraded one after the other, and meanwhile newer ones could write data that older ones cannot
read. So each new feature of messages between daemons, of chunks or of files that older daemons cannot ignore has a
level, and is used only when all members of the cluster have that level (docs/cluster.md has the list). The coordinator
decides when that is the case.
"""

from __future__ import annotations

FEATURE_LEVEL = 2
"""Feature level of this version. Versions before the introduction of feature levels have 0."""
EPOCHS = 2
"""From this level on, logs of streams with epochs have punctuations, chunks without records."""
