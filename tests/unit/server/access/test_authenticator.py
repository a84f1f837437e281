from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from kera.core.access.accounts import Accounts, Token
from kera.core.access.certificates import DAEMONS, USERS, CertificateNames, names_in
from kera.core.access.identity import DAEMON_USER, Identity
from kera.core.access.passwords import Login
from kera.core.credential_settings import CredentialSettings, secure
from kera.core.errors import AuthenticationFailed, InvalidArgument, Unavailable
from kera.core.runtime import MACHINE
from kera.core.security.issuing import Authority
from kera.server.access.authenticator import SESSION_S, SESSIONS_MAX, Authenticator
from kera.v1 import access_pb2 as messages
from tests.unit.core.access.support import PASSWORD, SECRET, Now, authenticator, table, user

TOKEN = Token("abcd", "s3cret")


@pytest.fixture
def now() -> Now:
    return Now()


def token(**changes: object) -> messages.TokenRecord:
    record = messages.TokenRecord(token_id="abcd", digest=TOKEN.digest, owner="alice", expires_in_ms=60_000)
    for name, value in changes.items():
        if isinstance(value, list):
            getattr(record, name)[:] = value
        else:
            setattr(record, name, value)
    return record


def told(door: Authenticator, now: Now, given: messages.AccessTable) -> Authenticator:
    door.accounts = Accounts(given, 1, now())
    return door


def log_in(door: Authenticator, name: str, password: str) -> Identity:
    login = Login(name, password)
    exchange_id, answer = door.begin_login(login.first(), "tcp")
    who, final = door.end_login(exchange_id, login.final(answer), "tcp")
    login.check(final)
    return who


def test_a_login_with_a_password_gives_the_user_and_its_roles(now: Now) -> None:
    door = told(
        authenticator(now, super_users=["role:boss"]), now, table(users=[user("alice", "etl"), user("eve", "boss")])
    )
    who = log_in(door, "alice", PASSWORD)
    assert (who.principal, who.roles, who.how, who.is_super) == ("user:alice", frozenset({"etl"}), "password", False)
    assert log_in(door, "eve", PASSWORD).is_super
    assert not who.is_daemon


def test_a_daemon_logs_in_with_the_secret_of_its_cluster(now: Now) -> None:
    door = authenticator(now, secret=SECRET)  # before it has any users
    assert log_in(door, DAEMON_USER, SECRET).is_daemon
    with pytest.raises(AuthenticationFailed):
        log_in(door, DAEMON_USER, SECRET + "x")
    with pytest.raises(AuthenticationFailed):
        log_in(authenticator(now), DAEMON_USER, "no secret at all")


def test_a_login_fails_when_the_password_changes_meanwhile(now: Now) -> None:
    for after in ([], [user("alice", password="another horse", version=2)]):
        door = told(authenticator(now), now, table(users=[user("alice")]))
        login = Login("alice", PASSWORD)
        exchange_id, answer = door.begin_login(login.first(), "tcp")
        told(door, now, table(2, after))
        with pytest.raises(AuthenticationFailed, match="is not right"):
            door.end_login(exchange_id, login.final(answer), "tcp")


def test_logins_before_the_users_are_known_are_unavailable(now: Now) -> None:
    door = authenticator(now)
    with pytest.raises(Unavailable, match="has not heard from the coordinator yet"):
        log_in(door, "alice", PASSWORD)
    with pytest.raises(Unavailable):
        door.of_token(str(TOKEN))


def test_a_login_retried_after_the_users_are_known_succeeds(
    now: Now,
) -> None:
    """Clients call a new leading coordinator at once, a moment before it knows its users."""
    door = authenticator(now)
    with pytest.raises(Unavailable):
        door.begin_login(Login("alice", PASSWORD).first(), "tcp")
    assert log_in(told(door, now, table(users=[user("alice")])), "alice", PASSWORD).user == "alice"


def test_an_identity_no_longer_holds_after_a_change_of_its_user(now: Now) -> None:
    door = told(authenticator(now), now, table(users=[user("alice", "etl")]))
    who = log_in(door, "alice", PASSWORD)
    assert door.holds(who)
    for users in ([user("alice", "etl", version=2)], [user("alice")], []):
        assert not told(door, now, table(users=users)).holds(who)
    assert told(door, now, table(users=[user("alice", "etl"), user("bob")])).holds(who)


def test_a_token_has_the_rights_of_its_owner_until_it_expires(now: Now) -> None:
    door = told(
        authenticator(now),
        now,
        table(users=[user("alice", "etl")], tokens=[token(owner_roles=["jwt"], resources=["stream:a"])]),
    )
    who = door.of_token(str(TOKEN))
    assert (who.user, who.roles, who.narrowed) == ("alice", frozenset({"etl", "jwt"}), ("stream:a",))
    assert door.holds(who)
    now.s += 60
    assert not door.holds(who)
    with pytest.raises(AuthenticationFailed, match="token abcd has expired"):
        door.of_token(str(TOKEN))


def test_a_revoked_token_is_refused(now: Now) -> None:
    door = told(authenticator(now), now, table(users=[user("alice")], tokens=[token()]))
    who = door.of_token(str(TOKEN))
    told(door, now, table(users=[user("alice")]))
    assert not door.holds(who)
    with pytest.raises(AuthenticationFailed):
        door.of_token(str(TOKEN))


def test_a_renewed_token_is_valid_for_longer_at_its_next_use(now: Now) -> None:
    door = told(authenticator(now), now, table(tokens=[token()]))
    first = door.of_token(str(TOKEN))
    now.s += 30
    told(door, now, table(tokens=[token()]))
    assert door.of_token(str(TOKEN)).until_s == first.until_s + 30


@pytest.mark.parametrize(
    "text",
    ["kera_", "kera_abcd", "kera_abcd_", "kera_abcd_other", "kera__s3cret", "kera_x_s3cret", "x", "kera-session_x"],
)
def test_an_invalid_token_is_refused(now: Now, text: str) -> None:
    door = told(authenticator(now), now, table(tokens=[token()]))
    with pytest.raises(AuthenticationFailed):
        door.of_token(text)


def test_the_repr_of_a_token_hides_its_secret() -> None:
    assert "s3cret" not in repr(TOKEN)
    assert "s3cret" in str(TOKEN)


def test_all_daemons_give_a_name_the_same_salt_known_or_not(now: Now) -> None:
    known = table(users=[user("alice")])
    known.decoys = b"of the cluster"
    doors = [told(authenticator(now), now, known) for _ in range(2)]
    for name in ("alice", "bob"):
        assert len({door.begin_login(Login(name, PASSWORD).first(), "tcp")[1].split(b",")[1] for door in doors}) == 1


def test_many_sessions_of_a_user_do_not_end_those_of_others(now: Now) -> None:
    door = authenticator(now)
    session, _ = door.session_for(Identity("alice"))
    first, _ = door.session_for(Identity("mallory"))
    for _ in range(SESSIONS_MAX):
        door.session_for(Identity("mallory"))
    assert door.of_token(session).user == "alice"
    with pytest.raises(AuthenticationFailed, match="this session has ended"):
        door.of_token(first)


def test_a_session_ends_with_a_change_of_the_password_or_after_an_hour(now: Now) -> None:
    door = told(authenticator(now), now, table(users=[user("alice")]))
    session, for_s = door.session_for(log_in(door, "alice", PASSWORD))
    assert for_s == SESSION_S
    assert door.of_token(session).user == "alice"
    told(door, now, table(users=[user("alice", version=2)]))
    with pytest.raises(AuthenticationFailed, match="this session has ended") as raised:
        door.of_token(session)
    assert raised.value.attributes["session_ended"]
    session, _ = door.session_for(log_in(door, "alice", PASSWORD))
    now.s += SESSION_S
    with pytest.raises(AuthenticationFailed, match="this session has ended"):
        door.of_token(session)


def test_a_process_on_a_unix_socket_is_identified_by_its_user(now: Now) -> None:
    door = authenticator(now)
    own = door.of_process(os.geteuid())
    assert own is not None
    assert own.is_daemon
    assert own.until_s == math.inf
    assert door.of_process(4_000_000) is None
    daemon = door.of_process(1)  # the user named daemon, on every Debian
    assert daemon is not None
    assert (daemon.principal, daemon.is_daemon, daemon.is_super) == ("user:daemon", False, False)


def test_host_certificates_identify_daemons_and_client_certificates_users(now: Now, tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    door = told(authenticator(now), now, table(users=[user("alice", "etl")]))
    host = door.of_certificate(authority.issue("10.0.0.1").cert.read_bytes())
    alice = door.of_certificate(authority.issue("alice", client=True).cert.read_bytes())
    assert host is not None
    assert host.is_daemon
    assert alice is not None
    assert (alice.user, alice.roles, alice.is_daemon) == ("alice", frozenset({"etl"}), False)
    assert door.of_certificate(b"no certificate") is None


@pytest.mark.parametrize(
    ("users", "names", "found"),
    [
        (USERS, ["CN=alice,O=Example"], "alice"),
        (USERS, ["O=Example"], ""),
        (USERS, ["CN=alice smith"], ""),
        ([r"URI:spiffe://example\.org/user/(?P<user>[^/]+)"], ["CN=x", "URI:spiffe://example.org/user/alice"], "alice"),
        ([r"URI:spiffe://example\.org/user/(?P<user>[^/]+)"], ["URI:spiffe://exampleXorg/user/alice"], ""),
        ([r"CN=(?P<user>\w+)"], ["CN=alice,O=Other"], ""),
    ],
)
def test_patterns_give_the_user_of_a_certificate(users: list[str], names: list[str], found: str) -> None:
    assert CertificateNames.of(DAEMONS, users).user(names) == found


@pytest.mark.parametrize("users", [["CN=("], ["CN=(.*)"]])
def test_an_invalid_pattern_is_refused(users: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        CertificateNames.of(DAEMONS, users)


def test_the_names_of_a_certificate_are_found(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    names = names_in(authority.issue("host-1").cert.read_bytes())
    assert names[0] == "CN=host-1"
    assert {"URI:urn:kera:daemon", "DNS:host-1", "DNS:localhost", "IP:127.0.0.1"} <= set(names)


def test_a_runtime_keeps_its_tls_with_settings_without_tls(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    encrypted = secure(MACHINE, CredentialSettings(tls_ca=authority.path))
    known = secure(encrypted, CredentialSettings(user="alice", password=SecretStr(PASSWORD)))
    assert known.tls is encrypted.tls is not None
    assert known.introduction is not None
