"""Checks the cluster secret of daemons on this machine, and whether their security settings fit together."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kera.client.diagnosis.findings import Finding, ok, problem, warning
from kera.core.access.cluster_secret import ClusterSecret
from kera.core.base.home import expanded
from kera.core.base.settings import InvalidSettings
from kera.core.credential_settings import secure
from kera.core.errors import KeraError
from kera.core.runtime import MACHINE
from kera.core.security.settings import is_on_this_host

if TYPE_CHECKING:
    from kera.client.settings import ClientSettings
    from kera.server.access.settings import DaemonAccessSettings

SUBJECT = "cluster secret"
SETTINGS = "security settings"
DAEMONS = {"coordinator": "CoordinatorSettings", "broker": "BrokerSettings", "backup": "BackupSettings"}
SAME = ("security", "super_users", "certificate_daemons", "certificate_users", "jwt_keys", "jwt_issuer", "jwt_audience")
"""Settings that have to be the same for all daemons: otherwise an identity differs between some of them, or has more
rights."""
IDLE = ("cluster_secret_file", "super_users", "jwt_keys")
"""Settings without effect unless security is on."""


def secret(path: Path) -> list[Finding]:
    """Check whether a file has a secret that daemons accept, and protects it from other users."""
    try:
        found = ClusterSecret(path)
    except KeraError as error:
        return [problem(SUBJECT, error.message, "see docs/security.md, cluster secret")]
    mode = stat.S_IMODE(expanded(path).stat().st_mode)
    told = [*_mode(path, mode)]
    if len(found.shown()) > 1:
        text = f"{path} also has the previous secret, which daemons still accept"
        told.append(warning(SUBJECT, text, "once all daemons have the new one, remove the second line"))
    readers = "its owner and its group" if mode & stat.S_IRGRP else "its owner"
    return told or [ok(SUBJECT, f"{path} has one, and only {readers} can read it")]


def _mode(path: Path, mode: int) -> Iterator[Finding]:
    if mode & stat.S_IRWXO:
        text = f"{path} can be read by everybody on this host (mode {mode:o}): whoever has it may do everything"
        yield problem(SUBJECT, text, f"chmod 600 {path}, as the user that runs the daemons; then put another one there")
    elif mode & stat.S_IWGRP:
        yield warning(SUBJECT, f"{path} can be written by its group (mode {mode:o})", f"chmod g-w {path}")


def settings(path: Path) -> list[Finding]:
    """Check whether the security settings in a file fit together, for the daemons that it has tables for."""
    from kera.client.settings import ClientSettings

    try:
        tables = _tables(path)
        found: dict[str, DaemonAccessSettings] = {}
        for name in (name for name in DAEMONS if name in tables):
            settings_class = getattr(import_module(f"kera.{name}.settings"), DAEMONS[name])
            found[name] = settings_class.load(path)
        client = ClientSettings.load(path) if "client" in tables else None
    except KeraError as error:
        return [problem(SETTINGS, error.message, "mend the file: daemons do not start with it")]
    told = [
        *_of_all(found),
        *_of_each(found),
        *(each for path in _secrets(found) for each in secret(path)),
    ]
    if client is not None:
        told += _of_client(client)
    if not any(each.severity for each in told) and found:
        on = "on" if next(iter(found.values())).security else "off"
        told.append(ok(SETTINGS, f"those of {', '.join(found)} fit together: security is {on}"))
    return told


def _tables(path: Path) -> Sequence[str]:
    try:
        with expanded(path).open("rb") as file:
            return list(tomllib.load(file))
    except (OSError, ValueError) as error:
        raise InvalidSettings(f"cannot read settings file {path}: {error}", path=str(path)) from error


def _secrets(found: Mapping[str, DaemonAccessSettings]) -> list[Path]:
    paths = [each.cluster_secret_file for each in found.values() if each.security and each.cluster_secret_file]
    return list(dict.fromkeys(paths))


def _of_all(found: Mapping[str, DaemonAccessSettings]) -> Iterator[Finding]:
    """Yield findings about settings that differ between daemons and should not."""
    for setting in SAME:
        values = {name: getattr(each, setting) for name, each in found.items()}
        if len({repr(value) for value in values.values()}) > 1:
            text = "; ".join(f"[{name}] {value!r}" for name, value in values.items())
            advice = "have the same for all daemons, on all hosts"
            yield problem(SETTINGS, f"{setting} differs: {text}", advice)
    secrets = set()
    for path in _secrets(found):
        try:
            secrets.add(tuple(ClusterSecret(path).shown()))
        except KeraError:
            continue  # the check of the file itself reports this
    if len(secrets) > 1:
        paths = ", ".join(map(str, _secrets(found)))
        yield problem(SETTINGS, f"{paths} have different secrets", "have the same for all daemons, on all hosts")


def _of_each(found: Mapping[str, DaemonAccessSettings]) -> Iterator[Finding]:
    """Yield findings about each daemon's own settings; a finding about several daemons is reported once."""
    names: dict[Finding, list[str]] = {}
    for name, daemon in found.items():
        for each in _of_one(daemon):
            names.setdefault(each, []).append(name)
    for each, of in names.items():
        yield each._replace(text=f"[{'], ['.join(of)}] {each.text}")


def _of_one(daemon: DaemonAccessSettings) -> Iterator[Finding]:
    from kera.server.access.settings import guard_of, secure_daemon

    host = str(getattr(daemon, "host", ""))
    try:
        guard_of(daemon, secure_daemon(MACHINE, daemon, host))
    except KeraError as error:
        if not _is_of_secret(error, daemon):
            yield problem(SETTINGS, error.message, "see docs/security.md")
    if not daemon.security:
        idle = [setting for setting in IDLE if getattr(daemon, setting)]
        if idle:
            has = "is" if len(idle) == 1 else "are"
            text = f"{', '.join(idle)} {has} set, and security is off: whoever connects may do everything"
            yield warning(SETTINGS, text, "set security = true for all daemons, or remove this")
    elif daemon.tls_cert is None and not is_on_this_host(host):
        text = "security without certificates: who reads the network takes up tokens and sessions of others"
        yield warning(SETTINGS, text, "set tls_cert, tls_key and tls_ca: kera tls init makes them")


def _is_of_secret(error: KeraError, daemon: DaemonAccessSettings) -> bool:
    """Return whether the check of the secret file itself reports the error."""
    return daemon.cluster_secret_file is not None and error.attributes.get("path") == str(daemon.cluster_secret_file)


def _of_client(client: ClientSettings) -> Iterator[Finding]:
    try:
        secure(MACHINE, client)
    except KeraError as error:
        yield problem(SETTINGS, f"[client] {error.message}", "see docs/security.md")
