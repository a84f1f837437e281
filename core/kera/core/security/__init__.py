"""Encryption and certificates of connections. Cryptography itself is the libraries'."""

import kera.core.base.silent_grpc  # noqa: F401 - before `tls` imports gRPC
from kera.core.security.files import ClientAuth, InvalidTls, TlsFiles
from kera.core.security.tls import Tls

__all__ = ["ClientAuth", "InvalidTls", "Tls", "TlsFiles"]
