"""Sources of the keys of an issuer of tokens (a JSON web key set): a file, or an address that is read over HTTPS.

Reading may take long, so it is done on a thread. It ends in any case, and the size is bounded. Only the address in the
settings is used: no redirects, no proxies, and no addresses that are in a token.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from kera.core.base.home import expanded
from kera.core.base.strict_json import shown
from kera.core.errors import InvalidArgument

KEYS_BYTES_MAX = 256 << 10
"""Maximum of a key set, with room for hundreds of keys."""
CONNECT_S = 5.0
"""Time for a connection, for its handshake, and for each piece of an answer."""
FETCH_S = 10.0
"""Time for an answer, from the connection to its last byte."""


class NotRead(Exception):
    """The keys could not be read; its text says why."""


class ReadIntervals(NamedTuple):
    """The intervals in which keys are read."""

    refresh_s: float
    """Time between two reads."""
    unknown_s: float
    """The same, after a token has named an unknown key."""
    failed_s: float
    """The same, after a read has failed."""


class KeysSource(Protocol):
    """A source of keys."""

    @property
    def pace(self) -> ReadIntervals:
        """How often to read."""
        ...

    def read(self) -> bytes:
        """Read the keys. Raises `NotRead`."""
        ...


def keys_source(text: str, *, fetch_s: float = FETCH_S) -> KeysSource:
    """Return the source that the setting names. Raises `InvalidArgument`."""
    return UrlSource(text, fetch_s=fetch_s) if "://" in text else FileSource(expanded(Path(text)))


class FileSource:
    """A file."""

    pace = ReadIntervals(refresh_s=1.0, unknown_s=0.2, failed_s=1.0)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> bytes:
        """See `KeysSource.read`."""
        try:
            # Not blocking: a pipe without a writer would block the thread for ever.
            with os.fdopen(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise NotRead("it is not a file")
                data = file.read(KEYS_BYTES_MAX + 1)
        except OSError as error:
            raise NotRead(error.strerror or "it cannot be read") from error
        return _checked(data)


class UrlSource:
    """An address, ``https://…``, or ``http://…`` on this host. The authorities are those of the operating system."""

    pace = ReadIntervals(refresh_s=300.0, unknown_s=30.0, failed_s=10.0)

    def __init__(self, url: str, *, fetch_s: float = FETCH_S) -> None:
        """Raises `InvalidArgument`."""
        self._url = url
        self._fetch_s = fetch_s
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidArgument(f"{url!r} is not an address: {error}") from error
        self._encrypted = parts.scheme == "https"
        if not self._host or not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidArgument(f"{url!r} is not an address: https://HOST/PATH")
        if "@" in parts.netloc:
            raise InvalidArgument("an address must not have a user name or a password: key sets are public")
        if not (self._encrypted or (parts.scheme == "http" and _is_loopback(self._host))):
            raise InvalidArgument(
                f"{url!r}: another host on the network path could replace the keys; use https://, or http:// on this"
                " host, or the path of a file"
            )
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def __str__(self) -> str:
        return self._url

    def read(self) -> bytes:
        """See `KeysSource.read`."""
        connection, late = self._connection(), threading.Event()
        try:
            connection.connect()
            connection.sock.settimeout(CONNECT_S)
            watch = threading.Timer(self._fetch_s, _cut, (connection.sock, late))
            watch.daemon = True
            watch.start()
            try:
                data = self._answer(connection)
            finally:
                watch.cancel()
        except (OSError, http.client.HTTPException, NotRead) as error:
            if late.is_set():
                raise NotRead(self._late) from error
            raise error if isinstance(error, NotRead) else NotRead(_reason(error)) from error
        finally:
            connection.close()
        if late.is_set():
            raise NotRead(self._late)  # the data may be incomplete
        return data

    @property
    def _late(self) -> str:
        return f"there was no whole answer within {self._fetch_s:g} s"

    def _connection(self) -> http.client.HTTPConnection:
        timeout_s = min(CONNECT_S, self._fetch_s)
        if not self._encrypted:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=context)

    def _answer(self, connection: http.client.HTTPConnection) -> bytes:
        connection.request("GET", self._target, headers={"Accept": "application/json", "Connection": "close"})
        with connection.getresponse() as response:
            if response.status in {301, 302, 303, 307, 308}:
                to = shown(response.headers.get("Location", ""))
                raise NotRead(f"it redirects, which is not allowed: {response.status} to {to}")
            if response.status != http.client.OK:
                raise NotRead(f"it answers {response.status} {shown(response.reason)}")
            data = _checked(response.read(KEYS_BYTES_MAX + 1))
            if response.length:
                raise NotRead("its answer was cut off")
            return data


def _checked(data: bytes) -> bytes:
    if len(data) > KEYS_BYTES_MAX:
        raise NotRead(f"it has more than {KEYS_BYTES_MAX} bytes, and is not a key set")
    return data


def _cut(sock: socket.socket, late: threading.Event) -> None:
    """End an answer that takes too long, even if each single read is fast enough."""
    late.set()
    with contextlib.suppress(OSError):  # the connection has just ended
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # bypasses TLS, which another thread is using


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "there was no answer in time"
    if isinstance(error, http.client.HTTPException):
        return f"it does not answer as HTTP does: {type(error).__name__}"
    return str(getattr(error, "strerror", "") or error)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
