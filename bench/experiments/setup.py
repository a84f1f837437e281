"""The parts of an experiment, as plain values: the setup of a point, its measurements, and the claims.

An experiment is a table of points. A point belongs to a series (a line of the plot), has an x, and says what is set up
for it. What the thesis saw is written down as ratios between two points (`Claim`), since ratios can be compared with
those of a machine of another size; absolute figures cannot.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

from kera.core.base.settings import GIB, KIB, MIB

Consumer = Literal["push", "pull"]
Metric = Literal["produced", "consumed", "per_core", "latency", "cpu"]
State = Literal["yes", "missed", "cannot be shown here", "not measured"]
RECORD_BYTES = 100
"""As in the thesis: records of 100 bytes without keys."""
PARALLEL_CORES = 8
"""Claims about parallel work need this many cores; the thesis had 16 for each broker, and others for clients."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The cluster that a point needs; points of the same place share one."""

    brokers: int = 1
    backups: int = 0
    segment_bytes: int = 8 * MIB
    arena_bytes: int = 6 * GIB
    """Memory of each broker, and as much of each backup. A round has room in it, and so nothing of it goes to disk."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that is set for a point."""

    place: Place = Place()
    streams: int = 1
    streamlets: int = 1
    """Streamlets of each stream."""
    entries: int = 1
    replication: int = 0
    virtual_logs: int = 1
    chunk_bytes: int = 16 * KIB
    request_bytes: int = MIB
    requests_in_flight: int = 5
    producers: int = 1
    """Producers, each with connections of its own; more than a few share processes."""
    consumer: Consumer | None = None
    """How one consumer follows all of it; None: nobody does."""
    verify: bool = True
    """Whether the consumer checks the checksums."""
    batch_records: int = 0
    """Records that the producer is given at once, and divides; 0: as many as fill a chunk, a call for each."""
    keys: Literal["none", "random"] = "none"
    send: Literal["batch", "record"] = "batch"
    rate: float = 0.0
    """Records per second, one by one; 0: as fast as it goes."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One place on a line of the plot."""

    series: str
    x: int
    setup: Setup


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim about two points: the median of one over that of the other is within bounds."""

    text: str
    """The sentence whose truth the ratio decides."""
    over: tuple[str, int]
    under: tuple[str, int]
    least: float = 0.0
    most: float = float("inf")
    metric: Metric = "produced"
    parallel: str = ""
    """The work that has to go on side by side; with fewer cores than `PARALLEL_CORES` the claim cannot be shown."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One table of points, and the figures of the thesis that it repeats."""

    name: str
    """Name of its files."""
    figures: str
    """Figures of the thesis."""
    title: str
    x_label: str
    points: Sequence[Point]
    thesis: str
    """The observation of the thesis."""
    claims: Sequence[Claim] = ()
    plotted: Metric = "produced"
    note: str = ""
    """How ours differs, and what this machine cannot show."""
    others: Collection[str] = ()
    """Series that KerA does not play."""


@dataclasses.dataclass
class Sample:
    """The figures of one round of a point. Processor time is in seconds per GB of values."""

    produced_mb_per_s: float
    consumed_mb_per_s: float | None
    producers_s_per_gb: float
    brokers_s_per_gb: float
    backups_s_per_gb: float
    consumers_s_per_gb: float
    ack_p50_ms: float | None = None
    ack_p99_ms: float | None = None
    mean_ms: float | None = None
    """How late records are, where that is measured."""
    cpu_us: float | None = None
    """Processor time of a record, where that is measured."""
    load: float | None = None
    """The machine's load average before it."""

    @property
    def mb_per_core_s(self) -> float:
        """MB of values for each second of processor time of all processes together; 0 where that is not measured."""
        s_per_gb = self.producers_s_per_gb + self.brokers_s_per_gb + self.backups_s_per_gb + self.consumers_s_per_gb
        return 1e3 / s_per_gb if s_per_gb else 0.0

    def figure(self, metric: Metric) -> float:
        """The figure of a metric: throughput in MB/s, latency in ms, processor time in us; 0 where there is none."""
        figures = {
            "produced": self.produced_mb_per_s,
            "consumed": self.consumed_mb_per_s,
            "per_core": self.mb_per_core_s,
            "latency": self.mean_ms,
            "cpu": self.cpu_us,
        }
        return figures[metric] or 0.0


Samples = Mapping[tuple[str, int], Sequence[Sample]]
"""By series and x."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict about a claim."""

    claim: Claim
    ratios: Mapping[Metric, float]
    """The same two points by any metric that both of them have."""
    cores: int
    """Those of the machine that measured it."""

    @property
    def ratio(self) -> float | None:
        """The one that decides; None: one of its points was not measured."""
        return self.ratios.get(self.claim.metric)

    @property
    def state(self) -> State:
        """The state of the claim."""
        if self.ratio is None:
            return "not measured"
        if self.claim.parallel and self.cores < PARALLEL_CORES:
            return "cannot be shown here"
        return "yes" if self.claim.least <= self.ratio <= self.claim.most else "missed"

    @property
    def words(self) -> str:
        """The state, with the reason where the machine is one."""
        if self.state != "cannot be shown here":
            return self.state
        return f"{self.state}: {self.claim.parallel}, which takes {PARALLEL_CORES} cores; here are {self.cores}"

    @property
    def bounds(self) -> str:
        """In words."""
        least, most = self.claim.least, self.claim.most
        if most == float("inf"):
            return f"at least {least:g}"
        return f"at most {most:g}" if not least else f"{least:g} to {most:g}"


def judge(claim: Claim, samples: Samples, cores: int) -> Verdict:
    """Whether a claim holds for the samples of a machine with `cores` cores."""
    ratios: dict[Metric, float] = {}
    for metric in get_args(Metric):
        over, under = (median_of(samples.get(key, ()), metric) for key in (claim.over, claim.under))
        if over is not None and under:
            ratios[metric] = over / under
        elif over and under is not None and metric == claim.metric:
            ratios[metric] = float("inf")  # nothing came through at the point that is divided by
    return Verdict(claim, ratios, cores)


def median_of(samples: Sequence[Sample], metric: Metric) -> float | None:
    """The median over the rounds of a point; None without any."""
    return statistics.median(sample.figure(metric) for sample in samples) if samples else None


def million_records(mb_per_s: float) -> float:
    """MB/s of values as million records per second, the unit of the thesis' figures."""
    return mb_per_s / RECORD_BYTES
