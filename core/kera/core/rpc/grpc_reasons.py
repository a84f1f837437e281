"""Why there is no connection over gRPC, where TLS is the reason: gRPC's texts are long, and in the words of others.

A server of gRPC that refuses a handshake closes the connection and says nothing, so the caller has to look at its own
certificate to find out.
"""

from __future__ import annotations

import re

from kera.core.base.address import CLOSED_AT_ONCE, not_taken
from kera.core.security import Tls

WRONG_HOST = "call host does not match SSL server name"
"""For a certificate whose subject alone names a host, as was once usual; it comes with a status of its own."""
_CLOSED = ("Socket closed", "Connection reset by peer")
_VERIFICATION = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:;]+)")
_ANOTHER_HOST = not_taken("it is for another host")
_WORDS = {
    "Hostname Verification Check failed": _ANOTHER_HOST,
    "Peer name": _ANOTHER_HOST,
    WRONG_HOST: _ANOTHER_HOST,
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "missing selected ALPN": "it speaks TLS and not gRPC: that is another port, of frames or metrics",
    "NO_COMMON_SIGNATURE_ALGORITHMS": "one of the two certificates has a key of a kind that gRPC does not know; RSA"
    " will do, and EC with P-256 or P-384",
}


def reason_of_tls(details: str, tls: Tls | None) -> str:
    """`details`: what gRPC says. Empty: it is not about TLS."""
    found = _VERIFICATION.search(details)
    if found is not None:
        return not_taken(found[1])
    for words, reason in _WORDS.items():
        if words in details:
            return reason
    if not any(words in details for words in _CLOSED):
        return ""
    if tls is None:
        return CLOSED_AT_ONCE
    if tls.files.cert is None:
        return "it closes the connection at once; if it wants a certificate, set tls_cert and tls_key"
    text = f"it closes the connection at once, as if it did not take {tls.files.cert}"
    own = tls.own_refusal()
    return f"{text}: {own}" if own else f"{text}; its log says why"
