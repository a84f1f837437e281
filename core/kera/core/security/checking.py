"""Whether others would take a certificate: found out in advance, by shaking hands with oneself in memory.

So the answer is OpenSSL's own: about time, authorities, names, and what a certificate is issued for.
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
    """Why the two do not come together when the client calls `name`; None: they do."""
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
    """Why others who trust the same authorities would not take a daemon's certificate; empty: they would.

    Daemons call each other, and show it then as well, if that is asked for.
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
    """Why who trusts the same authorities would not take this process's certificate when it calls; empty: it would."""
    if loaded.cert is None:
        return ""
    client = calling(files, loaded.ca)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # a client's certificate is none of a server, and stands in for one here
    identify(client, files, loaded.cert, loaded.key)
    found = refusal(client, serving(files, loaded.cert, loaded.key, loaded.ca, ssl.CERT_REQUIRED), None)
    return "" if found is None else found.reason


def lasting(cert: Path | None, not_after_s: float, now_s: float) -> Observation:
    """Whether a certificate is good, and for long enough, by seconds since 1970. What to do is left to who tells it."""
    day = f"{datetime.fromtimestamp(not_after_s, UTC):%Y-%m-%d %H:%M} UTC"
    left_days = (not_after_s - now_s) / _DAY_S
    if left_days <= 0:
        return wrong(f"{cert} expired on {day} and is refused")
    text = f"{cert} is valid until {day}"
    return concern(text) if left_days < WARNED_DAYS else well(text)
