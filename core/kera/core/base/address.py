"""Addresses: ``host:port`` as text, with an IPv6 host in brackets as in a URL, and why an address cannot be used."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl

from kera.core.errors import InvalidArgument

_HOST = re.compile(r"[^\s/@;,\[\]]+")
PORT_MAX = 65535
CLOSED_AT_ONCE = "it closes the connection at once; if it speaks TLS, set tls_ca"
"""The message for a client without TLS: a peer that speaks TLS closes its connection without a reply."""
_UNKNOWN_AUTHORITY = ("issuer certificate", "self signed", "self-signed")
_NO_TLS = "it does not speak TLS"
_NO_SAFE_TLS = "it speaks neither TLS 1.2 nor TLS 1.3"
_NO_CIPHER = "it has no cipher in common with this side"
_NOT_TAKEN = "it does not take this certificate"
_TLS_REASONS = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "HTTP_REQUEST": _NO_TLS,
    "HTTPS_PROXY_REQUEST": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "PACKET_LENGTH_TOO_LONG": _NO_TLS,
    "UNSUPPORTED_PROTOCOL": _NO_SAFE_TLS,
    "TLSV1_ALERT_PROTOCOL_VERSION": _NO_SAFE_TLS,
    "NO_SHARED_CIPHER": _NO_CIPHER,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "EXCESSIVE_MESSAGE_SIZE": "it shows more certificates than a chain has",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": f"{_NO_CIPHER}, or wants a certificate: see tls_cert and tls_key",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate: set tls_cert and tls_key",
    "TLSV1_ALERT_UNKNOWN_CA": f"{_NOT_TAKEN}: it is of an authority that it does not know",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": f"{_NOT_TAKEN}, which is not issued for this purpose",
    "SSLV3_ALERT_BAD_CERTIFICATE": f"{_NOT_TAKEN}: it is damaged, or not yet valid",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _NOT_TAKEN,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": f"{_NOT_TAKEN}, which has expired",
    "TLSV1_ALERT_DECRYPT_ERROR": f"{_NOT_TAKEN}: another authority than it names has signed it",
}
"""The reasons by OpenSSL's names for them."""
_REFUSALS = frozenset(name for name, text in _TLS_REASONS.items() if "ALERT" in name and "certificate" in text)
UNIX_PATH_BYTES_MAX = 100
"""The kernel takes 107; a data directory deeper than that gets its socket in the directory for temporary files."""


def join_address(host: str, port: int) -> str:
    """``host:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of `address`. Raises `InvalidArgument`."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if (
        not host
        or not _HOST.fullmatch(host)
        or (":" in host and not bracketed)
        or not (port.isascii() and port.isdigit())
        or int(port) > PORT_MAX
    ):
        raise InvalidArgument(f"{address!r} is not an address (host:port){_way_out(address)}", address=address)
    return host, int(port)


def is_everywhere(host: str) -> bool:
    """Return whether `host` means all addresses of this host: a daemon can listen there, but no peer can connect."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def advertised_address(advertised: str, host: str, port: int) -> str:
    """Return the address at which others reach a daemon that listens at `host` and `port`.

    `advertised` overrides it: as ``host:port``, or as a host, to which `port` is added. Raises `InvalidArgument` if
    `advertised` is neither, or if no other host could connect to the result.
    """
    if not advertised:
        address = join_address(host, port)
    elif _is_host(advertised):
        address = join_address(advertised.strip("[]"), port)
    else:
        address = advertised
    told_host, told_port = split_address(address)
    if is_everywhere(told_host) or not told_port:
        named = told_host if is_everywhere(told_host) else address
        raise InvalidArgument(
            f"other hosts cannot reach {named}; set advertised_address to an address of this host", address=address
        )
    return address


def host_of(advertised: str) -> str:
    """Return the host that an advertised address names; empty: none."""
    return advertised if _is_host(advertised) else split_address(advertised)[0]


def _is_host(text: str) -> bool:
    """Return whether `text` is a name or an address without a port."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return ":" not in text
    return True


def _way_out(address: str) -> str:  # noqa: PLR0911 - one for each mistake
    """Return a hint about the mistake in an address, if it is a known one."""
    scheme, separator, rest = address.partition("://")
    if separator:
        return f"; give it without {scheme + separator!r}: {rest.rstrip('/')!r}"
    if re.search(r"\s", address):
        return "; it has spaces; several addresses are separated by commas"
    if ";" in address:
        return "; several addresses are separated by commas"
    if "@" in address:
        return "; there is no user in it"
    if "/" in address:
        return "; nothing follows the port"
    if address.count(":") > 1 and "]:" not in address:
        return "; an IPv6 host goes in brackets, as in '[::1]:7400'"
    host, _, port = address.rpartition(":")
    if ":" not in address:
        return f"; it has no port, as in '{address or 'localhost'}:7400'"
    if not host:
        return "; it has no host"
    return f"; a port is a number from 0 to {PORT_MAX}" if port else "; it has no port"


def refuses_certificate(error: ssl.SSLError) -> bool:
    """Return whether the peer refused the connection because of this process's certificate, or for lack of one."""
    return error.reason in _REFUSALS


def tls_reason(name: str) -> str:
    """Return why a handshake has failed, by OpenSSL's name for it."""
    return _TLS_REASONS.get(name, f"TLS failed: {name}")


def not_taken(why: str) -> str:
    """Return the reason why a peer's certificate is not accepted; `why`: a library's message."""
    asked = "; is its authority in tls_ca?" if any(words in why for words in _UNKNOWN_AUTHORITY) else ""
    return f"its certificate is not accepted: {why}{asked}"


def reason_of(error: OSError) -> str:
    """Return the reason in the words of the operating system or of TLS, without what an event loop adds to them."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return not_taken(error.verify_message)
    if isinstance(error, ssl.SSLError):
        return tls_reason(error.reason or str(error))
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
