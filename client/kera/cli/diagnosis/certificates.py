"""Looks at the certificates that daemons are to have on this machine."""

from __future__ import annotations

import ssl
from pathlib import Path

from kera.cli.diagnosis.findings import Finding, ok, problem, warning
from kera.core.errors import KeraError
from kera.core.monitoring.certificates import lasting
from kera.core.monitoring.health import State
from kera.core.security import Tls, TlsFiles

SUBJECT = "certificate"
_HANDSHAKE_STEPS = 6


def certificates(cert: Path, key: Path | None, ca: Path | None, names: list[str], now_s: float) -> list[Finding]:
    """Whether they belong together, are good for longer, and are for all of `names`."""
    if key is None or ca is None:
        return [problem(SUBJECT, "--tls-cert, --tls-key and --tls-ca belong together", "give all of them")]
    try:
        tls = Tls(TlsFiles(cert, key, ca))
    except KeraError as error:
        return [problem(SUBJECT, error.message, "see docs/security.md; kera tls init makes some")]
    found = [_lasting(cert, tls.not_after_s, now_s)]
    for name in names:
        reason = refused(tls, name)
        if reason is None:
            found.append(ok(SUBJECT, f"{cert} is taken for {name}"))
        else:
            advice = "have one issued with the names and addresses at which others reach this host"
            found.append(problem(SUBJECT, f"{cert} is not taken for {name}: {reason}", advice))
    return found


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


def refused(tls: Tls, name: str) -> str | None:
    """Why a client that calls `name` does not take this certificate; None: it does."""
    ends = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.client_context().wrap_bio(ends[0], ends[1], server_hostname=name)
    server = tls.server_context().wrap_bio(ends[1], ends[0], server_side=True)
    for _ in range(_HANDSHAKE_STEPS):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return error.reason or str(error)
    return None
