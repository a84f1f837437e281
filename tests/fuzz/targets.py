"""All decoders that are fuzzed in a process of their own, by name."""

from __future__ import annotations

from tests.fuzz.access_targets import ACCESS_TARGETS
from tests.fuzz.chunk_targets import CHUNK_TARGETS
from tests.fuzz.client_targets import CLIENT_TARGETS
from tests.fuzz.target import Target
from tests.fuzz.wire_targets import WIRE_TARGETS

TARGETS: dict[str, Target] = {
    target.name: target for target in (*WIRE_TARGETS, *ACCESS_TARGETS, *CHUNK_TARGETS, *CLIENT_TARGETS)
}
