"""A cluster at one moment, as asked for and before any evaluation. Plain values; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kera.client import ClusterDescription, ConsumerGroupDescription, ConsumerGroupSummary, LatencyDescription
from kera.client.admin.daemons import DaemonFigures
from kera.client.admin.watching import StreamSummary
from kera.client.diagnosis.findings import Finding


class Trouble(NamedTuple):
    """The reason why a question has no answer now."""

    text: str
    since_us: int
    """Time of day on this host."""
    refused: bool = False
    """Whether there was an answer: that this user may not ask."""


class Two(NamedTuple):
    """The last two answers of a daemon, to compute rates."""

    before: DaemonFigures | None
    now: DaemonFigures


class Lagging(NamedTuple):
    """The description of a consumer group, with its time on a monotonic clock."""

    at_s: float
    found: ConsumerGroupDescription


class TwoLags(NamedTuple):
    """The last two descriptions of a consumer group."""

    before: Lagging | None
    now: Lagging


@dataclass(frozen=True)
class Sample:
    """The raw figures of a cluster at one moment. Daemons have the names that findings use: ``broker 2``."""

    at_s: float
    """Time on a monotonic clock."""
    at_us: int
    """Time of day."""
    cluster: ClusterDescription | None = None
    """None: no coordinator has ever answered."""
    cluster_trouble: Trouble | None = None
    figures: Mapping[str, Two] = field(default_factory=dict)
    troubles: Mapping[str, Trouble] = field(default_factory=dict)
    """The troubles of daemons that do not answer now."""
    streams: Sequence[StreamSummary] = ()
    streams_trouble: Trouble | None = None
    groups: Sequence[ConsumerGroupSummary] = ()
    groups_trouble: Trouble | None = None
    lags: Mapping[str, TwoLags] = field(default_factory=dict)
    """By consumer group; some groups may be missing, as a sample measures only a part of them."""
    constraints: Sequence[LatencyDescription] = ()
    """All constraints that this user may see, without their hops."""
    constraints_trouble: Trouble | None = None
    hops: Mapping[str, LatencyDescription] = field(default_factory=dict)
    """By name, the latency constraints that were asked for in full."""
    findings: Sequence[Finding] | None = None
    """None: there was no diagnosis yet."""
    findings_trouble: Trouble | None = None
