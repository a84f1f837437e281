from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from kera.core.base.health import State
from kera.core.errors import AuthenticationFailed, Unavailable
from kera.server.access.jwt_keys import ALGORITHMS, KEYS_MAX, UNKNOWN_MAX, JwtKeys, KeySet
from kera.server.access.jwt_sources import NotRead, UrlSource
from tests.token_issuer import jwk, key_set
from tests.unit.core.access.support import Now

PACE = UrlSource.pace


class Source:
    """Keys, or an error, as a test sets them."""

    pace = PACE

    def __init__(self, data: bytes | Exception) -> None:
        self.data = data
        self.reads = 0
        self.threads: set[str] = set()

    def __str__(self) -> str:
        return "https://issuer.example/keys"

    def read(self) -> bytes:
        self.reads += 1
        self.threads.add(threading.current_thread().name)
        if isinstance(self.data, Exception):
            raise self.data
        return self.data


@pytest.fixture
def now() -> Now:
    return Now()


def keys_of(source: Source, now: Now) -> JwtKeys:
    keys = JwtKeys(source, now)
    keys.read()
    return keys


def read_if_due(keys: JwtKeys, now: Now) -> None:
    """Do as the thread does."""
    if keys.due_s() <= now():
        keys.read()


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_keys_are_found_by_their_id_and_the_algorithm(now: Now, algorithm: str) -> None:
    keys = keys_of(Source(key_set(jwk("one", algorithm), jwk("two", algorithm, "other"))), now)
    assert keys.find("one", algorithm) != keys.find("two", algorithm)
    assert keys.find("one", algorithm).algorithms == {algorithm}


def test_a_key_without_an_algorithm_is_for_all_of_its_kind(now: Now) -> None:
    keys = keys_of(
        Source(key_set(jwk("r", "RS256", alg=None), jwk("e", "ES384", alg=None), jwk("d", "Ed448", alg=None))), now
    )
    assert keys.find("r", "PS512").key_id == "r"
    assert keys.find("e", "ES384").key_id == "e"
    assert keys.find("d", "EdDSA").key_id == "d"
    with pytest.raises(AuthenticationFailed, match="says ES256, and its key 'e' is for ES384"):
        keys.find("e", "ES256")


def test_keys_of_one_id_and_two_kinds_are_distinguished(now: Now) -> None:
    keys = keys_of(Source(key_set(jwk("one", "RS256"), jwk("one", "ES256"))), now)
    assert keys.find("one", "ES256").algorithms == {"ES256"}
    assert keys.find("one", "RS256").algorithms == {"RS256"}


def test_a_token_without_a_key_id_uses_the_only_key(now: Now) -> None:
    keys = keys_of(Source(key_set(jwk(None, "RS256"), jwk("e", "ES256"), jwk("f", "ES256", "other"))), now)
    assert keys.find(None, "RS256").key_id == ""
    with pytest.raises(AuthenticationFailed, match=r"names no key .* has 2 keys for ES256"):
        keys.find(None, "ES256")
    with pytest.raises(AuthenticationFailed, match="has 0 keys for EdDSA"):
        keys.find(None, "EdDSA")


def rsa_of(bits: int, exponent: int = 65537) -> dict[str, Any]:
    public = rsa.generate_private_key(public_exponent=exponent, key_size=bits).public_key()
    return {**RSAAlgorithm.to_jwk(public, as_dict=True), "kid": "weak"}


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("text", "not an object"),
        ([], "not an object"),
        ({}, "kind None"),
        ({"kty": "oct", "k": "c2VjcmV0", "kid": "weak"}, "kind 'oct'"),
        ({"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}, "kind 'oct'"),
        ({"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"}, "'secp256k1' are not accepted"),
        ({"kty": "EC", "crv": "Ed25519", "x": "AA"}, "'Ed25519' are not accepted"),
        ({"kty": "EC", "crv": ["P-256"], "x": "AA"}, "unhashable"),
        ({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}, "32 bytes"),
        ({"kty": "EC", "crv": "P-256", "x": "A" * 43, "y": "A" * 43}, ""),
        ({"kty": "OKP", "crv": "Ed25519", "x": 7}, ""),
        ({"kty": "RSA", "n": "AQAB", "e": "AQAB"}, ""),
        ({"kty": "RSA", "n": {}, "e": []}, ""),
        ({"kty": "RSA", "n": "!!", "e": "?"}, ""),
        (jwk("weak", "RS256", alg="HS256"), "it is for 'HS256'"),
        (jwk("weak", "RS256", alg="none"), "it is for 'none'"),
        (jwk("weak", "RS256", d="AQAB"), "private key"),
        (jwk("weak", "ES256", kid=7), "not text"),
        (jwk("weak", "ES256", key_ops=7), ""),
    ],
)
def test_an_invalid_key_is_left_out_and_the_others_are_used(now: Now, key: Any, why: str) -> None:
    with pytest.raises(NotRead, match="no key that can be used"):
        KeySet.parse(key_set(key))
    keys = keys_of(Source(key_set(key, jwk("one", "ES256"))), now)
    assert keys.find("one", "ES256")
    finding = keys.look()
    assert finding.state is State.OK
    assert "1 keys" in finding.text
    assert "1 others are not used" in finding.text
    assert why in finding.text


def test_rsa_keys_of_invalid_length_or_exponent_are_left_out() -> None:
    with pytest.raises(NotRead, match="1024 bits"):
        KeySet.parse(key_set(rsa_of(1024)))
    long = {"kty": "RSA", "n": "_" * 1400, "e": "AQAB"}  # 8400 bits
    with pytest.raises(NotRead, match="8400 bits"):
        KeySet.parse(key_set(long))
    exponent = jwk("weak", "RS256", e="_" * 40)
    with pytest.raises(NotRead):
        KeySet.parse(key_set(exponent))


def test_keys_for_encryption_are_ignored_silently(now: Now) -> None:
    keys = keys_of(Source(key_set(jwk("enc", "RS256", use="enc", alg="RSA-OAEP"), jwk("one", "ES256"))), now)
    assert keys.look().text == "1 keys of https://issuer.example/keys"
    with pytest.raises(Unavailable):
        keys.find("enc", "RS256")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"keys": {}}',
        b'{"keys": []}',
        b'{"keys": [], "keys": []}',
        b"\xff\xfe",
        b'{"keys": ' + b"[" * 100_000,
        b'{"keys": [NaN]}',
        b'{"keys": [' + b"9" * 10_000 + b"]}",
        json.dumps({"keys": [jwk("one", "ES256")] * (KEYS_MAX + 1)}).encode(),
    ],
    ids=range(12),
)
def test_an_invalid_key_set_is_refused_and_the_previous_keys_stay_in_use(now: Now, data: bytes) -> None:
    source = Source(key_set(jwk("one", "ES256")))
    keys = keys_of(source, now)
    version = keys.version
    source.data = data
    keys.read()
    assert keys.find("one", "ES256")
    assert keys.version == version
    finding = keys.look()
    assert finding.state is State.WARNING
    assert "going on with 1 keys" in finding.text


def test_tokens_are_unavailable_until_the_first_keys_are_read(now: Now) -> None:
    source = Source(NotRead("Connection refused"))
    keys = JwtKeys(source, now)
    with pytest.raises(Unavailable, match="is being read") as raised:
        keys.find("one", "ES256")
    assert raised.value.retriable
    assert keys.look().state is State.PROBLEM
    keys.read()
    with pytest.raises(Unavailable, match="Connection refused; try again"):
        keys.find("one", "ES256")
    assert keys.look().state is State.PROBLEM
    assert "Connection refused" in keys.look().text
    source.data = key_set(jwk("one", "ES256"))
    now.s += PACE.failed_s - 0.1
    read_if_due(keys, now)
    assert source.reads == 1
    now.s += 0.1
    read_if_due(keys, now)
    assert keys.find("one", "ES256")
    assert keys.look().state is State.OK


def test_keys_are_read_again_after_a_while(now: Now) -> None:
    source = Source(key_set(jwk("one", "ES256")))
    keys = keys_of(source, now)
    version = keys.version
    source.data = key_set(jwk("two", "ES256"))
    now.s += PACE.refresh_s - 1
    read_if_due(keys, now)
    assert keys.version == version
    now.s += 1
    read_if_due(keys, now)
    assert keys.version != version
    assert keys.find("two", "ES256")
    with pytest.raises(Unavailable):
        keys.find("one", "ES256")


def test_an_unknown_key_is_looked_up_before_a_token_is_refused(now: Now) -> None:
    source = Source(key_set(jwk("one", "ES256")))
    keys = keys_of(source, now)
    for _ in range(3):
        with pytest.raises(Unavailable, match="key 'two', which is not known yet"):
            keys.find("two", "ES256")
    now.s += PACE.unknown_s - 1
    read_if_due(keys, now)
    assert source.reads == 1  # not so soon after the previous read
    now.s += 1
    read_if_due(keys, now)
    assert source.reads == 2
    with pytest.raises(AuthenticationFailed, match="key 'two', which the issuer has not"):
        keys.find("two", "ES256")
    read_if_due(keys, now)
    assert source.reads == 2


def test_a_refused_key_is_found_once_the_issuer_has_it(now: Now) -> None:
    source = Source(key_set(jwk("one", "ES256")))
    keys = keys_of(source, now)
    with pytest.raises(Unavailable):
        keys.find("two", "ES256")
    now.s += PACE.unknown_s
    read_if_due(keys, now)
    source.data = key_set(jwk("one", "ES256"), jwk("two", "ES256"))
    with pytest.raises(AuthenticationFailed):
        keys.find("two", "ES256")
    now.s += PACE.unknown_s
    with pytest.raises(Unavailable):  # and requests another read
        keys.find("two", "ES256")
    read_if_due(keys, now)
    assert keys.find("two", "ES256")


def test_made_up_key_ids_do_not_cause_more_reads_or_take_memory(now: Now) -> None:
    source = Source(key_set(jwk("one", "ES256")))
    keys = keys_of(source, now)
    for number in range(3000):
        with pytest.raises((Unavailable, AuthenticationFailed)):
            keys.find(f"made-up-{number}", "ES256")
        now.s += 0.1
        read_if_due(keys, now)
    assert source.reads <= 1 + 300 / PACE.unknown_s
    assert len(keys._asked) <= UNKNOWN_MAX


def test_an_unreachable_issuer_is_asked_again_for_an_unknown_key(now: Now) -> None:
    source = Source(key_set(jwk("one", "ES256")))
    keys = keys_of(source, now)
    source.data = NotRead("Connection refused")
    with pytest.raises(Unavailable):
        keys.find("two", "ES256")
    now.s += PACE.unknown_s
    read_if_due(keys, now)
    with pytest.raises(Unavailable, match="Connection refused"):
        keys.find("two", "ES256")
    source.data = key_set(jwk("two", "ES256"))
    now.s += PACE.failed_s
    read_if_due(keys, now)
    assert keys.find("two", "ES256")


def test_keys_are_read_again_after_a_defect(now: Now) -> None:
    source = Source(RuntimeError("a defect"))
    keys = keys_of(source, now)
    assert "a defect" in keys.look().text
    source.data = key_set(jwk("one", "ES256"))
    keys.read()
    assert keys.look().state is State.OK


def test_keys_are_read_on_their_own_thread_which_ends_with_the_daemon() -> None:
    import time

    source = Source(key_set(jwk("one", "ES256")))
    keys = JwtKeys(source, time.monotonic)
    with keys:
        while not keys.version:
            time.sleep(0.001)
        assert source.threads == {"kera-jwt-keys"}
        reading = [each for each in threading.enumerate() if each.name == "kera-jwt-keys"]
        with pytest.raises(Unavailable):
            keys.find("two", "ES256")
        assert source.reads == 1
    for each in reading:
        each.join(10)
        assert not each.is_alive()
