from __future__ import annotations

import random

import pytest

from kera.core.access.passwords import (
    EXCHANGE_S,
    EXCHANGES_MAX,
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    Login,
    Logins,
    check_verifier,
    verifier_for,
)
from kera.core.errors import AuthenticationFailed, InvalidArgument
from kera.v1 import access_pb2 as messages
from tests.unit.core.access.support import PASSWORD, Now

PEER = "tcp"


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def logins(now: Now) -> Logins:
    known = {"alice": verifier_for(PASSWORD, iterations=ITERATIONS_MIN)}
    return Logins(lambda name: [known[name]] if name in known else [], now)


def test_a_login_with_the_password_succeeds(logins: Logins) -> None:
    login = Login("alice", PASSWORD)
    exchange_id, answer = logins.begin(login.first(), PEER)
    user, final, _ = logins.end(exchange_id, login.final(answer), PEER)
    login.check(final)
    assert user == "alice"


@pytest.mark.parametrize(("user", "password"), [("alice", "wrong horse"), ("bob", PASSWORD)])
def test_a_failed_login_does_not_tell_whether_the_user_or_the_password_is_wrong(
    logins: Logins, user: str, password: str
) -> None:
    login = Login(user, password)
    exchange_id, answer = logins.begin(login.first(), PEER)
    with pytest.raises(AuthenticationFailed, match="the user name or the password is not right"):
        logins.end(exchange_id, login.final(answer), PEER)


def test_an_unknown_user_has_the_same_salt_each_time(logins: Logins) -> None:
    salts = {logins.begin(Login("bob", PASSWORD).first(), PEER)[1].split(b",")[1] for _ in range(3)}
    assert len(salts) == 1


def test_an_unknown_user_has_the_same_salt_at_all_daemons(now: Now) -> None:
    daemons = [Logins(lambda _: [], now, decoys=lambda: b"of the cluster") for _ in range(2)]
    salts = {logins.begin(Login("bob", PASSWORD).first(), PEER)[1].split(b",")[1] for logins in daemons}
    assert len(salts) == 1


def test_a_login_makes_decoys_for_known_and_unknown_users_alike(now: Now) -> None:
    verifier, made = verifier_for(PASSWORD, iterations=ITERATIONS_MIN), []

    def decoys() -> bytes:
        made.append(True)
        return b"of the cluster"

    logins = Logins(lambda name: [verifier] if name == "alice" else [], now, decoys=decoys)
    for name in ("alice", "bob"):
        logins.begin(Login(name, PASSWORD).first(), PEER)
    assert len(made) == 2


def test_many_exchanges_of_one_host_do_not_end_those_of_another(now: Now) -> None:
    verifier = verifier_for(PASSWORD, iterations=ITERATIONS_MIN)
    logins = Logins(lambda _: [verifier], now, exchanges_max=4)
    login = Login("alice", PASSWORD)
    exchange_id, answer = logins.begin(login.first(), PEER, "10.0.0.2")
    many = [logins.begin(Login("alice", PASSWORD).first(), PEER, "10.0.0.3")[0] for _ in range(10)]
    assert logins.end(exchange_id, login.final(answer), PEER).user == "alice"
    with pytest.raises(AuthenticationFailed, match="is over; start a new one"):
        logins.end(many[0], b"", PEER)


def test_a_client_detects_a_server_that_does_not_know_the_password(logins: Logins) -> None:
    login = Login("alice", PASSWORD)
    exchange_id, answer = logins.begin(login.first(), PEER)
    _, final, _ = logins.end(exchange_id, login.final(answer), PEER)
    with pytest.raises(AuthenticationFailed, match="it is not the one it says"):
        login.check(final[:-4] + b"AAA=")


def test_a_client_refuses_too_many_iterations(logins: Logins) -> None:
    login = Login("alice", PASSWORD)
    _, answer = logins.begin(login.first(), PEER)
    text = answer.decode().rpartition(",i=")[0]
    with pytest.raises(AuthenticationFailed, match=f"asks for {ITERATIONS_MAX + 1} iterations"):
        login.final(f"{text},i={ITERATIONS_MAX + 1}".encode())


def test_an_exchange_ends_after_a_wrong_peer_or_a_timeout(logins: Logins, now: Now) -> None:
    for late, whom in ((0.0, "grpc"), (EXCHANGE_S, PEER)):
        login = Login("alice", PASSWORD)
        exchange_id, answer = logins.begin(login.first(), PEER)
        final = login.final(answer)
        now.s += late
        for _ in range(2):
            with pytest.raises(AuthenticationFailed, match="is over; start a new one"):
                logins.end(exchange_id, final, whom)


def test_the_oldest_exchange_makes_room_for_new_ones(logins: Logins) -> None:
    login = Login("alice", PASSWORD)
    exchange_id, answer = logins.begin(login.first(), PEER)
    for _ in range(EXCHANGES_MAX):
        logins.begin(Login("alice", PASSWORD).first(), PEER)
    with pytest.raises(AuthenticationFailed, match="is over; start a new one"):
        logins.end(exchange_id, login.final(answer), PEER)


def test_a_mutated_message_is_refused_as_a_failed_authentication(logins: Logins) -> None:
    """A server would answer any other error as a defect."""
    chance = random.Random(5)
    for round_ in range(3000):
        login = Login("alice", PASSWORD)
        first = _mutated(chance, login.first()) if round_ % 2 else login.first()
        try:
            exchange_id, answer = logins.begin(first, PEER)
            user, _, _ = logins.end(exchange_id, _mutated(chance, login.final(answer)), PEER)
        except AuthenticationFailed:
            continue
        assert user == "alice"  # the change made no difference


def _mutated(chance: random.Random, message: bytes) -> bytes:
    data = bytearray(message)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                del data[at : at + chance.randint(1, 20)]
            case 1:
                data[at:at] = bytes(chance.choices(b",=inrcpvmabY \x00\xff", k=chance.randint(1, 5)))
            case 2:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case _:
                data = data[:at]
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize(
    "message", [b"", b"n,,", b"\xff" * 10, b"n,,n=alice,r=" + b"x" * 5000, b"p=tls-unique,,n=a,r=b"]
)
def test_an_invalid_first_message_is_refused(logins: Logins, message: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        logins.begin(message, PEER)


@pytest.mark.parametrize("password", ["", "short", "x" * 1025, "with\x00null byte"])
def test_an_invalid_password_is_refused(password: str) -> None:
    with pytest.raises(InvalidArgument):
        verifier_for(password)


@pytest.mark.parametrize(
    "change",
    [
        {"salt": b""},
        {"salt": b"x" * 65},
        {"stored_key": b"short"},
        {"server_key": b""},
        {"iterations": 1},
        {"iterations": ITERATIONS_MAX + 1},
    ],
)
def test_an_invalid_verifier_is_refused(change: dict[str, bytes | int]) -> None:
    verifier = verifier_for(PASSWORD, iterations=ITERATIONS_MIN)
    check_verifier(verifier)
    for name, value in change.items():
        setattr(verifier, name, value)
    with pytest.raises(InvalidArgument):
        check_verifier(verifier)


def test_a_verifier_does_not_contain_the_password() -> None:
    assert PASSWORD.encode() not in messages.UserRecord(scram=verifier_for(PASSWORD)).SerializeToString()


def test_each_of_several_passwords_works_and_the_login_tells_which_one(now: Now) -> None:
    salt = b"0123456789abcdef"
    known = [
        verifier_for(password, iterations=ITERATIONS_MIN, salt=salt) for password in ("the new one", "the old one")
    ]
    logins = Logins(lambda _: known, now)
    for password, verifier in zip(("the new one", "the old one"), known, strict=True):
        login = Login("alice", password)
        exchange_id, answer = logins.begin(login.first(), PEER)
        user, final, shown = logins.end(exchange_id, login.final(answer), PEER)
        login.check(final)
        assert (user, shown) == ("alice", verifier)
    login = Login("alice", "another one")
    exchange_id, answer = logins.begin(login.first(), PEER)
    with pytest.raises(AuthenticationFailed, match="is not right"):
        logins.end(exchange_id, login.final(answer), PEER)
