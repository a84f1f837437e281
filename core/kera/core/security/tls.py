"""The certificates of a process: its own, and the authorities whose certificates it takes from others.

The files are read anew when they have changed: each connection is made with what they hold then, and those that are
there already go on. Invalid ones are ignored: what cannot be read, or does not belong together (half of a change is
there), and what nobody else would take (it has expired, is of another authority or for another host) as long as what
was there before is better. The process goes on with that, and says so, until the files are good again.

TLS 1.2 at least. Whoever calls checks that the certificate is one of an authority in `TlsFiles.ca` and names the host
that was called; whoever serves asks for certificates as `TlsFiles.client_auth` says.
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
"""How often it is looked whether the files have changed, at most."""


class Tls:
    """The TLS certificates of a process: it reloads changed files, and keeps the old ones when the new are invalid.

    May be used from several threads.
    """

    def __init__(self, files: TlsFiles, now_s: Callable[[], float] = monotonic) -> None:
        """Raises `InvalidTls`. A certificate that others would not take is told of, and shown: there is no other."""
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
        """Changes when the files do."""
        return self._current().digest

    @property
    def problem(self) -> str:
        """Why new files are not accepted; empty: they are."""
        self._current()
        return self._problem

    @property
    def unfit(self) -> str:
        """Why others do not take the certificate that this process shows; empty: they do."""
        self._current()
        return self._unfit

    @property
    def not_after_s(self) -> float | None:
        """Until when this process's certificate is good, in seconds since 1970; None: it has none, or cannot tell."""
        return self._current().not_after_s

    def server_context(self, *, only_asks: bool = False) -> ssl.SSLContext:
        """For the next connection that somebody makes to this process. Raises `InvalidTls` without a certificate.

        `only_asks`: who shows no certificate is let in, though one is required; the caller sees to it what it gets.
        """
        loaded = self._current()
        context = loaded.asking if only_asks else loaded.server
        if context is None:
            raise InvalidTls("a server over TLS needs a certificate: set tls_cert and tls_key")
        return context

    def client_context(self) -> ssl.SSLContext:
        """For the next connection that this process makes."""
        return self._current().client

    def own_refusal(self) -> str:
        """Why a peer may not have taken this process's certificate, as far as that can be told here; else empty."""
        return own_refusal(self.files, self._current())

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server of gRPC, which asks for what the files hold at each connection.

        gRPC knows no certificates that are asked for and may be absent: `optional` has it ask for none.
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
        """For a channel of gRPC: of what the files hold now; see `version`."""
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
