"""``kera bench``: throughput and latency of a cluster.

Each producer and consumer is a process (`_worker`); `_rounds` starts them and aggregates their figures, `_report`
prints them. docs/bench.md defines the measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from kera.cli._commands import Commands
from kera.cli._lazy import add_lazy_command

__all__ = ["app"]

app = Commands(help="Measure throughput and latency.", no_args_is_help=True)


def _load(name: str) -> Callable[..., int]:
    from kera.cli._settings_flags import command_function
    from kera.cli.bench import _rounds, _settings

    return command_function(_settings.SETTINGS[name], lambda settings: _rounds.run(name, settings))


for _name, _help in {
    "produce": "Measure the throughput of producing, and the latency to acknowledgement.",
    "consume": "Measure the throughput of consuming existing records.",
    "e2e": "Measure latency and throughput from producer to consumer, both running.",
}.items():
    add_lazy_command(app, _name, _help, functools.partial(_load, _name))
