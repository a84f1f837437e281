"""Checks in advance whether peers would accept a certificate, by a handshake with ourselves in memory.

So OpenSSL itself gives the answer, about the time, authorities, names, and the purposes of a certificate.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kera.core.base.health import Observation, concern, well, wrong
from kera.core.security.files import Loaded, TlsFiles, calling, identify, serving

_STEPS = 6
"""More than a handshake has."""
WARNED_DAYS = 30
_DAY_S = 86_400


class Refusal(NamedTuple):
    """The refusal of one end's certificate by the other."""

    by_server: bool
    reason: str
    """In OpenSSL's words."""


def refusal(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> Refusal | None:
    """Return why a handshake fails when the client calls `name`; None: it succeeds."""
    ends = ssl.MemoryBIO(), ssl.MemoryBIO()
    calls = client.wrap_bio(ends[0], ends[1], server_hostname=name)
    serves = server.wrap_bio(ends[1], ends[0], server_side=True)
    for _ in range(_STEPS):
        for end in (calls, serves):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return Refusal(end is serves, error.verify_message)
            except ssl.SSLError as error:
                return Refusal(end is serves, error.reason or str(error))
    return None


def unfit(files: TlsFiles, loaded: Loaded) -> str:
    """Return why peers with the same authorities would refuse a daemon's certificate; empty: they would accept it.

    Daemons call each other, so it is also checked as a client's certificate, if servers ask for one.
    """
    asks = files.client_auth != "none"
    server = serving(files, loaded.cert, loaded.key, loaded.ca, ssl.CERT_REQUIRED if asks else ssl.CERT_NONE)
    client = calling(files, loaded.ca)
    if asks:
        identify(client, files, loaded.cert, loaded.key)
    for name in files.names:
        found = refusal(client, server, name)
        if found is None:
            continue
        if found.by_server:
            return f"others would not take {files.cert} when this daemon calls them: {found.reason}"
        return f"others would not take {files.cert} when they call {name}: {found.reason}"
    return ""


def own_refusal(files: TlsFiles, loaded: Loaded) -> str:
    """Return why servers with the same authorities would refuse this process's certificate; empty: they would not."""
    if loaded.cert is None:
        return ""
    client = calling(files, loaded.ca)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # here a client's certificate also stands in for the server's
    identify(client, files, loaded.cert, loaded.key)
    found = refusal(client, serving(files, loaded.cert, loaded.key, loaded.ca, ssl.CERT_REQUIRED), None)
    return "" if found is None else found.reason


def lasting(cert: Path | None, not_after_s: float, now_s: float) -> Observation:
    """Return whether a certificate is valid, and for long enough; times are in seconds since 1970.

    The caller adds what to do about it.
    """
    day = f"{datetime.fromtimestamp(not_after_s, UTC):%Y-%m-%d %H:%M} UTC"
    left_days = (not_after_s - now_s) / _DAY_S
    if left_days <= 0:
        return wrong(f"{cert} expired on {day} and is refused")
    text = f"{cert} is valid until {day}"
    return concern(text) if left_days < WARNED_DAYS else well(text)
