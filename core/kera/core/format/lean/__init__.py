"""The lean payload of chunks of format version 2, for small chunks whose Arrow messages would be mostly metadata.

The schema is known by its id, so a payload has only the parts that differ from chunk to chunk. Other packages use

* `encode`, or `encode_completed`, to make one from a record batch (`is_lean`: whether a schema allows that),
* `check` to find out, in one pass, whether readers can trust one,
* `decode` to get its columns as Arrow arrays, the large ones in place.

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
