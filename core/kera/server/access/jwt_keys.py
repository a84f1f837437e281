"""The public keys of an issuer of tokens, with which the signatures of its tokens are verified.

A separate thread reads them (`jwt_sources`) repeatedly, as issuers change them; the event loop uses the present keys,
and never waits. If they cannot be read, or are not a key set, the previous keys stay in use.

If a token names an unknown key, the keys are read again, though at most once in `ReadIntervals.unknown_s`. Until that
is done, the key may be a new one, so the caller gets `Unavailable` and has to retry.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK

from kera.core.base.health import Observation, concern, well, wrong
from kera.core.base.repeated import Repeated
from kera.core.base.strict_json import parsed_object, shown
from kera.core.base.telemetry import get_logger
from kera.core.errors import AuthenticationFailed, Unavailable
from kera.server.access.jwt_sources import KeysSource, NotRead

log = get_logger("kera.jwt")

RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA", "Ed448": "EdDSA"}
ALGORITHMS = frozenset({*RSA, *CURVES.values()})
"""The accepted algorithms. All have a public and a private key: with others (HS256, …), every verifier of tokens could
make tokens."""
KEYS_MAX = 64
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 8192
"""Shorter keys are not safe, and longer ones are slow."""
RSA_EXPONENT_BITS_MAX = 32
KEY_ID_CHARS_MAX = 256
UNKNOWN_MAX = 256
"""Maximum of remembered ids of unknown keys; beyond it, the oldest is forgotten."""


class Key(NamedTuple):
    """A key that verifies signatures."""

    key_id: str
    """Its id in the key set; empty: it has none."""
    algorithms: frozenset[str]
    """The algorithms that the key may be used with."""
    public: Any
    """A public key of `cryptography`."""


class KeySet(NamedTuple):
    """The public keys of an issuer, parsed from a JWKS. Never changed."""

    keys: tuple[Key, ...] = ()
    unused: tuple[str, ...] = ()
    """Descriptions of keys that are present and not used."""

    @classmethod
    def parse(cls, data: bytes) -> KeySet:
        """Parse a key set. Raises `NotRead` if it is invalid, or has no usable key."""
        try:
            given = parsed_object(data).get("keys")
        except ValueError as error:
            raise NotRead(f"it is not a key set: {error}") from error
        if not isinstance(given, list):
            raise NotRead("it is not a key set: it has no list of keys")
        if len(given) > KEYS_MAX:
            raise NotRead(f"it has {len(given)} keys, and {KEYS_MAX} are taken at most")
        keys, unused = [], []
        for number, each in enumerate(given, 1):
            try:
                key = _key(each)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one key, others may be valid
                name = each.get("kid") if isinstance(each, dict) else None
                unused.append(f"{shown(name) if name else f'number {number}'}: {str(error)[:100]}")
                continue
            if key is not None:
                keys.append(key)
        if not keys:
            raise NotRead(f"it has no key that can be used{': ' if unused else ''}{'; '.join(unused[:3])}")
        return cls(tuple(keys), tuple(unused))

    def named(self, key_id: str) -> list[Key]:
        """Return the keys with this id."""
        return [key for key in self.keys if key.key_id == key_id]

    def of(self, algorithm: str) -> list[Key]:
        """Return the keys for this algorithm."""
        return [key for key in self.keys if algorithm in key.algorithms]


def _key(given: Any) -> Key | None:
    """Parse a key; None: it is not for signatures. Raises errors of PyJWT and others for an unusable key."""
    if not isinstance(given, dict):
        raise TypeError("it is not an object")
    key_id, kind, curve = given.get("kid", ""), given.get("kty"), given.get("crv")
    if not isinstance(key_id, str) or len(key_id) > KEY_ID_CHARS_MAX:
        raise ValueError(f"its id (kid) is not text of up to {KEY_ID_CHARS_MAX} characters")
    if "d" in given:
        raise ValueError("it is a private key, which only the issuer may hold; publish the public key")
    if given.get("use", "sig") != "sig" or "verify" not in given.get("key_ops", ["verify"]):
        return None
    if kind == "RSA":
        algorithms = frozenset(RSA)
    elif kind in {"EC", "OKP"} and curve in CURVES and (CURVES[curve] == "EdDSA") == (kind == "OKP"):
        algorithms = frozenset({CURVES[curve]})
    else:
        raise ValueError(f"keys of the kind {shown(kind)}{f' {shown(curve)}' if curve else ''} are not accepted")
    algorithm = given.get("alg")
    if algorithm is not None:
        if algorithm not in algorithms:
            raise ValueError(f"it is for {shown(algorithm)}, which is not accepted")
        algorithms = frozenset({algorithm})
    public = PyJWK(given, algorithm=min(algorithms)).key
    if isinstance(public, RSAPublicKey):
        if not RSA_BITS_MIN <= public.key_size <= RSA_BITS_MAX:
            raise ValueError(f"it has {public.key_size} bits, and {RSA_BITS_MIN} to {RSA_BITS_MAX} are taken")
        if public.public_numbers().e.bit_length() > RSA_EXPONENT_BITS_MAX:
            raise ValueError("its exponent is too large")
    return Key(key_id, algorithms, public)


class JwtKeys:
    """The current keys of an issuer, read again as they change. A failed read keeps the old keys.

    Used in an event loop; within a ``with``, a thread reads the keys.

    The thread writes `_set`, `_version`, `_failed`, `_begun_s` and `_done_s`, the loop `_asked` and `_asked_s`.
    """

    def __init__(self, source: KeysSource, now_s: Callable[[], float]) -> None:
        """`now_s`: a clock that is never set."""
        self._source = source
        self._now_s = now_s
        self._set: KeySet | None = None
        self._version = b""
        """The version of the data in `_set`."""
        self._failing = Repeated(log)
        self._failed = ""
        """Why the last read failed; empty: it succeeded."""
        self._begun_s: float | None = None
        """When the last read began."""
        self._done_s: float | None = None
        """When the last successful read began."""
        self._asked: OrderedDict[str, float] = OrderedDict()
        """Ids of unknown keys, each with the time of its first use."""
        self._asked_s: float | None = None
        """When the newest of them was first used."""
        self._wanted = threading.Event()
        """Set when an unknown key is used, and at the end."""
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="kera-jwt-keys", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread after its present read, without waiting for it."""
        self._ended.set()
        self._wanted.set()

    @property
    def version(self) -> bytes:
        """The version of the keys, which changes when they do; empty: there are no keys yet."""
        return self._version

    def find(self, key_id: str | None, algorithm: str) -> Key:
        """Return the key that a token names.

        Raises `AuthenticationFailed`, and `Unavailable` as long as it is unknown whether the key exists.
        """
        keys = self._set
        if keys is None:
            raise Unavailable(f"tokens of the issuer cannot be verified yet: {self._missing()}; try again")
        if key_id is None:
            return _only(keys, algorithm)
        named = keys.named(key_id)
        if not named:
            raise self._unknown(key_id)
        for key in named:
            if algorithm in key.algorithms:
                return key
        of = ", ".join(sorted({each for key in named for each in key.algorithms}))
        raise AuthenticationFailed(f"the token says {algorithm}, and its key {shown(key_id)} is for {of}")

    def _unknown(self, key_id: str) -> AuthenticationFailed | Unavailable:
        """Return the error for a token whose key is not in the set."""
        now_s, pace = self._now_s(), self._source.pace
        asked_s = self._asked.get(key_id)
        if asked_s is not None and self._done_s is not None and self._done_s > asked_s:
            if now_s < self._done_s + pace.unknown_s:
                return AuthenticationFailed(
                    f"the token is signed with key {shown(key_id)}, which the issuer has not ({self._source})"
                )
            asked_s = None  # the issuer may have it by now
        if asked_s is None:
            self._asked[key_id] = self._asked_s = now_s
            self._asked.move_to_end(key_id)
            while len(self._asked) > UNKNOWN_MAX:
                self._asked.popitem(last=False)
            self._wanted.set()
        again = f", which cannot be read: {self._failed}" if self._failed else ""
        return Unavailable(
            f"the token is signed with key {shown(key_id)}, which is not known yet; the keys of the issuer are about"
            f" to be read again ({self._source}){again}; try again"
        )

    def _missing(self) -> str:
        return f"{self._source}: {self._failed}" if self._failed else f"{self._source} is being read"

    def look(self) -> Observation:
        """Return whether the keys can be read, for `Health.add`."""
        keys, failed = self._set, self._failed
        if keys is None:
            return wrong(f"there are no keys, and tokens of the issuer are refused: {self._missing()}")
        text = f"{len(keys.keys)} keys of {self._source}"
        if keys.unused:
            text += f"; {len(keys.unused)} others are not used: {'; '.join(keys.unused[:3])}"
        if failed:
            return concern(f"{self._source} cannot be read: {failed}; going on with {text}")
        return well(text)

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.is_set():
            self.read()
            while not self._ended.is_set() and (left_s := self.due_s() - self._now_s()) > 0:
                self._wanted.wait(left_s)  # or until an earlier read is wanted
                self._wanted.clear()

    def read(self) -> None:
        """Read the keys now."""
        begun_s = self._begun_s = self._now_s()
        try:
            data = self._source.read()
            version = hashlib.sha256(data).digest()
            if version != self._version:
                self._set = KeySet.parse(data)
                self._version = version
                log.info("keys of the issuer were read", source=str(self._source), keys=len(self._set.keys))
            self._failing.over("keys of the issuer can be read again", source=str(self._source))
            self._failed, self._done_s = "", begun_s
        except NotRead as error:
            self._failing.goes_on("keys of the issuer cannot be read", source=str(self._source), reason=str(error))
            self._failed = str(error)
        except Exception as error:  # noqa: BLE001 - even after a defect, the keys must be read again
            self._failing.goes_on(
                "keys of the issuer cannot be read", level="error", source=str(self._source), exc_info=error
            )
            self._failed = repr(error)

    def due_s(self) -> float:
        """Return when the keys have to be read again."""
        pace, begun_s = self._source.pace, self._begun_s
        if begun_s is None:
            return self._now_s()
        after_s = pace.failed_s if self._failed else pace.refresh_s
        if self._asked_s is not None and self._asked_s >= begun_s:
            after_s = min(after_s, pace.unknown_s)
        return begun_s + after_s


def _only(keys: KeySet, algorithm: str) -> Key:
    """Return the only key for an algorithm, for a token that names no key. Raises `AuthenticationFailed`."""
    fitting = keys.of(algorithm)
    if len(fitting) != 1:
        raise AuthenticationFailed(
            f"the token names no key (kid), and the issuer has {len(fitting)} keys for {algorithm}: the token must"
            " name one of them"
        )
    return fitting[0]
