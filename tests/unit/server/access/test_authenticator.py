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


def test_a_user_is_known_by_its_password_and_has_its_roles(now: Now) -> None:
    door = told(
        authenticator(now, super_users=["role:boss"]), now, table(users=[user("alice", "etl"), user("eve", "boss")])
    )
    who = log_in(door, "alice", PASSWORD)
    assert (who.principal, who.roles, who.how, who.is_super) == ("user:alice", frozenset({"etl"}), "password", False)
    assert log_in(door, "eve", PASSWORD).is_super
    assert not who.is_daemon


def test_daemons_know_each_other_by_the_secret_of_their_cluster(now: Now) -> None:
    door = authenticator(now, secret=SECRET)  # before anything is told
    assert log_in(door, DAEMON_USER, SECRET).is_daemon
    with pytest.raises(AuthenticationFailed):
        log_in(door, DAEMON_USER, SECRET + "x")
    with pytest.raises(AuthenticationFailed):
        log_in(authenticator(now), DAEMON_USER, "no secret at all")


def test_who_has_begun_to_show_a_password_that_is_changed_meanwhile_has_shown_none(now: Now) -> None:
    for after in ([], [user("alice", password="another horse", version=2)]):
        door = told(authenticator(now), now, table(users=[user("alice")]))
        login = Login("alice", PASSWORD)
        exchange_id, answer = door.begin_login(login.first(), "tcp")
        told(door, now, table(2, after))
        with pytest.raises(AuthenticationFailed, match="is not right"):
            door.end_login(exchange_id, login.final(answer), "tcp")


def test_before_it_is_known_which_users_there_are_nobody_is_refused_for_good(now: Now) -> None:
    door = authenticator(now)
    with pytest.raises(Unavailable, match="has not heard from the coordinator yet"):
        log_in(door, "alice", PASSWORD)
    with pytest.raises(Unavailable):
        door.of_token(str(TOKEN))


def test_a_login_that_begins_before_it_is_known_who_there_is_does_not_end_as_one_with_a_wrong_password(
    now: Now,
) -> None:
    """A coordinator that has just begun to lead is asked at once by those whom it will know in a moment."""
    door = authenticator(now)
    with pytest.raises(Unavailable):
        door.begin_login(Login("alice", PASSWORD).first(), "tcp")
    assert log_in(told(door, now, table(users=[user("alice")])), "alice", PASSWORD).user == "alice"


def test_another_password_another_role_or_no_user_ends_what_was_found_out(now: Now) -> None:
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


def test_a_token_that_was_revoked_is_good_no_more(now: Now) -> None:
    door = told(authenticator(now), now, table(users=[user("alice")], tokens=[token()]))
    who = door.of_token(str(TOKEN))
    told(door, now, table(users=[user("alice")]))
    assert not door.holds(who)
    with pytest.raises(AuthenticationFailed):
        door.of_token(str(TOKEN))


def test_a_token_that_was_renewed_is_good_for_longer_when_it_is_shown_again(now: Now) -> None:
    door = told(authenticator(now), now, table(tokens=[token()]))
    first = door.of_token(str(TOKEN))
    now.s += 30
    told(door, now, table(tokens=[token()]))
    assert door.of_token(str(TOKEN)).until_s == first.until_s + 30


@pytest.mark.parametrize(
    "text",
    ["kera_", "kera_abcd", "kera_abcd_", "kera_abcd_other", "kera__s3cret", "kera_x_s3cret", "x", "kera-session_x"],
)
def test_what_is_no_token_is_refused(now: Now, text: str) -> None:
    door = told(authenticator(now), now, table(tokens=[token()]))
    with pytest.raises(AuthenticationFailed):
        door.of_token(text)


def test_a_token_does_not_show_its_secret() -> None:
    assert "s3cret" not in repr(TOKEN)
    assert "s3cret" in str(TOKEN)


def test_no_two_daemons_tell_by_their_salts_who_is_there(now: Now) -> None:
    known = table(users=[user("alice")])
    known.decoys = b"of the cluster"
    doors = [told(authenticator(now), now, known) for _ in range(2)]
    for name in ("alice", "bob"):
        assert len({door.begin_login(Login(name, PASSWORD).first(), "tcp")[1].split(b",")[1] for door in doors}) == 1


def test_who_begins_many_sessions_ends_those_of_nobody_else(now: Now) -> None:
    door = authenticator(now)
    session, _ = door.session_for(Identity("alice"))
    first, _ = door.session_for(Identity("mallory"))
    for _ in range(SESSIONS_MAX):
        door.session_for(Identity("mallory"))
    assert door.of_token(session).user == "alice"
    with pytest.raises(AuthenticationFailed, match="this session has ended"):
        door.of_token(first)


def test_a_session_stands_for_a_password_until_that_changes_or_an_hour_is_over(now: Now) -> None:
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


def test_over_a_unix_socket_a_process_is_known_by_its_user(now: Now) -> None:
    door = authenticator(now)
    own = door.of_process(os.geteuid())
    assert own is not None
    assert own.is_daemon
    assert own.until_s == math.inf
    assert door.of_process(4_000_000) is None
    daemon = door.of_process(1)  # the user of that name, which every Debian has
    assert daemon is not None
    assert (daemon.principal, daemon.is_daemon, daemon.is_super) == ("user:daemon", False, False)


def test_certificates_of_hosts_are_daemons_and_those_of_clients_are_users(now: Now, tmp_path: Path) -> None:
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
def test_who_a_certificate_is_of_is_for_patterns_to_say(users: list[str], names: list[str], found: str) -> None:
    assert CertificateNames.of(DAEMONS, users).user(names) == found


@pytest.mark.parametrize("users", [["CN=("], ["CN=(.*)"]])
def test_a_pattern_that_is_none_is_refused(users: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        CertificateNames.of(DAEMONS, users)


def test_what_a_certificate_names(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    names = names_in(authority.issue("host-1").cert.read_bytes())
    assert names[0] == "CN=host-1"
    assert {"URI:urn:kera:daemon", "DNS:host-1", "DNS:localhost", "IP:127.0.0.1"} <= set(names)


def test_a_runtime_that_is_encrypted_stays_so_with_settings_that_say_nothing_of_it(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    encrypted = secure(MACHINE, CredentialSettings(tls_ca=authority.path))
    known = secure(encrypted, CredentialSettings(user="alice", password=SecretStr(PASSWORD)))
    assert known.tls is encrypted.tls is not None
    assert known.introduction is not None
