"""The parts of an experiment, as plain values: the setup of a point, its measurements, and the claims.

An experiment is a table of points. A point belongs to a series (a line of the plot), has an x, and a setup. The
observations of the thesis are ratios between two points (`Claim`), since ratios can be compared between machines of
different sizes; absolute figures cannot.
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
    """Memory of each broker, and of each backup. A round fits into it, so none of its data go to disk."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The setup of a point."""

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
    """How a consumer follows all records; None: without a consumer."""
    verify: bool = True
    """Whether the consumer checks the checksums."""
    batch_records: int = 0
    """Records of each batch that the producer divides; 0: as many as fill a chunk, with a call for each."""
    keys: Literal["none", "random"] = "none"
    send: Literal["batch", "record"] = "batch"
    rate: float = 0.0
    """Records per second, one by one; 0: as fast as possible."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A point on a line of the plot."""

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
    """The work that has to run in parallel; with fewer cores than `PARALLEL_CORES` the claim cannot be shown."""


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
    """The difference of our experiment, and the limits of this machine."""
    others: Collection[str] = ()
    """Series of other contestants than KerA."""


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
    """The delay of records, if it is measured."""
    cpu_us: float | None = None
    """Processor time of a record, if it is measured."""
    load: float | None = None
    """The machine's load average before the round."""

    @property
    def mb_per_core_s(self) -> float:
        """MB of values for each second of processor time of all processes together; 0 if that is not measured."""
        s_per_gb = self.producers_s_per_gb + self.brokers_s_per_gb + self.backups_s_per_gb + self.consumers_s_per_gb
        return 1e3 / s_per_gb if s_per_gb else 0.0

    def figure(self, metric: Metric) -> float:
        """The figure of a metric: throughput in MB/s, latency in ms, processor time in us; 0 without that figure."""
        figures = {
            "produced": self.produced_mb_per_s,
            "consumed": self.consumed_mb_per_s,
            "per_core": self.mb_per_core_s,
            "latency": self.mean_ms,
            "cpu": self.cpu_us,
        }
        return figures[metric] or 0.0


Samples = Mapping[tuple[str, int], Sequence[Sample]]
"""Samples by series and x."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict about a claim."""

    claim: Claim
    ratios: Mapping[Metric, float]
    """The ratio of the same two points by any metric that both have."""
    cores: int
    """The cores of the measuring machine."""

    @property
    def ratio(self) -> float | None:
        """The ratio that decides; None: one of its points was not measured."""
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
        """The state, with the reason if the machine is the reason."""
        if self.state != "cannot be shown here":
            return self.state
        return f"{self.state}: {self.claim.parallel}, which takes {PARALLEL_CORES} cores; here are {self.cores}"

    @property
    def bounds(self) -> str:
        """The bounds in words."""
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
            ratios[metric] = float("inf")  # the denominator is 0
    return Verdict(claim, ratios, cores)


def median_of(samples: Sequence[Sample], metric: Metric) -> float | None:
    """The median over the rounds of a point; None without rounds."""
    return statistics.median(sample.figure(metric) for sample in samples) if samples else None


def million_records(mb_per_s: float) -> float:
    """MB/s of values as million records per second, the unit of the thesis' figures."""
    return mb_per_s / RECORD_BYTES
