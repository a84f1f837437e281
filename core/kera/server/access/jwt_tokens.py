"""Tokens of other issuers: JSON web tokens, whose signature is verified with the issuer's public keys.

A token establishes an identity if its issuer has signed it, with a key and an algorithm of `jwt_keys`, for this cluster
(its audience), and it has not expired. Other content is ignored, above all addresses of keys (``jku``, ``x5u``) and
keys (``jwk``). PyJWT verifies tokens, after their size was checked and their JSON found to be unambiguous.

A verified token is remembered until it expires or the issuer's keys change, as over gRPC each call shows it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

from jwt import PyJWS
from jwt.exceptions import InvalidSignatureError, PyJWTError

from kera.core.access.identity import Identity, check_name
from kera.core.base.clock import Clock
from kera.core.base.strict_json import parsed_object, shown
from kera.core.errors import AuthenticationFailed, InvalidArgument
from kera.server.access.jwt_keys import ALGORITHMS, Key

TOKEN_BYTES_MAX = 16 << 10
EXPIRES_S_MAX = 1 << 40
"""Latest valid time, in seconds since 1970; a later one is an error."""
REMEMBERED_MAX = 4096
MINUTE_S, HOUR_S = 60.0, 3600.0
_PARTS = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")


class JwtRules(NamedTuple):
    """Which tokens are accepted, and which of their claims are used."""

    issuer: str
    audience: str
    user_claim: str = "sub"
    roles_claim: str = "roles"
    """Paths of claims, with dots for nested ones."""
    leeway_s: float = 0.0
    """By how much the issuer's clock may differ from ours."""


class Keys(Protocol):
    """The keys of the issuer, see `kera.server.access.jwt_keys.JwtKeys`."""

    @property
    def version(self) -> bytes:
        """The version of the keys, which changes when they do."""
        ...

    def find(self, key_id: str | None, algorithm: str) -> Key:
        """Return the key that a token names. Raises `AuthenticationFailed`, and `Unavailable` while it is unknown."""
        ...


class JwtTokens:
    """Verifies JSON web tokens with the issuer's keys, and remembers verified ones until they expire.

    Belongs to an event loop.
    """

    def __init__(self, rules: JwtRules, keys: Keys, clock: Clock) -> None:
        self._rules = rules
        self._keys = keys
        self._clock = clock
        self._jws = PyJWS(algorithms=sorted(ALGORITHMS))
        self._verified: OrderedDict[bytes, tuple[bytes, Identity]] = OrderedDict()
        """Version of the keys with which a token was verified, and its identity, by the digest of the token."""

    def identify(self, text: str) -> Identity:
        """Return the identity for a token.

        Raises `AuthenticationFailed`, and `Unavailable` while it is unknown whether its key exists.
        """
        if len(text) > TOKEN_BYTES_MAX:
            raise AuthenticationFailed(f"the token has more than {TOKEN_BYTES_MAX} characters")
        digest = hashlib.sha256(text.encode(errors="replace")).digest()
        version, who = self._verified.get(digest, (b"", None))
        if who is not None and version == self._keys.version and self._clock.boottime_s() < who.until_s:
            self._verified.move_to_end(digest)
            return who
        self._verified.pop(digest, None)
        version = self._keys.version
        who = self._whose(self._claims(text))
        while len(self._verified) >= REMEMBERED_MAX:
            self._verified.popitem(last=False)
        self._verified[digest] = (version, who)
        return who

    def _claims(self, text: str) -> dict[str, Any]:
        """Return the claims of a token after verifying its signature. Raises as `identify`."""
        parts = _PARTS.fullmatch(text)
        if parts is None:
            what = "it is encrypted" if text.count(".") == 4 else "it does not have three parts in base64url"
            raise AuthenticationFailed(f"the token is neither one of this cluster nor a JWT: {what}")
        header = _part(parts[1], "header")
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise AuthenticationFailed(
                f"the token is signed with {shown(algorithm)}; accepted are {', '.join(sorted(ALGORITHMS))}"
            )
        if key_id is not None and not isinstance(key_id, str):
            raise AuthenticationFailed(f"the token names a key (kid) that is not text: {shown(key_id)}")
        if "crit" in header:
            raise AuthenticationFailed("the token requires an extension that is not supported (crit)")
        key = self._keys.find(key_id or None, algorithm)
        try:
            self._jws.decode_complete(text, key.public, [algorithm])
        except InvalidSignatureError:
            raise AuthenticationFailed(
                "the signature of the token is not right: it was changed, or is not of this issuer"
            ) from None
        except (PyJWTError, ValueError, TypeError) as error:
            raise AuthenticationFailed(f"the token cannot be verified: {str(error)[:100]}") from None
        return _part(parts[2], "claims")

    def _whose(self, claims: dict[str, Any]) -> Identity:
        rules = self._rules
        issuer, audience = claims.get("iss"), claims.get("aud")
        if issuer != rules.issuer:
            raise AuthenticationFailed(f"the issuer of the token is {shown(issuer)} and not {rules.issuer!r}")
        if audience != rules.audience and not (isinstance(audience, list) and rules.audience in audience):
            raise AuthenticationFailed(f"the token is for {shown(audience)} (aud), and not for {rules.audience!r}")
        left_s = self._left_s(claims)
        user = _claim(claims, rules.user_claim)
        if not isinstance(user, str) or not user:
            raise AuthenticationFailed(f"the token does not name its user: {rules.user_claim} is {shown(user)}")
        try:
            check_name("user", user)
        except InvalidArgument as error:
            raise AuthenticationFailed(
                f"the token's {rules.user_claim} is not a valid user name: {error.message}"
            ) from None
        until_s = self._clock.boottime_s() + left_s
        return Identity(user, how="jwt", brought=self._roles(claims), until_s=until_s)

    def _left_s(self, claims: dict[str, Any]) -> float:
        """Return for how long the token is still valid. Raises `AuthenticationFailed`."""
        now_s, leeway_s = self._clock.now_us() / 1e6, self._rules.leeway_s
        until_s, since_s = _time(claims, "exp"), _time(claims, "nbf")
        if until_s is None:
            raise AuthenticationFailed("the token does not say when it expires (exp): those without an end are refused")
        left_s = until_s + leeway_s - now_s
        if left_s <= 0:
            off_s = now_s - until_s
            raise AuthenticationFailed(f"the token expired {_span(off_s)} ago; get a new one{_if_new(off_s)}")
        if since_s is not None and since_s - leeway_s > now_s:
            off_s = since_s - now_s
            raise AuthenticationFailed(f"the token is valid only in {_span(off_s)}{_if_new(off_s)}")
        return left_s

    def _roles(self, claims: dict[str, Any]) -> frozenset[str]:
        """Return the roles in the token whose names can be in a rule. Raises `AuthenticationFailed`."""
        given = _claim(claims, self._rules.roles_claim)
        roles = given.split() if isinstance(given, str) else [] if given is None else given
        if not isinstance(roles, list) or not all(isinstance(each, str) for each in roles):
            raise AuthenticationFailed(f"the token's {self._rules.roles_claim} is not a list of names: {shown(given)}")
        return frozenset(filter(_is_role, roles))


def _part(text: str, what: str) -> dict[str, Any]:
    try:
        return parsed_object(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error) as error:
        raise AuthenticationFailed(f"the token is not a JWT: its {what} cannot be read, {error}") from None


def _claim(claims: dict[str, Any], path: str) -> Any:
    """Return the claim at `path`: a name, which may contain dots, or names separated by dots."""
    if path in claims:
        return claims[path]
    for dot in re.finditer(r"\.", path):
        inner = claims.get(path[: dot.start()])
        if isinstance(inner, dict):
            return _claim(inner, path[dot.end() :])
    return None


def _time(claims: dict[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= EXPIRES_S_MAX:
        raise AuthenticationFailed(f"the token's {name} is not a time: {shown(value)}")
    return float(value)


def _span(seconds: float) -> str:
    """Return a span of time for people."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE_S:.0f} min" if seconds < 2 * HOUR_S else f"{seconds / HOUR_S:.0f} h"


def _if_new(seconds: float) -> str:
    """Return a hint if different clocks can explain this span of time."""
    return "; if it is new, the clocks of this host and the issuer differ" if MINUTE_S <= seconds < 2 * HOUR_S else ""


def _is_role(name: str) -> bool:
    try:
        check_name("role", name)
    except InvalidArgument:
        return False  # no rule can name it
    return True
