"""Passwords: SCRAM-SHA-256, by which neither end learns more of them than that the other one knows them.

Iterations and exchanges are bounded, so nobody can have the other end compute for long.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from scramp import ScramClient, ScramException, ScramMechanism

from kera.core.errors import AuthenticationFailed, InvalidArgument, KeraError
from kera.v1 import access_pb2 as messages

MECHANISM = "SCRAM-SHA-256"
ITERATIONS = 15_000
"""RFC 7677 asks for 4,096 at least, and for more where it can be afforded: some 5 ms of who logs in."""
ITERATIONS_MIN = 4_096
ITERATIONS_MAX = 1_000_000
"""That a client carries out."""
PASSWORD_CHARS_MIN = 8
PASSWORD_CHARS_MAX = 1024
EXCHANGES_MAX = 1024
EXCHANGE_S = 10.0
MESSAGE_BYTES_MAX = 4096
"""Of SCRAM's: names and nonces are short."""

_MECHANISM = ScramMechanism(MECHANISM)
_REFUSED = "the user name or the password is not right"


def verifier_for(password: str, *, iterations: int = ITERATIONS) -> messages.ScramVerifier:
    """What a server has to know of a password. Raises `InvalidArgument` for one that is none."""
    check_password(password)
    try:
        salt, stored_key, server_key, count = _MECHANISM.make_auth_info(password, iteration_count=iterations)
    except ScramException as error:
        raise InvalidArgument("the password has characters that passwords cannot have") from error
    return messages.ScramVerifier(salt=salt, stored_key=stored_key, server_key=server_key, iterations=count)


def check_password(password: str) -> str:
    """Raises `InvalidArgument` for one that is none."""
    if not PASSWORD_CHARS_MIN <= len(password) <= PASSWORD_CHARS_MAX:
        raise InvalidArgument(
            f"a password has {PASSWORD_CHARS_MIN} to {PASSWORD_CHARS_MAX} characters, and this one has {len(password)}"
        )
    return password


def check_verifier(verifier: messages.ScramVerifier) -> None:
    """Raises `InvalidArgument` for one that no client could show the password for."""
    if not (
        len(verifier.stored_key) == len(verifier.server_key) == hashlib.sha256().digest_size
        and 12 <= len(verifier.salt) <= 64
        and ITERATIONS_MIN <= verifier.iterations <= ITERATIONS_MAX
    ):
        raise InvalidArgument("that is nothing a SCRAM-SHA-256 password could be checked against")


class Login:
    """The calling end of one exchange. Raises `AuthenticationFailed` where the other end does not know the password."""

    def __init__(self, user: str, password: str) -> None:
        self._client: Any = ScramClient([MECHANISM], user, password)

    def first(self) -> bytes:
        """The first message."""
        return str(self._client.get_client_first()).encode()

    def final(self, server_first: bytes) -> bytes:
        """The second one, for the answer to the first."""
        try:
            text = server_first.decode()
            count = next((part[2:] for part in text.split(",") if part.startswith("i=")), "")
            if not count.isdigit() or int(count) > ITERATIONS_MAX:
                raise AuthenticationFailed(f"the server asks for {count or 'no'} iterations")
            self._client.set_server_first(text)
            return str(self._client.get_client_final()).encode()
        except (ScramException, UnicodeDecodeError) as error:
            raise AuthenticationFailed(f"the server's part of the password exchange makes no sense: {error}") from error

    def check(self, server_final: bytes) -> None:
        """Whether the server knows the password, too."""
        try:
            self._client.set_server_final(server_final.decode())
        except (ScramException, UnicodeDecodeError) as error:
            raise AuthenticationFailed("the server does not know the password: it is not the one it says") from error


class _Exchange(NamedTuple):
    server: Any
    user: str
    known: bool
    peer: object
    until_s: float


class Logins:
    """The answering end: exchanges that have begun, of which the oldest make room for new ones."""

    def __init__(
        self,
        verifier_of: Callable[[str], messages.ScramVerifier | None],
        now_s: Callable[[], float],
        *,
        exchanges_max: int = EXCHANGES_MAX,
    ) -> None:
        self._verifier_of = verifier_of
        self._now_s = now_s
        self._exchanges_max = exchanges_max
        self._exchanges: OrderedDict[int, _Exchange] = OrderedDict()
        self._decoy = secrets.token_bytes(32)
        """For users that are not there: to who does not know a password, they look like others."""

    def begin(self, client_first: bytes, peer: object) -> tuple[int, bytes]:
        """The id of an exchange, and the answer. Raises `AuthenticationFailed`, and what `verifier_of` does."""
        user, known = "", False
        refusal: KeraError | None = None

        def look_up(name: str) -> tuple[bytes, bytes, bytes, int]:
            nonlocal user, known, refusal
            try:
                user, verifier = name, self._verifier_of(name)
            except KeraError as error:
                refusal = error
                raise
            known = verifier is not None
            if verifier is None:
                salt, stored, server_key = (
                    hmac.digest(self._decoy, part + name.encode(), "sha256") for part in (b"salt", b"stored", b"server")
                )
                return salt, stored, server_key, ITERATIONS
            return verifier.salt, verifier.stored_key, verifier.server_key, verifier.iterations

        server: Any = _MECHANISM.make_server(look_up)
        try:
            server.set_client_first(_text(client_first))
            answer = str(server.get_server_first()).encode()
        except ScramException as error:
            if refusal is not None:
                raise refusal from None
            raise AuthenticationFailed(f"that is no beginning of {MECHANISM} without channel binding") from error
        while len(self._exchanges) >= self._exchanges_max:
            self._exchanges.popitem(last=False)
        exchange_id = secrets.randbits(63) | 1
        self._exchanges[exchange_id] = _Exchange(server, user, known, peer, self._now_s() + EXCHANGE_S)
        return exchange_id, answer

    def end(self, exchange_id: int, client_final: bytes, peer: object) -> tuple[str, bytes]:
        """Who knows the password of which user, and the answer. Raises `AuthenticationFailed`."""
        exchange = self._exchanges.pop(exchange_id, None)
        if exchange is None or exchange.peer != peer or self._now_s() >= exchange.until_s:
            raise AuthenticationFailed("this password exchange is not under way; begin it anew")
        try:
            exchange.server.set_client_final(_text(client_final))
            answer = str(exchange.server.get_server_final()).encode()
        except ScramException as error:
            raise AuthenticationFailed(_REFUSED, user=exchange.user) from error
        if not exchange.known:
            raise AuthenticationFailed(_REFUSED, user=exchange.user)
        return exchange.user, answer


def _text(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise AuthenticationFailed(f"a message of {MECHANISM} of {len(message)} bytes is none")
    try:
        return message.decode()
    except UnicodeDecodeError as error:
        raise AuthenticationFailed(f"a message of {MECHANISM} is text") from error
