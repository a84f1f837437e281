"""Metrics of a source, as they are scraped."""

from prometheus_client import generate_latest

from kera.core.base.turns import at_once
from kera.server.monitoring.sources import Fixed, Source


def shown(source: Source, *, everything: bool = True) -> str:
    """The text."""
    return generate_latest(Fixed(at_once(source.steps(everything=everything)))).decode()


def values(source: Source, *, everything: bool = True) -> dict[str, float]:
    """By name and labels."""
    lines = shown(source, everything=everything).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
