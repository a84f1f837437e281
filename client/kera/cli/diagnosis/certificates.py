"""Checks the certificates of daemons on this machine."""

from __future__ import annotations

import stat
from pathlib import Path

from kera.client.diagnosis.findings import Finding, ok, problem, warning
from kera.core.base.health import State
from kera.core.errors import KeraError
from kera.core.security import Tls, TlsFiles
from kera.core.security.checking import lasting, refusal

SUBJECT = "certificate"


def certificates(cert: Path, key: Path | None, ca: Path | None, names: list[str], now_s: float) -> list[Finding]:
    """Check that the files belong together, that the certificate expires late enough, and that it has all `names`."""
    if key is None or ca is None:
        return [problem(SUBJECT, "--tls-cert, --tls-key and --tls-ca belong together", "give all of them")]
    try:
        tls = Tls(TlsFiles(cert, key, ca, "required"))
    except KeraError as error:
        return [problem(SUBJECT, error.message, "see docs/security.md; kera tls init makes some")]
    found = [_lasting(cert, tls.not_after_s, now_s), *_readable_by_others(key)]
    for name in names:
        refused = refusal(tls.client_context(), tls.server_context(), name)
        if refused is None:
            found.append(ok(SUBJECT, f"{cert} is accepted for {name}"))
        elif refused.by_server:
            text = f"{cert} is not accepted when this host calls others: {refused.reason}"
            found.append(problem(SUBJECT, text, "have one issued for clients as well: daemons call each other"))
        else:
            is_name = "mismatch" in refused.reason
            advice = "have one issued with the names and addresses at which others reach this host"
            found.append(
                problem(
                    SUBJECT,
                    f"{cert} is not accepted for {name}: {refused.reason}",
                    advice if is_name else "have one issued for servers, by an authority of --tls-ca",
                )
            )
    return found


def _readable_by_others(key: Path) -> list[Finding]:
    mode = stat.S_IMODE(key.expanduser().stat().st_mode)
    if not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return []
    text = f"{key} can be read by others than its owner (mode {mode:o}): whoever has it can be this host"
    return [warning(SUBJECT, text, f"chmod 600 {key}, unless they are to run daemons")]


def _lasting(cert: Path, not_after_s: float | None, now_s: float) -> Finding:
    if not_after_s is None:
        return ok(SUBJECT, f"{cert} and its key belong together")
    state, text = lasting(cert, not_after_s, now_s)
    match state:
        case State.PROBLEM:
            return problem(SUBJECT, text, "have a new one issued")
        case State.WARNING:
            return warning(SUBJECT, text, "have a new one issued soon")
        case State.OK:
            return ok(SUBJECT, text)
