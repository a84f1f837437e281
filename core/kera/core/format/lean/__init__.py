"""The lean payload: that of chunks of format version 2, of which an Arrow message would be larger than what it says.

The schema is known by its id, so a payload has only what differs from chunk to chunk. Others use

* `encode` to make one of a record batch (`is_lean`: of which schemas that can be done), or `encode_completed`,
* `check` to find out, in one pass and without a schema, whether readers can trust one,
* `decode` to have its columns as Arrow arrays, the large ones in place.

`kera.core.format.lean.layout` has the format, docs/format.md too. Pure: no module here knows where chunks come from.
"""

from kera.core.format.lean.check import check
from kera.core.format.lean.decode import decode
from kera.core.format.lean.encode import ONE_TIME, encode, encode_completed, no_values
from kera.core.format.lean.kinds import Known, is_lean, known_of, learn

__all__ = [
    "ONE_TIME",
    "Known",
    "check",
    "decode",
    "encode",
    "encode_completed",
    "is_lean",
    "known_of",
    "learn",
    "no_values",
]
