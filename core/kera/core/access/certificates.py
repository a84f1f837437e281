"""Authentication by certificate: patterns over the names in the certificate.

A certificate names its subject, as text (``CN=alice,O=Example``, RFC 4514), and other names: ``DNS:host``,
``URI:spiffe://…``, ``IP:10.0.0.1``, ``EMAIL:…``. A pattern is a regular expression that has to match one of these names
as a whole; its group ``user`` matches the name of the user. TLS has verified the certificate before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from kera.core.access.identity import check_name
from kera.core.errors import InvalidArgument

DAEMON_NAME = "urn:kera:daemon"
"""The name that ``kera tls init`` writes into the certificates of hosts."""
DAEMONS = (f"URI:{re.escape(DAEMON_NAME)}",)
"""Default patterns of certificates of daemons."""
USERS = (r"CN=(?P<user>[^,+]+)(?:[,+].*)?",)
"""Default patterns of certificates of users: the common name is the user's name."""
NAME_CHARS_MAX = 1024
"""Longer names match nothing, which bounds the time that matching takes."""
NAMES_MAX = 64
CACHED_MAX = 1024


class CertificateNames(NamedTuple):
    """The patterns of one daemon."""

    daemons: tuple[re.Pattern[str], ...]
    users: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, daemons: Iterable[str], users: Iterable[str]) -> CertificateNames:
        """Compile the patterns. Raises `InvalidArgument` for an invalid one, or one of users without the group."""
        patterns = cls(tuple(map(_pattern, daemons)), tuple(map(_pattern, users)))
        for pattern in patterns.users:
            if "user" not in pattern.groupindex:
                raise InvalidArgument(f"{pattern.pattern!r} has no group (?P<user>…) for the user's name")
        return patterns

    def is_daemon(self, names: Sequence[str]) -> bool:
        """Return whether a certificate with these names is a daemon's."""
        return any(pattern.fullmatch(name) for pattern in self.daemons for name in names)

    def user(self, names: Sequence[str]) -> str:
        """Return the user of a certificate with these names; empty: none."""
        for pattern in self.users:
            for name in names:
                found = pattern.fullmatch(name)
                if found is not None and found["user"]:
                    try:
                        return check_name("user", found["user"])
                    except InvalidArgument:
                        continue
        return ""


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidArgument(f"{text!r} is not a valid regular expression: {error}") from error


@lru_cache(CACHED_MAX)
def names_in(certificate: bytes) -> tuple[str, ...]:
    """Return the names in a certificate (DER or PEM); none if it is invalid or unreadable."""
    from cryptography import x509  # noqa: PLC0415 - daemons have this library, but clients may not

    pem = certificate.lstrip().startswith(b"-----")
    try:
        read = x509.load_pem_x509_certificate(certificate) if pem else x509.load_der_x509_certificate(certificate)
        names = [read.subject.rfc4514_string()]
        try:
            others = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            others = x509.SubjectAlternativeName([])
        for kind, word in (
            (x509.UniformResourceIdentifier, "URI"),
            (x509.DNSName, "DNS"),
            (x509.RFC822Name, "EMAIL"),
            (x509.IPAddress, "IP"),
        ):
            names += [f"{word}:{value}" for value in others.get_values_for_type(kind)]
    except Exception:  # noqa: BLE001 - an unreadable certificate causes many errors, `TypeError` among them
        return ()
    return tuple(name for name in names[:NAMES_MAX] if len(name) <= NAME_CHARS_MAX)
