"""The results of a measurement: one JSON object per result for programs, a table for people.

docs/bench.md describes the fields; new ones may be added, but none is renamed.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kera.cli._output import Output, rendered
from kera.cli._table import table
from kera.cli.bench._cpu import cpu_model
from kera.cli.bench._latency import Latencies
from kera.cli.bench._settings import BenchSettings, ConsumeSettings
from kera.core.base.sizes import format_size
from kera.core.base.spelling import plural

if TYPE_CHECKING:
    from kera.cli.bench._rounds import MeasuredCluster, Round
    from kera.client import StreamConfig

_PACKAGES = ("kera", "pyarrow", "grpcio", "uvloop", "numpy")
_LATENCY_OF = {"produce": "acknowledgement", "consume": None, "e2e": "availability"}


def make(
    name: str, settings: BenchSettings, cluster: MeasuredCluster, record_bytes: int, rounds: Sequence[Round]
) -> dict[str, Any]:
    """Return the result of some rounds."""
    latencies = Latencies()
    for one in rounds:
        latencies.add_encoded(*one.latencies)
    return {
        "bench": name,
        "record_bytes": record_bytes,
        "chunk_bytes": int(settings.chunk_bytes),
        "request_bytes": int(settings.request_bytes),
        "streamlets": settings.streamlets,
        "entries": settings.entries,
        "codec": settings.codec,
        "producers": settings.producers,
        "mode": settings.mode if name != "consume" else None,
        **_consumer_fields(settings),
        "buffer_bytes": int(settings.buffer_bytes),
        "requests_in_flight": settings.requests_in_flight,
        "linger_ms": settings.linger_ms or 0.0,
        "latency_target_ms": settings.latency_target_ms,
        "rate": settings.rate if name != "consume" else 0.0,
        "transport": settings.transport,
        "brokers": settings.brokers if cluster.own else None,
        "backups": settings.backups if cluster.own else None,
        **_replication_fields(rounds[0].config),
        "rounds": len(rounds),
        "records": _middle(one.records for one in rounds),
        "seconds": _middle(one.seconds for one in rounds),
        "mb_per_s": _middle(one.record_bytes / 1e6 / one.seconds for one in rounds),
        "m_records_per_s": _middle(one.records / 1e6 / one.seconds for one in rounds),
        "records_per_chunk": _middle(one.records / one.chunks for one in rounds if one.chunks),
        "latency_of": _LATENCY_OF[name],
        "latency_us": latencies.summary(),
        "producers_cpu_s": _middle(one.producers_cpu_s for one in rounds) if name != "consume" else None,
        "consumers_cpu_s": _middle(one.consumers_cpu_s for one in rounds) if name != "produce" else None,
        "brokers_cpu_s": _middle(one.brokers_cpu_s for one in rounds if one.brokers_cpu_s is not None),
        "backups_cpu_s": _middle(one.backups_cpu_s for one in rounds if one.backups_cpu_s is not None),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "cpu": cpu_model(),
        "versions": _versions(),
    }


def _consumer_fields(settings: BenchSettings) -> dict[str, Any]:
    if not isinstance(settings, ConsumeSettings):
        return {"read": None, "shared_memory": None, "verify_checksums": None}
    return {
        "read": settings.read,
        "shared_memory": settings.shared_memory,
        "verify_checksums": settings.verify_checksums,
    }


def _replication_fields(config: StreamConfig | None) -> dict[str, Any]:
    """Return the settings that the stream had: for flags that are not given, the cluster chooses them."""
    names = ("replication", "virtual_logs", "durability")
    return {name: None if config is None else getattr(config, name) for name in names}


def _middle(values: Iterable[float]) -> dict[str, float] | None:
    """Return median, minimum and maximum; None when there is no value."""
    known = list(values)
    if not known:
        return None
    found = {"median": statistics.median(known), "min": min(known), "max": max(known)}
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(value: float) -> float:
    """Return whole numbers unchanged, others with four digits, which exceed the precision of any measurement."""
    return int(value) if value == int(value) else float(f"{value:.4g}")


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def to_line(report: dict[str, Any]) -> str:
    """Return the report as one line of JSON."""
    return rendered(report, Output.JSON, indent=None)


def to_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return a table for people, with a row for each report."""
    heading = ("RECORD", "CHUNK", "MB/s", "(MIN-MAX)", "M REC/s", "p50 µs", "p95", "p99", "MAX", "CPU")
    rows = [
        (
            f"{report['record_bytes']} B",
            format_size(report["chunk_bytes"]),
            _short(report["mb_per_s"]["median"]),
            f"({_short(report['mb_per_s']['min'])}-{_short(report['mb_per_s']['max'])})",
            f"{report['m_records_per_s']['median']:.3g}",
            *_latency_cells(report["latency_us"]),
            _cpu_cell(report),
        )
        for report in reports
    ]
    first = reports[0]
    title = f"kera bench {first['bench']}: median of {plural(first['rounds'], 'round')}"
    if first["latency_of"]:
        title += f"; time to {first['latency_of']}"
    title += _replication_text(first)
    return f"{title}\n\n{table(heading, rows)}"


def _replication_text(report: dict[str, Any]) -> str:
    """Return the durability level of the report, and its replication."""
    if report["durability"] is None:
        return ""
    text = f"; level {report['durability']}"
    if report["replication"]:
        there = f" (of {report['backups']})" if report["backups"] is not None else ""
        text += f", replication on {plural(report['replication'], 'backup')}{there}"
        text += f" through {plural(report['virtual_logs'], 'virtual log')}"
    return text


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _latency_cells(latency: dict[str, int] | None) -> tuple[object, ...]:
    return tuple(latency[name] for name in ("p50", "p95", "p99", "max")) if latency else (None,) * 4


def _cpu_cell(report: dict[str, Any]) -> str:
    """Return the processor time of each kind of process: at a fixed rate as share of a core, else per GB of records."""
    seconds = report["seconds"]["median"]
    gigabytes = report["mb_per_s"]["median"] * seconds / 1000
    parts = []
    for kind in ("producers", "brokers", "backups", "consumers"):
        cpu_s = report[kind + "_cpu_s"]
        if cpu_s is not None:
            share = f"{cpu_s['median'] / seconds:.0%}" if report["rate"] else f"{cpu_s['median'] / gigabytes:.2f} s/GB"
            parts.append(f"{kind} {share}")
    return ", ".join(parts)
