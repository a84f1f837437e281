"""Encryption and certificates of connections. The cryptography itself is done by libraries."""

import kera.core.base.silent_grpc  # noqa: F401 - before `tls` imports gRPC
from kera.core.security.files import ClientAuth, InvalidTls, TlsFiles
from kera.core.security.tls import Tls

__all__ = ["ClientAuth", "InvalidTls", "Tls", "TlsFiles"]
