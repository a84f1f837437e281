"""Which things daemons of this version do that others have to understand, as one number.

Daemons of a cluster are upgraded one after the other, and meanwhile some write what others cannot read. So what is new
in messages between daemons, in chunks or on disks, and cannot be ignored by who does not know it, has a level, and is
done only once all members of the cluster have that level (docs/cluster.md has the list). The coordinator decides when
that is.
"""

from __future__ import annotations

FEATURE_LEVEL = 2
"""Feature level of this version. Versions from before feature levels have 0."""
EPOCHS = 2
"""From this one on there are chunks without records, punctuations, in the logs of streams with epochs."""
