"""``kera coordinator``, ``kera broker``, …: the daemons. A new daemon needs a line in `DAEMONS`.

A daemon's flags are its settings (see `kera.cli._settings_flags`). They are loaded when the command is used, so that
the other commands do not import the daemons.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import typer

from kera.cli._lazy import add_lazy_command
from kera.cli._run import extra

_SUPERVISOR_PID_VARIABLE = "KERA_SUPERVISOR_PID"
"""`kera.local.child` sets it. That module is not imported, as a daemon should need no code of the supervisor."""


class Daemon(NamedTuple):
    """A daemon as the command line sees it."""

    name: str
    package: str
    """Has ``settings`` with the settings class, and ``__main__`` with ``run(settings, runtime) -> int``."""
    settings_class: str
    help: str


DAEMONS = (
    Daemon(
        "coordinator",
        "kera.coordinator",
        "CoordinatorSettings",
        "Run a coordinator: manages streams and cluster membership.",
    ),
    Daemon("backup", "kera.backup", "BackupSettings", "Run a backup: stores replicas of the data of brokers."),
    Daemon("broker", "kera.broker", "BrokerSettings", "Run a broker: ingests, stores and serves records."),
)


def register(app: typer.Typer) -> None:
    """Add a command for each daemon."""
    for daemon in DAEMONS:
        add_lazy_command(app, daemon.name, daemon.help, functools.partial(_load, daemon))


def _load(daemon: Daemon) -> Callable[..., int]:
    from kera.cli._settings_flags import command_function

    with extra("server"):
        settings_class = getattr(importlib.import_module(f"{daemon.package}.settings"), daemon.settings_class)
    return command_function(settings_class, functools.partial(_run, daemon))


def _run(daemon: Daemon, settings: Any) -> int:
    _die_with_supervisor()
    with extra("server"):
        module = importlib.import_module(f"{daemon.package}.__main__")
    if not settings.audit_stream:
        return int(module.run(settings))
    from kera.cli._audit_stream import StreamOfEvents
    from kera.core.runtime import MACHINE

    return int(module.run(settings, dataclasses.replace(MACHINE, audit_stream=StreamOfEvents)))


def _die_with_supervisor() -> None:
    """Have this process end with its supervisor; called before the slow imports. A dead supervisor ends it at once."""
    from kera.core.base.process import die_with_parent

    die_with_parent()
    supervisor = os.environ.get(_SUPERVISOR_PID_VARIABLE)
    if supervisor is not None and os.getppid() != int(supervisor):
        os.kill(os.getpid(), signal.SIGTERM)
