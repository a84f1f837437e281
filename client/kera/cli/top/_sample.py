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
    """Why somebody does not tell anything now."""

    text: str
    since_us: int
    """Time of day here."""
    refused: bool = False
    """It is there: this user may not ask."""


class Two(NamedTuple):
    """The last two answers of a daemon, of which rates are made."""

    before: DaemonFigures | None
    now: DaemonFigures


class Lagging(NamedTuple):
    """A consumer group as it was last looked at, and when, on a clock that does not go back."""

    at_s: float
    found: ConsumerGroupDescription


class TwoLags(NamedTuple):
    """The last two looks at a consumer group."""

    before: Lagging | None
    now: Lagging


@dataclass(frozen=True)
class Sample:
    """The raw figures of a cluster at one moment. Daemons are called as findings call them: ``broker 2``."""

    at_s: float
    """On a clock that does not go back."""
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
    """By consumer group; of some, as they are not all looked at each time."""
    constraints: Sequence[LatencyDescription] = ()
    """All that one may see, without their hops."""
    constraints_trouble: Trouble | None = None
    hops: Mapping[str, LatencyDescription] = field(default_factory=dict)
    """By latency constraint, those that were looked at in full."""
    findings: Sequence[Finding] | None = None
    """None: not yet."""
    findings_trouble: Trouble | None = None
