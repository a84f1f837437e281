"""The certificates of a process: its own, and the authorities whose certificates it accepts from peers.

The files are read again when they have changed: each new connection uses their present content, and existing
connections go on. New files are ignored if they cannot be read, or do not belong together (half of a change was made),
or if peers would refuse the certificate (it has expired, or is of another authority or for another host) while they
accept the previous one. The process then keeps the previous files, and logs that, until the files are valid again.

TLS 1.2 is the minimum. A caller checks that the certificate is of an authority in `TlsFiles.ca` and names the host that
was called; a server asks for certificates as `TlsFiles.client_auth` says.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from time import monotonic

import grpc

from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.security.checking import own_refusal, unfit
from kera.core.security.files import InvalidTls, Loaded, TlsFiles, load

log = get_logger("kera.tls")

LOOK_EVERY_S = 1.0
"""Minimum time between two checks whether the files have changed."""


class Tls:
    """The TLS certificates of a process: it reloads changed files, and keeps the old ones when the new are invalid.

    May be used from several threads.
    """

    def __init__(self, files: TlsFiles, now_s: Callable[[], float] = monotonic) -> None:
        """Load the files. A certificate that peers would refuse is logged, but used. Raises `InvalidTls`."""
        self.files = files
        self._now_s = now_s
        self._loaded = load(files)
        self._looked_s = now_s()
        self._problem = ""
        self._failing = Repeated(log)
        self._unfit = self._unfitness(self._loaded)
        if self._unfit:
            log.warning("invalid certificate", reason=self._unfit)

    @property
    def version(self) -> bytes:
        """The digest of the files, which changes when they do."""
        return self._current().digest

    @property
    def problem(self) -> str:
        """Why new files are not accepted; empty: they are."""
        self._current()
        return self._problem

    @property
    def unfit(self) -> str:
        """Why peers refuse the certificate that this process shows; empty: they accept it."""
        self._current()
        return self._unfit

    @property
    def not_after_s(self) -> float | None:
        """Until when this process's certificate is valid, in seconds since 1970; None: unknown, or no certificate."""
        return self._current().not_after_s

    def server_context(self, *, only_asks: bool = False) -> ssl.SSLContext:
        """Return the context for the next incoming connection. Raises `InvalidTls` if there is no certificate.

        `only_asks`: peers without a certificate are admitted even if one is required; the caller restricts them.
        """
        loaded = self._current()
        context = loaded.asking if only_asks else loaded.server
        if context is None:
            raise InvalidTls("a server over TLS needs a certificate: set tls_cert and tls_key")
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context for the next outgoing connection."""
        return self._current().client

    def own_refusal(self) -> str:
        """Return why a peer may have refused this process's certificate; empty: this process sees no reason."""
        return own_refusal(self.files, self._current())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a server of gRPC, which fetches the present certificates at each connection.

        gRPC cannot ask for optional certificates, so with `optional` it asks for none.
        """
        given = b""

        def current() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            loaded = self._current()
            if loaded.digest == given:
                return None
            given = loaded.digest
            return _server_configuration(loaded, self.files)

        loaded = self._current()
        given = loaded.digest
        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(loaded, self.files),
            current,  # type: ignore[arg-type]  # None: nothing has changed
            require_client_authentication=self.files.client_auth == "required",
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a channel of gRPC, made of the present content of the files; see `version`."""
        loaded = self._current()
        return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)

    def _current(self) -> Loaded:
        now_s = self._now_s()
        if now_s >= self._looked_s + LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._loaded

    def _look(self) -> None:
        try:
            loaded = load(self.files, self._loaded)
            is_new = loaded is not self._loaded
            worse = self._unfitness(loaded) if is_new or self._unfit else ""
            if is_new and worse and not self._unfitness(self._loaded):
                self._not_taken(worse)
                return
        except InvalidTls as error:
            self._not_taken(error.message)
            return
        self._failing.over("certificates are accepted again")
        self._problem, self._unfit = "", worse
        if is_new:
            self._loaded = loaded
            log.info("certificates have changed")
            if worse:
                log.warning("invalid certificate", reason=worse)

    def _not_taken(self, problem: str) -> None:
        self._problem = problem
        self._failing.goes_on("certificates are not accepted; keeping the previous ones", reason=problem)

    def _unfitness(self, loaded: Loaded) -> str:
        return unfit(self.files, loaded) if self.files.names and loaded.cert is not None else ""


def _server_configuration(loaded: Loaded, files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    ca = loaded.ca if files.client_auth == "required" else None
    return grpc.ssl_server_certificate_configuration([(loaded.key or b"", loaded.cert or b"")], ca)
