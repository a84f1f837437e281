"""Targets: passwords, tokens and certificates, as daemons and clients decode them before they know their peer."""

from __future__ import annotations

import ipaddress
import json
from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from jwt.algorithms import get_default_algorithms

from kera.core.access.certificates import names_in
from kera.core.access.passwords import ITERATIONS_MIN, Login, Logins, verifier_for
from kera.core.base.clock import FakeClock
from kera.core.errors import AuthenticationFailed, invariant
from kera.server.access.jwt_keys import ALGORITHMS, Key, KeySet
from kera.server.access.jwt_sources import NotRead
from kera.server.access.jwt_tokens import JwtRules, JwtTokens
from kera.v1 import access_pb2 as messages
from tests.fuzz.chunk_targets import numbered
from tests.fuzz.mutating import mutated
from tests.fuzz.target import Target
from tests.token_issuer import AUDIENCE, ISSUER, claims_of, encoded, jwk, key_set, signed_bytes

USER, PASSWORD = "some", "correct horse battery"
NONCE = b"{nonce}"
"""Placeholder in an input for the nonce, which differs each time."""
SINCE = datetime(2026, 1, 1, tzinfo=UTC)
NOW_US = 1_800_000_000_000_000
WORDS = (
    *(b"i=", b"\xc2\xb2", b"i=\xc2\xb9", b"=2C", b"=3D", b"=", b",", b",,", b"m=ext", b"y,,", b"p=tls-unique,,"),
    *(b"a=admin", b"n=", b"r=", b"s=", b"\xff", b"\x00", b"\xe2\x80\xae", b"\xc2\xaa", b"i=0", b"i=-1", b"i=1e9"),
)
"""Words that mean something in SCRAM, or to the preparation of names."""


def _words(data: bytes, random_: Random, others: tuple[bytes, ...] = WORDS) -> bytes:
    """`data` with some of its parts changed, or some of its bytes."""
    if random_.random() < 0.4:
        return mutated(data, random_, others)
    parts = data.split(b",")
    for _ in range(random_.choice((1, 1, 2))):
        at = random_.randrange(len(parts))
        match random_.randrange(4):
            case 0:
                parts[at] += random_.choice(others)
            case 1:
                parts[at] = parts[at][:2] + random_.choice(others)
            case 2:
                parts.insert(at, random_.choice((random_.choice(others), parts[at])))
            case _:
                del parts[at : at + 1]
                parts = parts or [b""]
    return b",".join(parts)


# -- passwords ---------------------------------------------------------------------------------------------------------


@cache
def _verifier() -> messages.ScramVerifier:
    return verifier_for(PASSWORD, iterations=ITERATIONS_MIN, salt=b"0123456789abcdef")


FIRST = b"n,,n=some,r=fyko+d2lbbFgONRv9qkxdawL"
FINAL = b"c=biws,r=" + NONCE + b",p=v0X8v3Bz2T0CJGbJQyF0X+HI4TsT9jXJvQk4m1s5Xc4="


def _login(random_: Random) -> bytes:
    number = random_.randrange(2)
    data = (FIRST, FINAL)[number]
    return numbered(number, data if random_.random() < 0.05 else _words(data, random_))


def _log_in(data: bytes) -> str:
    """A daemon's side of a login: a first message, or a final message after a valid first one."""
    clock = FakeClock()
    logins = Logins(lambda name: [_verifier()] if name == USER else [], clock.monotonic_s)
    if not data[:4].startswith(b"\x01"):
        exchange_id, answer = logins.begin(data[4:], "peer")
        return "begun" if exchange_id and answer else "not begun"
    exchange_id, answer = logins.begin(FIRST, "peer")
    nonce = answer.split(b",")[0].removeprefix(b"r=")
    known = logins.end(exchange_id, data[4:].replace(NONCE, nonce), "peer")
    raise AssertionError(f"{known.user} is let in without a password")


SERVER_FIRST = b"r=" + NONCE + b"3rfcNHYJY1ZVvWVs7j,s=MDEyMzQ1Njc4OWFiY2RlZg==,i=4096"
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def _server_says(random_: Random) -> bytes:
    first, final = SERVER_FIRST, SERVER_FINAL
    if random_.random() < 0.7:
        first = _words(first, random_)
    else:
        final = _words(final, random_)
    return len(first).to_bytes(4, "little") + first + final


def _hear(data: bytes) -> str:
    """A client's side of a login: the server has to prove that it knows the password."""
    at = 4 + int.from_bytes(data[:4], "little")
    login = Login(USER, PASSWORD)
    nonce = login.first().rpartition(b"r=")[2]
    login.final(data[4:at].replace(NONCE, nonce))
    try:
        login.check(data[at:])
    except AuthenticationFailed:
        return "not the server"
    raise AssertionError("it takes somebody for the server who does not know the password")


# -- tokens ------------------------------------------------------------------------------------------------------------


class _Keys:
    """The keys of the tests' issuer."""

    version = b"1"

    def __init__(self) -> None:
        self._keys = KeySet.parse(key_set(jwk("one", "ES256")))

    def find(self, key_id: str | None, algorithm: str) -> Key:
        for key in self._keys.of(algorithm):
            if key_id in (None, key.key_id):
                return key
        raise AuthenticationFailed("there is no such key")


@cache
def _tokens() -> JwtTokens:
    return JwtTokens(JwtRules(ISSUER, AUDIENCE, roles_claim="realm.roles"), _Keys(), FakeClock(NOW_US))


VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 70, 1e308, "", "x", "\ud800", "a" * 2_000, [], {}, ["x"], [1], [[]]),
    *({"x": 1}, "user:admin", [["x"] * 300], {"roles": ["a", None]}, {"roles": "a b c"}, {"roles": {"roles": []}}),
)
DEEP = b"[" * 900 + b"]" * 900


def _object(given: dict[str, Any], random_: Random) -> bytes:
    """An object as JSON, with some changes."""
    changed = dict(given)
    for _ in range(random_.choice((0, 1, 1, 2))):
        name = random_.choice((*given, "crit", "jku", "nbf", "realm", "realm.roles", "aud", "x"))
        if random_.random() < 0.15:
            changed.pop(name, None)
        else:
            changed[name] = random_.choice(VALUES)
    data = json.dumps(changed).encode()
    if random_.random() < 0.05:
        data = data.replace(b"}", b', "deep": ' + DEEP + b"}", 1)
    return mutated(data, random_) if random_.random() < 0.3 else data


def _jwt(random_: Random) -> bytes:
    """A token's parts: whether it is signed, its header and its claims."""
    header = {"alg": "ES256", "typ": "JWT", "kid": "one"}
    if random_.random() < 0.1:
        header["alg"] = random_.choice(sorted(ALGORITHMS))
    claims = claims_of("alice", NOW_US / 1e6, realm={"roles": ["etl"]})
    head = json.dumps(header).encode() if random_.random() < 0.6 else _object(header, random_)
    return numbered(int(random_.random() < 0.7), len(head).to_bytes(4, "little") + head + _object(claims, random_))


def _identify(data: bytes) -> str:
    at = 8 + int.from_bytes(data[4:8], "little")
    header, claims = data[8:at], data[at:]
    if data[:1] == b"\x01":
        token = signed_bytes(claims, header)
    else:
        token = f"{encoded(header)}.{encoded(claims)}.{encoded(b'x' * 64)}"
    who = _tokens().identify(token)
    invariant(data[:1] == b"\x01", "somebody is let in whose token nobody has signed")
    return "identified" if who.user else "nobody"


def _jwks(random_: Random) -> bytes:
    keys = json.loads(_key_set())
    if random_.random() < 0.7:
        each = random_.choice(keys["keys"])
        name = random_.choice((*each, "d", "use", "key_ops", "alg", "kid", "crv"))
        value = each.get(name)
        each[name] = (
            mutated(value.encode(), random_).decode("latin-1")
            if isinstance(value, str) and random_.random() < 0.5
            else random_.choice(VALUES)
        )
        return json.dumps(keys).encode()
    return mutated(_key_set(), random_)


@cache
def _key_set() -> bytes:
    """Public keys, always the same."""
    algorithms = get_default_algorithms()
    public = {
        "EdDSA": ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key(),
        "ES256": ec.derive_private_key(12_345, ec.SECP256R1()).public_key(),
        "RS256": rsa.RSAPublicNumbers(65_537, (1 << 2047) + 12_345).public_key(),
    }
    keys: list[dict[str, Any]] = []
    for name, each in public.items():
        document: Any = algorithms[name].to_jwk(each, as_dict=True)
        keys.append({**document, "use": "sig", "alg": name, "kid": name})
    return json.dumps({"keys": keys}).encode()


def _parse_keys(data: bytes) -> str:
    try:
        keys = KeySet.parse(data)
    except NotRead:
        return "not read"
    return f"{len(keys.unused)} unused"


# -- certificates ------------------------------------------------------------------------------------------------------


@cache
def _certificate() -> bytes:
    """A certificate with names of all kinds, always the same."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, "broker"), x509.NameAttribute(NameOID.ORGANIZATION_NAME, "some, more")]
    )
    others: list[x509.GeneralName] = [
        x509.DNSName("broker.example"),
        x509.UniformResourceIdentifier("spiffe://cluster/broker"),
        x509.RFC822Name("some@example.org"),
        x509.IPAddress(ipaddress.ip_address("10.0.0.1")),
        x509.DirectoryName(name),
    ]
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(7)
    made = made.not_valid_before(SINCE).not_valid_after(SINCE + timedelta(days=900))
    made = made.add_extension(x509.SubjectAlternativeName(others), critical=False)
    return made.sign(key, None).public_bytes(Encoding.DER)


def _spoilt_certificate(random_: Random) -> bytes:
    data = _certificate()
    if random_.random() < 0.7:  # signatures are not checked here, so any bytes may change
        at = random_.randrange(len(data))
        return data[:at] + mutated(data[at:], random_, (data,))
    return mutated(data, random_, (data,))


def _names(data: bytes) -> str:
    names_in.cache_clear()
    return f"{len(names_in(data))} names"


ACCESS_TARGETS = (
    Target("logins", _login, _log_in, ("kera.core.access.passwords",)),
    Target("server-logins", _server_says, _hear, ("kera.core.access.passwords",), slow_s=10.0),  # many iterations
    Target("jwts", _jwt, _identify, ("kera.server.access.jwt_tokens", "kera.core.base.strict_json")),
    Target("jwt-keys", _jwks, _parse_keys, ("kera.server.access.jwt_keys", "kera.core.base.strict_json")),
    Target("certificates", _spoilt_certificate, _names, ("kera.core.access.certificates",)),
)
