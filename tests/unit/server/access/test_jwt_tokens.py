"""Tokens of another issuer: the users that they identify, and which are refused."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kera.core.access.accounts import Accounts
from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.access.identity import Identity
from kera.core.base.clock import FakeClock
from kera.core.errors import AuthenticationFailed, Unavailable
from kera.server.access.authenticator import Authenticator
from kera.server.access.jwt_keys import ALGORITHMS, JwtKeys
from kera.server.access.jwt_tokens import REMEMBERED_MAX, TOKEN_BYTES_MAX, JwtRules, JwtTokens
from tests.token_issuer import AUDIENCE, ISSUER, claims_of, encoded, jwk, key_set, private_key, signed, signed_bytes
from tests.unit.core.access.support import table, user
from tests.unit.server.access.test_jwt_keys import Source

RULES = JwtRules(ISSUER, AUDIENCE)


class Issued:
    """An issuer with one key of a kind, and a daemon that takes its tokens."""

    def __init__(self, rules: JwtRules = RULES) -> None:
        self.clock = FakeClock()
        self.source = Source(key_set(*(jwk(each, each) for each in sorted(ALGORITHMS)), jwk("one", "ES256")))
        self.keys = JwtKeys(self.source, self.clock.boottime_s)
        self.keys.read()
        self.tokens = JwtTokens(rules, self.keys, self.clock)

    @property
    def now_s(self) -> float:
        return self.clock.now_us() / 1e6

    def token(self, who: str = "alice", **claims: Any) -> str:
        return signed(claims_of(who, self.now_s, **claims))

    def identify(self, who: str = "alice", **claims: Any) -> Identity:
        return self.tokens.identify(self.token(who, **claims))

    def refused(self, text: str) -> str:
        with pytest.raises(AuthenticationFailed) as raised:
            self.tokens.identify(text)
        return raised.value.message


@pytest.fixture
def issued() -> Issued:
    return Issued()


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_a_token_identifies_a_user_until_it_expires(issued: Issued, algorithm: str) -> None:
    issued.clock.advance(1000)
    token = signed(claims_of("alice", issued.now_s, roles=["etl", "reports"]), algorithm, algorithm)
    who = issued.tokens.identify(token)
    assert (who.user, who.how, who.brought) == ("alice", "jwt", frozenset({"etl", "reports"}))
    assert who.until_s == pytest.approx(1300)
    assert not who.is_super
    assert not who.is_daemon


@pytest.mark.parametrize(
    ("audience", "good"),
    [
        (AUDIENCE, True),
        (["other", AUDIENCE], True),
        ("other", False),
        (["other"], False),
        ([], False),
        (f"{AUDIENCE} other", False),
        ({AUDIENCE: 1}, False),
        ([[AUDIENCE]], False),
        (None, False),
    ],
)
def test_a_token_has_to_be_for_this_cluster(issued: Issued, audience: Any, good: bool) -> None:
    token = signed_bytes(json.dumps({**claims_of("alice", issued.now_s), "aud": audience}).encode())
    if good:
        assert issued.tokens.identify(token).user == "alice"
    else:
        assert "(aud), and not for 'kera'" in issued.refused(token)


@pytest.mark.parametrize("issuer", ["https://issuer.example/realms/kera/", "", None, [ISSUER], {"a": 1}])
def test_a_token_of_another_issuer_is_refused(issued: Issued, issuer: Any) -> None:
    token = signed_bytes(json.dumps({**claims_of("alice", issued.now_s), "iss": issuer}).encode())
    assert f"and not {ISSUER!r}" in issued.refused(token)


@pytest.mark.parametrize(
    ("late_s", "text"),
    [
        (5, "the token expired 5 s ago; get a new one"),
        (
            600,
            "the token expired 10 min ago; get a new one; if it is new, the clocks of this host and the issuer differ",
        ),
        (90_000, "the token expired 25 h ago; get a new one"),
    ],
)
def test_the_error_about_an_expired_token_says_when_it_expired(issued: Issued, late_s: int, text: str) -> None:
    token = issued.token()
    issued.clock.advance(300 + late_s)
    message = issued.refused(token)
    assert message.startswith(text)
    assert ("clocks" in message) == (late_s == 600)


def test_the_error_about_a_token_not_yet_valid_says_when_it_will_be(issued: Issued) -> None:
    token = issued.token(nbf=issued.now_s + 600)
    assert "valid only in 10 min; if it is new, the clocks" in issued.refused(token)
    issued.clock.advance(600)
    issued.tokens.identify(issued.token(nbf=issued.now_s))


def test_the_leeway_allows_for_clocks_that_differ() -> None:
    issued = Issued(RULES._replace(leeway_s=60))
    token = issued.token(nbf=issued.now_s + 59)
    assert issued.tokens.identify(token).until_s == pytest.approx(360)
    assert "valid only in" in issued.refused(issued.token(nbf=issued.now_s + 61))
    late = issued.token("bob")
    issued.clock.step(359)
    assert issued.tokens.identify(late).until_s == pytest.approx(1)
    issued.clock.step(1)
    assert "expired" in issued.refused(issued.token("carol", exp=issued.now_s - 60))


def test_a_remembered_token_expires_despite_steps_of_the_wall_clock(issued: Issued) -> None:
    token = issued.token()
    who = issued.tokens.identify(token)
    issued.clock.step(-1000)
    assert issued.tokens.identify(token) is who
    issued.clock.advance(300)
    issued.clock.step(1000)
    assert "expired" in issued.refused(token)


@pytest.mark.parametrize("name", ["exp", "nbf"])
@pytest.mark.parametrize(
    "value", ["true", '"soon"', "-1", "[]", "{}", "1e400", "1e308", "NaN", "Infinity", "9" * 400, "9" * 5000]
)
def test_an_invalid_time_is_refused(issued: Issued, name: str, value: str) -> None:
    claims = json.dumps(claims_of("alice", issued.now_s, **{name: None}))
    assert issued.refused(signed_bytes(f'{claims[:-1]}, "{name}": {value}}}'.encode()))


def test_a_token_without_an_end_is_refused(issued: Issued) -> None:
    assert "does not say when it expires (exp)" in issued.refused(issued.token(exp=None))


@pytest.mark.parametrize("user", [None, "", 7, ["alice"], "auth0|alice", ":daemon", "../alice", "*", "a" * 129, "é"])
def test_a_token_without_a_valid_user_is_refused(issued: Issued, user: Any) -> None:
    token = signed_bytes(json.dumps({**claims_of("x", issued.now_s), "sub": user}).encode())
    message = issued.refused(token)
    assert "sub" in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("claim", "claims", "roles"),
    [
        ("roles", {}, set()),
        ("roles", {"roles": []}, set()),
        ("roles", {"roles": ["a", "b", "a"]}, {"a", "b"}),
        ("roles", {"roles": ["a", "no role", "*", "", "user:x"]}, {"a"}),
        ("scope", {"scope": "read  write"}, {"read", "write"}),
        ("realm_access.roles", {"realm_access": {"roles": ["a"]}}, {"a"}),
        ("realm_access.roles", {"realm_access": ["roles"]}, set()),
        ("realm_access.roles", {"realm_access": {}}, set()),
        ("realm_access.roles", {"roles": ["a"]}, set()),
        ("https://kera.example/roles", {"https://kera.example/roles": ["a"]}, {"a"}),
        ("resource_access.kera.example.roles", {"resource_access": {"kera.example": {"roles": ["a"]}}}, {"a"}),
    ],
)
def test_roles_come_from_the_claim_that_the_settings_name(claim: str, claims: Any, roles: set[str]) -> None:
    issued = Issued(RULES._replace(roles_claim=claim))
    assert issued.identify(**claims).brought == roles


@pytest.mark.parametrize("roles", [7, True, {"a": 1}, [["a"]], ["a", None], [7]])
def test_roles_that_are_not_names_are_refused(issued: Issued, roles: Any) -> None:
    assert "roles is not a list of names" in issued.refused(issued.token(roles=roles))


def test_the_user_comes_from_the_claim_that_the_settings_name() -> None:
    issued = Issued(RULES._replace(user_claim="preferred_username"))
    assert issued.identify("1234", preferred_username="alice").user == "alice"
    assert "preferred_username is None" in issued.refused(issued.token("alice"))


# -- forged tokens -------------------------------------------------------------------------------------------------


def public_forms() -> list[bytes]:
    public = private_key("RS256").public_key()
    forms = [
        public.public_bytes(encoding, form)
        for encoding in (Encoding.PEM, Encoding.DER)
        for form in (PublicFormat.SubjectPublicKeyInfo, PublicFormat.PKCS1)
    ]
    return [*forms, forms[0].strip(), json.dumps(jwk("RS256", "RS256")).encode(), b""]


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512", "hs256", "none", "None", "NONE", "", "ES256K"])
@pytest.mark.parametrize("form", range(7))
def test_a_token_signed_with_a_public_key_as_secret_is_refused(issued: Issued, algorithm: str, form: int) -> None:
    header = encoded(json.dumps({"alg": algorithm, "kid": "RS256"}).encode())
    text = f"{header}.{encoded(json.dumps(claims_of('alice', issued.now_s)).encode())}"
    digest = getattr(hashlib, algorithm.lower().replace("hs", "sha"), hashlib.sha256)
    signature = encoded(hmac.new(public_forms()[form], text.encode(), digest).digest())
    assert f"signed with {algorithm!r}; accepted are " in issued.refused(f"{text}.{signature}")


@pytest.mark.parametrize("algorithm", [None, 7, ["ES256"], {"ES256": 1}, True])
def test_an_algorithm_that_is_not_text_is_refused(issued: Issued, algorithm: Any) -> None:
    header = json.dumps({"alg": algorithm, "kid": "one"}).encode()
    claims = json.dumps(claims_of("alice", issued.now_s)).encode()
    assert "; accepted are " in issued.refused(signed_bytes(claims, header))


def test_a_token_without_a_signature_is_refused(issued: Issued) -> None:
    header, claims, signature = issued.token().split(".")
    for text in (f"{header}.{claims}", f"{header}.{claims}.", f"{header}..{signature}", f".{claims}.{signature}"):
        assert "a JWT" in issued.refused(text)


def test_a_changed_token_is_refused(issued: Issued) -> None:
    header, claims, signature = issued.token().split(".")
    others = encoded(json.dumps(claims_of("admin", issued.now_s)).encode())
    for text in (
        f"{header}.{others}.{signature}",
        f"{header}.{claims}.{'A' * len(signature)}",
        f"{header}.{claims}.AA",
    ):
        assert "the signature of the token is not right" in issued.refused(text)


def test_a_token_of_another_key_is_refused(issued: Issued) -> None:
    claims = claims_of("alice", issued.now_s)
    assert "signature of the token is not right" in issued.refused(signed(claims, "ES256", "one", "of-somebody-else"))
    assert "signature of the token is not right" in issued.refused(signed(claims, "RS256", "RS256", "of-somebody-else"))
    assert "says RS512, and its key 'RS256' is for RS256" in issued.refused(signed(claims, "RS512", "RS256"))
    assert "says RS256, and its key 'one' is for ES256" in issued.refused(signed(claims, "RS256", "one"))


@pytest.mark.parametrize(
    "key_id", ["../../../../etc/passwd", "/dev/zero", "https://evil.example/keys", "' OR 1=1 --", "\0", "x" * 10_000]
)
def test_a_key_id_is_only_compared_and_never_opened(issued: Issued, key_id: str) -> None:
    token = signed(claims_of("alice", issued.now_s), key_id=key_id)
    with pytest.raises(Unavailable) as raised:
        issued.tokens.identify(token)
    assert len(raised.value.message) < 500
    issued.clock.advance(issued.source.pace.unknown_s)
    issued.keys.read()
    assert "which the issuer has not" in issued.refused(signed(claims_of("alice", issued.now_s), key_id=key_id))
    assert issued.source.reads == 2


@pytest.mark.parametrize("key_id", [7, ["one"], {"one": 1}, True])
def test_a_key_id_that_is_not_text_is_refused(issued: Issued, key_id: Any) -> None:
    header = json.dumps({"alg": "ES256", "kid": key_id}).encode()
    assert "is not text" in issued.refused(signed_bytes(json.dumps(claims_of("a", issued.now_s)).encode(), header))


def test_keys_within_a_token_are_ignored(issued: Issued) -> None:
    evil = "https://evil.example/keys"
    brought = {
        "jku": evil,
        "x5u": evil,
        "jwk": jwk("evil", "ES256", "of-somebody-else"),
        "x5c": ["AAAA"],
        "x5t": "AAAA",
    }
    claims = claims_of("alice", issued.now_s)
    assert "signature" in issued.refused(signed(claims, key_id="one", name="of-somebody-else", headers=brought))
    with pytest.raises(Unavailable):
        issued.tokens.identify(signed(claims, key_id="evil", name="of-somebody-else", headers=brought))
    assert issued.tokens.identify(signed(claims, headers=brought)).user == "alice"
    assert issued.source.reads == 1


@pytest.mark.parametrize("header", [{"crit": ["exp"]}, {"crit": []}, {"crit": ["b64"], "b64": False}, {"crit": 7}])
def test_a_token_with_critical_headers_is_refused(issued: Issued, header: dict[str, Any]) -> None:
    data = json.dumps({"alg": "ES256", "kid": "one", **header}).encode()
    assert "(crit)" in issued.refused(signed_bytes(json.dumps(claims_of("alice", issued.now_s)).encode(), data))


def test_a_token_with_unencoded_claims_is_refused(issued: Issued) -> None:
    data = json.dumps({"alg": "ES256", "kid": "one", "b64": False}).encode()
    assert issued.refused(signed_bytes(json.dumps(claims_of("alice", issued.now_s)).encode(), data))


def doubled(claims: bytes, more: bytes) -> bytes:
    return claims[:-1] + b", " + more + b"}"


def test_a_duplicate_claim_is_refused(issued: Issued) -> None:
    claims = json.dumps(claims_of("alice", issued.now_s)).encode()
    for more in (b'"sub": "admin"', b'"sub": "alice"', b'"\\u0073ub": "admin"', b'"realm": {"a": 1, "a": 2}'):
        assert "comes twice" in issued.refused(signed_bytes(doubled(claims, more)))
    header = b'{"alg":"none","kid":"one","alg":"ES256"}'
    assert "'alg' comes twice" in issued.refused(signed_bytes(claims, header))
    assert issued.tokens.identify(signed_bytes(doubled(claims, b'"realm": {"sub": "admin"}'))).user == "alice"


DEEP = b"[" * 5000 + b"]" * 5000
DEEP_OBJECTS = b'{"a":' * 2000 + b"1" + b"}" * 2000


@pytest.mark.parametrize("deep", [DEEP, DEEP_OBJECTS, b"[" * 5000], ids=["lists", "objects", "open"])
def test_deeply_nested_json_is_refused(issued: Issued, deep: bytes) -> None:
    claims = json.dumps(claims_of("alice", issued.now_s)).encode()
    assert "cannot be read" in issued.refused(signed_bytes(doubled(claims, b'"deep": ' + deep)))
    header = doubled(b'{"alg":"ES256","kid":"one"}', b'"deep": ' + deep)
    assert "cannot be read" in issued.refused(signed_bytes(claims, header))
    assert "cannot be read" in issued.refused(signed_bytes(deep))


@pytest.mark.parametrize("text", ["a" * (1 << 20), "a." * (1 << 19), "a" * (TOKEN_BYTES_MAX + 1)], ids=range(3))
def test_a_token_over_the_length_limit_is_refused(issued: Issued, text: str) -> None:
    assert issued.refused(text) == f"the token has more than {TOKEN_BYTES_MAX} characters"


def test_a_token_may_have_many_roles(issued: Issued) -> None:
    roles = [f"role-{number:04}" for number in range(900)]
    assert issued.identify(roles=roles).brought == set(roles)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "...",
        "a.b.c.d.e",
        "a b.c.d",
        "a.b.c\n",
        "\ud800.b.c",
        "é.b.c",
        "a=.b=.c=",
        "eyJ9.e30.AA",
        "AA.AA.AA",
        "A.A.A",
        "bnVsbA.bnVsbA.bnVsbA",
        "W10.W10.W10",
    ],
    ids=range(15),
)
def test_text_that_is_not_a_token_is_refused(issued: Issued, text: str) -> None:
    assert "a JWT" in issued.refused(text)


@pytest.mark.parametrize("claims", [b"", b"[]", b"null", b"7", b"{", b'"x"', b"\xff\xfe\xfd", b"{}x"], ids=range(8))
def test_invalid_claims_are_refused(issued: Issued, claims: bytes) -> None:
    assert "a JWT" in issued.refused(signed_bytes(claims))


# -- remembered tokens ---------------------------------------------------------------------------------------------


def test_a_token_is_verified_once_until_the_keys_change(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    token = issued.token()
    who = issued.tokens.identify(token)
    with monkeypatch.context() as patched:
        patched.setattr(issued.tokens._jws, "decode_complete", pytest.fail)
        assert issued.tokens.identify(token) is who
    issued.source.data = key_set(jwk("two", "ES256", "new"))
    issued.keys.read()
    with pytest.raises(Unavailable):  # the issuer has withdrawn its key
        issued.tokens.identify(token)


def test_the_number_of_remembered_tokens_is_limited(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issued.tokens, "_claims", lambda _: claims_of("alice", issued.now_s))
    for number in range(REMEMBERED_MAX + 10):
        issued.tokens.identify(f"token-{number}")
    assert len(issued.tokens._verified) == REMEMBERED_MAX


def test_a_refused_token_is_not_remembered(issued: Issued) -> None:
    for text in ("a.b.c", issued.token(aud="other")):
        issued.refused(text)
    assert not issued.tokens._verified


# -- together with KerA's own users --------------------------------------------------------------------------------


def door_of(issued: Issued, *super_users: str) -> Authenticator:
    names = CertificateNames.of(DAEMONS, USERS)
    return Authenticator(
        names, now_s=issued.clock.boottime_s, super_users=frozenset(super_users), of_jwt=issued.tokens.identify
    )


def test_a_user_has_the_roles_of_the_token_and_its_own(issued: Issued) -> None:
    door = door_of(issued, "role:boss")
    door.accounts = Accounts(table(users=[user("alice", "etl")]), 1, 0.0)
    who = door.of_token(issued.token(roles=["reports"]))
    assert who.roles == {"etl", "reports"}
    assert not who.is_super
    assert door.of_token(issued.token(roles=["boss"])).is_super
    assert door.of_token(issued.token("somebody-else")).roles == set()


def test_a_session_of_a_token_ends_when_the_token_expires(issued: Issued) -> None:
    door = door_of(issued)
    who = door.of_token(issued.token())
    session, for_s = door.session_for(who)
    assert for_s == pytest.approx(300)
    assert door.of_token(session) == who
    assert door.holds(who)
    issued.clock.advance(300)
    assert not door.holds(who)
    with pytest.raises(AuthenticationFailed, match="session has ended"):
        door.of_token(session)


def test_a_valid_token_is_valid_for_the_jwt_library_too(issued: Issued) -> None:
    token = issued.token(roles=["a"])
    claims = jwt.decode(
        token,
        private_key("ES256").public_key(),
        ["ES256"],
        audience=AUDIENCE,
        issuer=ISSUER,
        options={"verify_exp": False, "verify_iat": False},
    )
    assert claims["sub"] == issued.tokens.identify(token).user
