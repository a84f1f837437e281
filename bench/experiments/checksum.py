"""The cost of the producer's checksum, in process: it cannot be switched off, so it is measured beside the rest.

A chunk is made as the producer makes it, from a ready Arrow batch: encoded (`encode_payload`), given a header, and
checksummed (`encode_chunk`). The checksum of its payload alone is measured beside it. Without it the producer would
take the difference.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from crc32c import crc32c

from bench.common import sample_chunk
from kera.cli.bench._payload import make_batch, records_per_chunk
from kera.core.base.settings import KIB
from kera.core.format.chunk import encode_payload

RECORD_BYTES = 100
CHUNKS_KIB = (1, 4, 16, 64, 256)
BATCH_BYTES = 4 << 20
"""Each sample takes this many bytes of chunks, so that the clock's steps do not matter."""
SAMPLES = 9


@dataclasses.dataclass
class ChecksumCost:
    """By chunk size in KiB: microseconds of processor time for a chunk, and the records in it."""

    whole_us: dict[int, float]
    checksum_us: dict[int, float]
    records: dict[int, int]

    def save(self, path: Path) -> None:
        """Save as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ChecksumCost | None:
        """The saved costs; None if there are none."""
        if not path.exists():
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: {int(kib): value for kib, value in column.items()} for name, column in document.items()})

    def table(self) -> list[str]:
        """The table as Markdown."""
        lines = [
            "The producer's checksum, measured in process (one core; a chunk made from a ready batch):",
            "",
            "| chunk | records | whole, µs | of it checksum, µs | share | M records/s | without checksum |",
            "|---|---|---|---|---|---|---|",
        ]
        for kib, whole_us in self.whole_us.items():
            checksum_us, records = self.checksum_us[kib], self.records[kib]
            lines.append(
                f"| {kib} KiB | {records} | {whole_us:.1f} | {checksum_us:.2f} | {checksum_us / whole_us:.0%} |"
                f" {records / whole_us:.1f} | {records / (whole_us - checksum_us):.1f} |"
            )
        return lines


def measure() -> ChecksumCost:
    """Measure for some seconds."""
    cost = ChecksumCost({}, {}, {})
    for kib in CHUNKS_KIB:
        records = records_per_chunk(RECORD_BYTES, kib * KIB)
        batch = make_batch(RECORD_BYTES, records)
        payload = encode_payload(batch)
        repeats = max(1, BATCH_BYTES // (kib * KIB))
        sequence = itertools.count()

        def whole() -> None:
            sample_chunk(encode_payload(batch), records, sequence=next(sequence))  # noqa: B023 - called before the loop goes on

        cost.whole_us[kib] = _cpu_us(whole, repeats)
        cost.checksum_us[kib] = _cpu_us(lambda: crc32c(payload), repeats)  # noqa: B023 - the same
        cost.records[kib] = records
    return cost


def _cpu_us(action: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(SAMPLES):
        begun_s = time.process_time()
        for _ in range(repeats):
            action()
        samples.append((time.process_time() - begun_s) / repeats * 1e6)
    return statistics.median(samples)
