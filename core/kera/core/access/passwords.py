"""Passwords: SCRAM-SHA-256, in which each end only proves to the other that it knows the password.

Iterations and exchanges are bounded, so neither end can make the other compute for long.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from scramp import ScramClient, ScramException, ScramMechanism

from kera.core.base.crowd import Crowd
from kera.core.errors import AuthenticationFailed, InvalidArgument, KeraError
from kera.v1 import access_pb2 as messages

MECHANISM = "SCRAM-SHA-256"
ITERATIONS = 15_000
"""RFC 7677 asks for at least 4,096, and for more where that is affordable; these cost a client some 5 ms."""
ITERATIONS_MIN = 4_096
ITERATIONS_MAX = 1_000_000
"""Maximum that a client computes."""
PASSWORD_CHARS_MIN = 8
PASSWORD_CHARS_MAX = 1024
EXCHANGES_MAX = 1024
EXCHANGE_S = 10.0
NONCE_BYTES = 16
MESSAGE_BYTES_MAX = 4096
"""Maximum of a SCRAM message, as names and nonces are short."""

_COUNT = re.compile(r"[0-9]{1,9}")
_MECHANISM = ScramMechanism(MECHANISM)
_LookedUp = tuple[bytes, bytes, bytes, int]
"""Salt, both keys, iterations."""
REFUSED = "the user name or the password is not right"


def verifier_for(password: str, *, iterations: int = ITERATIONS, salt: bytes | None = None) -> messages.ScramVerifier:
    """Return the verifier that a server stores for a password. Raises `InvalidArgument` for an invalid password."""
    check_password(password)
    try:
        salt, stored_key, server_key, count = _MECHANISM.make_auth_info(password, iteration_count=iterations, salt=salt)
    except ScramException as error:
        raise InvalidArgument("the password has characters that passwords cannot have") from error
    return messages.ScramVerifier(salt=salt, stored_key=stored_key, server_key=server_key, iterations=count)


def check_password(password: str) -> str:
    """Return `password`. Raises `InvalidArgument` if it is too short or too long."""
    if not PASSWORD_CHARS_MIN <= len(password) <= PASSWORD_CHARS_MAX:
        raise InvalidArgument(
            f"a password has {PASSWORD_CHARS_MIN} to {PASSWORD_CHARS_MAX} characters, and this one has {len(password)}"
        )
    return password


def check_verifier(verifier: messages.ScramVerifier) -> None:
    """Raise `InvalidArgument` for a verifier that no client could satisfy."""
    if not (
        len(verifier.stored_key) == len(verifier.server_key) == hashlib.sha256().digest_size
        and 12 <= len(verifier.salt) <= 64
        and ITERATIONS_MIN <= verifier.iterations <= ITERATIONS_MAX
    ):
        raise InvalidArgument("invalid SCRAM-SHA-256 verifier: set the user's password again")


class Login:
    """The calling end of one exchange. Raises `AuthenticationFailed` if the other end does not know the password."""

    def __init__(self, user: str, password: str) -> None:
        self._client: Any = ScramClient([MECHANISM], user, password)

    def first(self) -> bytes:
        """Return the first message."""
        return str(self._client.get_client_first()).encode()

    def final(self, server_first: bytes) -> bytes:
        """Return the second message, for the answer to the first one."""
        try:
            text = server_first.decode()
            count = next((part[2:] for part in text.split(",") if part.startswith("i=")), "")
            if not _COUNT.fullmatch(count) or int(count) > ITERATIONS_MAX:
                raise AuthenticationFailed(f"the server asks for {count[:20] or 'no'} iterations")
            self._client.set_server_first(text)
            return str(self._client.get_client_final()).encode()
        except (ScramException, UnicodeDecodeError) as error:
            raise AuthenticationFailed(
                f"the server sent an invalid message in the password exchange: {error}"
            ) from error

    def check(self, server_final: bytes) -> None:
        """Check that the server knows the password, too."""
        try:
            self._client.set_server_final(server_final.decode())
        except (ScramException, UnicodeDecodeError) as error:
            raise AuthenticationFailed("the server does not know the password: it is not the one it says") from error


class Known(NamedTuple):
    """A user that has proved to know a password."""

    user: str
    answer: bytes
    verifier: messages.ScramVerifier
    """Verifier of the password that was shown."""


class _Exchange(NamedTuple):
    servers: Sequence[Any]
    """A server for each verifier; all have sent the same first answer. If there is no verifier, a decoy."""
    user: str
    verifiers: Sequence[messages.ScramVerifier]
    peer: object
    until_s: float


class Logins:
    """The answering end: exchanges that have begun. If there are too many, the host with the most loses its oldest."""

    def __init__(
        self,
        verifiers_of: Callable[[str], Sequence[messages.ScramVerifier]],
        now_s: Callable[[], float],
        *,
        exchanges_max: int = EXCHANGES_MAX,
        decoys: Callable[[], bytes] = bytes,
    ) -> None:
        """`verifiers_of`: returns verifiers for a user's alternative passwords; all have the same salt and iterations.

        `decoys`: random bytes that all daemons share. With them, a peer without the password cannot tell nonexistent
        users from existing ones; without them, it cannot only as long as it asks a single daemon.
        """
        self._verifiers_of = verifiers_of
        self._now_s = now_s
        self._exchanges: dict[int, _Exchange] = {}
        self._crowd = Crowd[int](exchanges_max)
        self._decoys = decoys
        self._own_decoys = secrets.token_bytes(32)

    def begin(self, client_first: bytes, peer: object, host: str = "") -> tuple[int, bytes]:
        """Begin an exchange; return its id and the answer.

        Raises `AuthenticationFailed`, and the errors of `verifiers_of`.
        """
        user = ""
        verifiers: Sequence[messages.ScramVerifier] = ()
        refusal: KeraError | None = None

        def look_up(name: str) -> _LookedUp:
            nonlocal user, verifiers, refusal
            try:
                user, verifiers = name, self._verifiers_of(name)
            except KeraError as error:
                refusal = error
                raise
            decoy = self._decoy(name)  # for all users, so that the time of an answer reveals nothing
            return _looked_up(verifiers[0] if verifiers else decoy, name)

        text, nonce = _text(client_first), secrets.token_hex(NONCE_BYTES)
        try:
            servers = [_begun(look_up, nonce, text)]
            servers += [_begun(partial(_looked_up, one), nonce, text) for one in verifiers[1:]]
            answer = str(servers[0].server_first).encode()
        except ScramException as error:
            if refusal is not None:
                raise refusal from None
            raise AuthenticationFailed(
                f"invalid first message: expected {MECHANISM} without channel binding"
            ) from error
        exchange_id = secrets.randbits(63) | 1
        crowded_out = self._crowd.add(exchange_id, host)
        if crowded_out is not None:
            del self._exchanges[crowded_out]
        self._exchanges[exchange_id] = _Exchange(servers, user, verifiers, peer, self._now_s() + EXCHANGE_S)
        return exchange_id, answer

    def end(self, exchange_id: int, client_final: bytes, peer: object) -> Known:
        """End an exchange; return the user whose password the peer knows, and the answer.

        Raises `AuthenticationFailed`.
        """
        exchange = self._exchanges.pop(exchange_id, None)
        self._crowd.remove(exchange_id)
        if exchange is None or exchange.peer != peer or self._now_s() >= exchange.until_s:
            raise AuthenticationFailed("this password exchange is over; start a new one")
        text = _text(client_final)
        for server, verifier in zip_longest(exchange.servers, exchange.verifiers):
            with contextlib.suppress(ScramException):
                server.set_client_final(text)
                answer = str(server.get_server_final()).encode()
                if verifier is not None:
                    return Known(exchange.user, answer, verifier)
        raise AuthenticationFailed(REFUSED, user=exchange.user)

    def _decoy(self, name: str) -> messages.ScramVerifier:
        secret = self._decoys() or self._own_decoys
        salt, stored_key, server_key = (
            hmac.digest(secret, part + name.encode(), "sha256") for part in (b"salt", b"stored", b"server")
        )
        return messages.ScramVerifier(salt=salt, stored_key=stored_key, server_key=server_key, iterations=ITERATIONS)


def _begun(look_up: Callable[[str], _LookedUp], nonce: str, client_first: str) -> Any:
    """Return a server that has answered the first message. Raises `ScramException`."""
    server: Any = _MECHANISM.make_server(look_up, s_nonce=nonce)
    server.set_client_first(client_first)
    server.get_server_first()
    return server


def _looked_up(verifier: messages.ScramVerifier, _: str) -> _LookedUp:
    """Return a verifier in the form that the mechanism expects."""
    return verifier.salt, verifier.stored_key, verifier.server_key, verifier.iterations


def _text(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise AuthenticationFailed(f"a message of {MECHANISM} of {len(message)} bytes is invalid")
    try:
        return message.decode()
    except UnicodeDecodeError as error:
        raise AuthenticationFailed(f"a message of {MECHANISM} is text") from error
