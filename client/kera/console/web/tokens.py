"""A proof that a form is one of ours: a text that goes with the browser's cookie, and that only we can make.

Nothing is kept for it: who has not signed in costs no memory. A page of somebody else's can neither read the text nor
the cookie; see `kera.console.web.gate` for what else a change has to have.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

FIELD = "csrf"
_NONCE_BYTES = 24


class FormTokens:
    """Made and checked by one secret, for as long as the process runs."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    @staticmethod
    def new_cookie() -> str:
        """For a browser that has none."""
        return secrets.token_urlsafe(_NONCE_BYTES)

    def token(self, cookie: str) -> str:
        """The token of forms for a browser with this cookie."""
        return hmac.new(self._secret, cookie.encode(), hashlib.sha256).hexdigest()

    def is_good(self, cookie: str, token: str) -> bool:
        """Whether a form has what it should."""
        return bool(cookie) and hmac.compare_digest(self.token(cookie).encode(), token.encode())
