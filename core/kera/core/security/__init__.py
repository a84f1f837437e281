"""Who may talk to whom, and unheard by others: certificates and encryption. Cryptography itself is the libraries'."""

from kera.core.security.tls import ClientAuth, Tls, TlsFiles

__all__ = ["ClientAuth", "Tls", "TlsFiles"]
