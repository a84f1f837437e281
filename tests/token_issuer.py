"""An issuer of tokens for tests: its keys, its published key set, and valid and invalid tokens that it signs."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt.algorithms import get_default_algorithms

ISSUER, AUDIENCE = "https://issuer.example/realms/kera", "kera"
CURVES: dict[str, Callable[[], Any]] = {
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ES512": lambda: ec.generate_private_key(ec.SECP521R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
}


def private_key(algorithm: str, name: str = "") -> Any:
    """A key of a kind; each name always gets the same one, because making keys is slow."""
    return _private_key(algorithm, name)


@lru_cache
def _private_key(algorithm: str, name: str) -> Any:
    del name
    made = CURVES.get(algorithm)
    return made() if made else rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwk(key_id: str | None, algorithm: str, name: str = "", **changes: Any) -> dict[str, Any]:
    """The public key in the form that issuers publish."""
    signing = "EdDSA" if algorithm == "Ed448" else algorithm
    public = private_key(algorithm, name).public_key()
    document: dict[str, Any] = get_default_algorithms()[signing].to_jwk(public, as_dict=True)
    document = {**document, "use": "sig", "alg": signing, "kid": key_id, **changes}
    return {name: value for name, value in document.items() if value is not None}


def key_set(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def claims_of(user: str, now_s: float, **changes: Any) -> dict[str, Any]:
    """Claims for five minutes, with changes; a claim that is changed to None is left out."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": user, "iat": int(now_s), "exp": int(now_s) + 300, **changes}
    return {name: value for name, value in claims.items() if value is not None}


def signed(
    claims: dict[str, Any],
    algorithm: str = "ES256",
    key_id: str | None = "one",
    name: str = "",
    headers: dict[str, Any] | None = None,
) -> str:
    signing = "EdDSA" if algorithm == "Ed448" else algorithm
    given = {**({} if key_id is None else {"kid": key_id}), **(headers or {})}
    return jwt.encode(claims, private_key(algorithm, name), signing, given)


def encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def signed_bytes(claims: bytes, header: bytes = b'{"alg":"ES256","kid":"one"}') -> str:
    """Claims and a header that no library would make, with a valid signature."""
    text = f"{encoded(header)}.{encoded(claims)}"
    signature = get_default_algorithms()["ES256"].sign(text.encode(), private_key("ES256"))
    return f"{text}.{encoded(signature)}"


class Published:
    """A web server on this host that answers with keys, or by `answer`."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked = 0
        self.answer: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.url = ""
        self.released = threading.Event()
        """A slow answer waits for this event."""


@contextlib.contextmanager
def published(data: bytes, context: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[Published]:
    """A server of `data`, over TLS with `context`."""
    page = Published(data)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page.asked += 1
            if page.answer is not None:
                page.answer(self)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(page.data)))
            self.end_headers()
            self.wfile.write(page.data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Ignore clients that have gone: some tests are about them."""

    server = Server((host, 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    page.url = f"{'http' if context is None else 'https'}://{host}:{server.server_address[1]}/keys"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield page
    finally:
        page.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
