"""The console's address and access, checked before it starts. Pure except for resolving hosts."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from kera.core.base.address import is_everywhere
from kera.core.base.settings import InvalidSettings
from kera.core.errors import InvalidArgument
from kera.core.security.settings import is_on_this_host

LOOPBACK_NAMES = ("localhost",)


@dataclass(frozen=True)
class ConsoleSettings:
    """Where the console listens, and what it allows."""

    host: str = "127.0.0.1"
    port: int = 7480
    """0: any free one."""
    admin: bool = False
    """Whether pages may change the cluster."""
    names: tuple[str, ...] = ()
    """Further names by which browsers may ask for the console."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    """Whether other hosts may reach the console even without TLS or without signing in."""

    @property
    def encrypted(self) -> bool:
        """Whether the console uses HTTPS."""
        return self.tls_cert is not None

    @property
    def known_as(self) -> frozenset[str]:
        """The names by which browsers may ask for the console; addresses are always allowed."""
        names = {each.strip().lower() for each in self.names}
        if is_on_this_host(self.host):
            names.update(LOOPBACK_NAMES)
        return frozenset(names if is_everywhere(self.host) else {*names, self.host.lower()})

    def check(self) -> None:
        """Raise `InvalidSettings` if settings do not fit together, or a name is invalid."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidSettings("--tls-cert and --tls-key belong together: give both")
        for name in self.names:
            if not name.strip() or any(letter in name for letter in "/:@ *"):
                raise InvalidSettings(f"--host {name!r} is not a host name: give it without scheme and port")

    def check_reach(self, *, secured: bool) -> None:
        """Raise `InvalidSettings` if other hosts need no TLS or no sign-in; `secured`: users must sign in."""
        if self.insecure or is_on_this_host(self.host) or (secured and self.encrypted):
            return
        missing = []
        if not self.encrypted:
            missing.append("what is sent there is not encrypted: give --tls-cert and --tls-key")
        if not secured:
            missing.append("security of the cluster is off, so anyone can use it without signing in")
        raise InvalidSettings(
            f"--listen {self.host}: other hosts reach it, and {', and '.join(missing)}. Listen at 127.0.0.1 behind"
            " an ssh tunnel or a proxy, or give --insecure, if only trusted users can reach it",
            host=self.host,
        )

    def tls(self) -> ssl.SSLContext | None:
        """Return the context for connections of browsers; None: no TLS. Raises `InvalidSettings` for invalid files."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSettings(
                f"--tls-cert {self.tls_cert}, --tls-key {self.tls_key}: {error.strerror or error}"
            ) from error
        return context


def _no_password() -> str:
    raise InvalidSettings("--tls-key has a password; give a key without one")


def parse_listen(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, ``[ADDRESS]:PORT`` or ``PORT`` into host and port. Raises `InvalidArgument`."""
    host, colon, port = text.rpartition(":")
    if not colon:
        host = "127.0.0.1"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
        raise InvalidArgument(f"--listen: {text!r} is not an address; write HOST:PORT, as 127.0.0.1:7480")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidArgument(f"--listen: {text!r}; write an IPv6 address in brackets, as [::1]:7480")
    if not host:
        raise InvalidArgument(f"--listen: {text!r} names no host; write 127.0.0.1:{port}, or 0.0.0.0:{port} for all")
    return host, int(port)


def url_of(settings: ConsoleSettings, port: int) -> str:
    """Return the console's URL for a browser."""
    host = settings.host
    if is_everywhere(host):
        host = next(iter(settings.names), "127.0.0.1")
    try:
        shown = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        shown = host
    return f"{'https' if settings.encrypted else 'http'}://{shown}:{port}/"
