"""Proofs that a form is one of ours: a token that matches the browser's cookie, and that only the console can make.

The console stores nothing for tokens, so users who have not signed in take no memory. A foreign page can read neither
the token nor the cookie; see `kera.console.web.gate` for the other checks of a change.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

FIELD = "csrf"
_NONCE_BYTES = 24


class FormTokens:
    """Makes and checks tokens with one secret, which is valid while the process runs."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    @staticmethod
    def new_cookie() -> str:
        """Return a new cookie, for a browser without one."""
        return secrets.token_urlsafe(_NONCE_BYTES)

    def token(self, cookie: str) -> str:
        """Return the token of forms for a browser with this cookie."""
        return hmac.new(self._secret, cookie.encode(), hashlib.sha256).hexdigest()

    def is_good(self, cookie: str, token: str) -> bool:
        """Return whether a form's token is valid for the cookie."""
        return bool(cookie) and hmac.compare_digest(self.token(cookie).encode(), token.encode())
