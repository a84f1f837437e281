"""The dashboards of Grafana, described once and written as JSON: ``python deploy/grafana/dashboards.py``.

A panel is a title, what it plots, and the unit. A test compares `kera.json` with what is made here, and each name of a
metric with what daemons and the rules of deploy/prometheus really have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).with_name("kera.json")
COLUMNS, WIDTH, HEIGHT = 24, 8, 8


class Panel(NamedTuple):
    """A time series, or several."""

    title: str
    queries: dict[str, str]
    """By legend."""
    unit: str = "short"
    help: str = ""


class Row(NamedTuple):
    """Panels about one thing."""

    title: str
    panels: tuple[Panel, ...]


ROWS = (
    Row(
        "The cluster",
        (
            Panel(
                "Members",
                {
                    "brokers": "max(kera_coordinator_brokers_alive)",
                    "brokers lost": "max(kera_coordinator_brokers_lost)",
                    "backups": "max(kera_coordinator_backups_alive)",
                    "backups lost": "max(kera_coordinator_backups_lost)",
                    "restarting": "max(kera_coordinator_members_restarting)",
                },
            ),
            Panel(
                "Alerts that fire",
                {"{{alertname}}": 'sum by (alertname) (ALERTS{alertname=~"Kera.*", alertstate="firing"})'},
            ),
            Panel(
                "Recoveries under way",
                {"{{phase}}": 'sum by (phase) (kera_coordinator_recoveries{phase!~"done|cancelled"})'},
                help="of brokers that were lost",
            ),
            Panel("Written", {"{{instance}}": "kera:broker_bytes_appended:rate1m"}, "Bps"),
            Panel("Read, as copies and in place", {"{{instance}}": "kera:broker_bytes_read:rate1m"}, "Bps"),
            Panel("Written, by stream", {"{{stream}}": "topk(10, kera:stream_bytes_appended:rate5m)"}, "Bps"),
        ),
    ),
    Row(
        "What clients feel",
        (
            Panel(
                "Writes, p99 at the broker",
                {"{{instance}}, {{answered}}": "kera:broker_append_seconds:p99"},
                "s",
                "answered later: they have waited for backups, the disk or room",
            ),
            Panel("Reads of what is there, p99 at the broker", {"{{instance}}": "kera:broker_fetch_seconds:p99"}, "s"),
            Panel(
                "Lag of consumer groups",
                {"{{consumer_group}} in {{stream}}": "topk(10, kera:consumer_group_lag_records)"},
            ),
            Panel("Chunks refused", {"{{instance}}": "rate(kera_broker_chunks_refused_total[1m])"}, "ops"),
            Panel("Chunks sent again", {"{{instance}}": "rate(kera_broker_chunks_duplicate_total[1m])"}, "ops"),
            Panel(
                "Loaded from disk for readers", {"{{instance}}": "rate(kera_broker_segments_loaded_total[1m])"}, "ops"
            ),
        ),
    ),
    Row(
        "Replication",
        (
            Panel("Not replicated yet", {"{{instance}}": "kera_broker_replication_lag_bytes"}, "bytes"),
            Panel("Age of the oldest of it", {"{{instance}}": "kera_broker_replication_lag_ms"}, "ms"),
            Panel("Virtual segments that lack replicas", {"{{instance}}": "kera_broker_virtual_segments_deficient"}),
            Panel("Backups that a broker reaches", {"{{instance}}": "kera_broker_backups_up"}),
            Panel(
                "Room in backups' memory", {"{{instance}}": "kera_backup_slots_free / kera_backup_slots"}, "percentunit"
            ),
            Panel("Group commits of backups", {"{{instance}}": "rate(kera_backup_commits_total[1m])"}, "ops"),
        ),
    ),
    Row(
        "Epochs",
        (
            Panel(
                "Least settled, by stream",
                {"{{stream}}": "topk(10, max by (stream) (kera_broker_stream_epoch_lag_ms))"},
                "ms",
                "how far the entry that holds up the next epoch is behind the clock",
            ),
            Panel("Held up beyond the grace", {"{{instance}}": "kera_broker_epochs_held_up_ms"}, "ms"),
            Panel(
                "Promises that had to be written down",
                {"{{instance}}": "rate(kera_broker_punctuations_total[1m])"},
                "ops",
                "a chunk came that was older than what readers had been promised: its records are late",
            ),
            Panel("Promises", {"{{instance}}": "rate(kera_broker_promises_total[1m])"}, "ops"),
            Panel("Clocks, ahead of the coordinator's", {"{{instance}}": "kera_broker_clock_offset_seconds"}, "s"),
        ),
    ),
    Row(
        "Latency constraints",
        (
            Panel(
                "There are",
                {"all": "max(kera_latency_constraints)", "not held": "max(kera_latency_constraints_not_held)"},
            ),
            Panel(
                "Taken of the limit",
                {
                    "{{constraint}}": "topk(10, max by (constraint) (sum by (constraint, instance) "
                    "(kera_latency_hop_seconds) / max by (constraint, instance) (kera_latency_limit_seconds)))"
                },
                "percentunit",
                "of what each constraint allows, over its last window; at more than 100 % it is not held",
            ),
            Panel(
                "Windows not held, of an hour",
                {"{{constraint}}": "topk(10, max by (constraint) (increase(kera_latency_violations_total[1h])))"},
            ),
            Panel(
                "Hops that take most",
                {
                    "{{hop}} of {{stream}}, {{constraint}}": "topk(10, max by (constraint, stream, hop) "
                    "(kera_latency_hop_seconds))"
                },
                "s",
            ),
            Panel(
                "Hops that take most, by broker",
                {
                    "{{hop}} of {{stream}} {{consumer_group}}, {{instance}}": "topk(10, "
                    'kera_broker_latency_hop_seconds{statistic="mean"})'
                },
                "s",
            ),
            Panel(
                "Clocks, known to within",
                {"{{constraint}}": "topk(10, max by (constraint) (kera_latency_clock_error_seconds))"},
                "s",
                "by how much what records take can be off",
            ),
        ),
    ),
    Row(
        "Hosts",
        (
            Panel("Loops: the worst wait", {"{{job}} {{instance}}": "kera_loop_lag_seconds"}, "s"),
            Panel("Cores", {"{{job}} {{instance}}": 'rate(process_cpu_seconds_total{job=~"kera-.*"}[1m])'}),
            Panel("Disks, free", {"{{instance}} {{path}}": "kera:filesystem_free:ratio"}, "percentunit"),
            Panel("Memory", {"{{job}} {{instance}}": 'process_resident_memory_bytes{job=~"kera-.*"}'}, "bytes"),
            Panel("Segments in memory", {"{{instance}} {{state}}": "kera_broker_segments"}),
            Panel(
                "Errors of disks",
                {"{{instance}}": 'rate({__name__=~"kera_(broker|backup)_disk_errors_total"}[5m])'},
                "ops",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """All rows as Grafana has them."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append({"type": "row", "title": row.title, "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})
        y += 1
        for number, panel in enumerate(row.panels):
            place = {
                "x": number * WIDTH % COLUMNS,
                "y": y + number * WIDTH // COLUMNS * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append(_time_series(panel, place))
        y += -(-len(row.panels) * WIDTH // COLUMNS) * HEIGHT
    for number, made in enumerate(panels, start=1):
        made["id"] = number
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": "kera",
        "title": "KerA",
        "tags": ["kera"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _time_series(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + number), "datasource": source, "expr": query, "legendFormat": legend}
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def text() -> str:
    """As it is in `kera.json`."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
    sys.exit(0)
