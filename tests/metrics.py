"""Metrics of a source, as a scrape returns them."""

from prometheus_client import generate_latest

from kera.core.base.turns import at_once
from kera.server.monitoring.sources import Fixed, Source


def shown(source: Source, *, everything: bool = True) -> str:
    """The text of a scrape."""
    return generate_latest(Fixed(at_once(source.steps(everything=everything)))).decode()


def values(source: Source, *, everything: bool = True) -> dict[str, float]:
    """The scraped values, by name and labels."""
    lines = shown(source, everything=everything).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
