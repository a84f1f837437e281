"""The secret of a cluster: valid files, and how a new secret replaces the old one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.access.cluster_secret import LOOK_EVERY_S, ClusterSecret
from kera.core.access.credentials import Credentials, of_daemon
from kera.core.access.identity import Identity
from kera.core.base.health import State
from kera.core.base.settings import InvalidSettings
from kera.core.errors import AuthenticationFailed
from kera.core.rpc.method import introduce
from kera.server.access.authenticator import Authenticator
from kera.v1 import access_pb2 as messages
from tests.unit.core.access.support import Now

OLD, NEW = "the old secret of a cluster", "the new secret of a cluster"


@pytest.fixture
def now() -> Now:
    return Now()


class Daemon:
    """A daemon with a file for the secret, which each look reads again."""

    def __init__(self, path: Path, now: Now, *secrets: str) -> None:
        self.path = path
        self.now = now
        self.put(*secrets)
        self.secret = ClusterSecret(path, now)
        names = CertificateNames.of(DAEMONS, USERS)
        self.door = Authenticator(names, now_s=now, cluster_secret=self.secret)
        self.asked = 0

    def put(self, *secrets: str) -> None:
        self.path.write_text("\n".join(secrets) + "\n")
        self.now.s += LOOK_EVERY_S

    async def known_to(self, other: Daemon) -> Identity:
        """Call the other daemon, and return the identity that it gives this one."""
        found: list[Identity] = []

        async def ask(request: messages.AuthenticateRequest) -> messages.AuthenticateResponse:
            self.asked += 1
            if not request.exchange_id:
                exchange_id, scram = other.door.begin_login(request.scram, "tcp")
                return messages.AuthenticateResponse(exchange_id=exchange_id, scram=scram)
            who, scram = other.door.end_login(request.exchange_id, request.scram, "tcp")
            found.append(who)
            return messages.AuthenticateResponse(scram=scram)

        await introduce(of_daemon(self.secret.shown), ask, each_call=False)
        return found[-1]


async def test_daemons_change_the_secret_without_an_interruption(tmp_path: Path, now: Now) -> None:
    one, other = (Daemon(tmp_path / name, now, OLD) for name in ("one", "other"))

    async def all_know_each_other() -> None:
        for caller, called in ((one, other), (other, one)):
            assert (await caller.known_to(called)).is_daemon

    await all_know_each_other()
    for each in (one, other):  # one daemon after the other
        each.put(NEW, OLD)
        await all_know_each_other()
    one.asked = 0
    await all_know_each_other()
    assert one.asked == 2  # it shows the new secret, which is taken at once
    for each in (one, other):
        each.put(NEW)
        await all_know_each_other()
    other.put("nothing that anybody else has")
    for caller, called in ((one, other), (other, one)):
        with pytest.raises(AuthenticationFailed):
            await caller.known_to(called)


async def test_an_identity_by_a_removed_secret_no_longer_holds(tmp_path: Path, now: Now) -> None:
    one, other = (Daemon(tmp_path / name, now, OLD) for name in ("one", "other"))
    by_old = await one.known_to(other)
    other.put(NEW, OLD)
    one.put(NEW, OLD)
    by_new = await one.known_to(other)
    assert other.door.holds(by_old)
    other.put(NEW)
    assert not other.door.holds(by_old)
    assert other.door.holds(by_new)
    other.put(NEW, OLD)  # the old secret comes back: a caller has to show it again
    assert not other.door.holds(by_old)
    assert other.door.holds(Identity("", how="certificate", is_daemon=True))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("short", "has 5 characters, and a secret has 16 at least: openssl rand -base64 32 makes one"),
        (f"{NEW}\nshort", "has 5 characters"),
        (
            f"{NEW}\n{OLD}\n{OLD} once more",
            "has 3 lines: expected the secret, and on a second line the previous one",
        ),
        ("x" * 1025, "8 to 1024 characters"),
        ("a secret with a \x07 bell", "characters that passwords cannot have"),
    ],
)
def test_an_invalid_secret_is_refused_and_the_previous_one_stays_in_use(
    tmp_path: Path, now: Now, text: str, reason: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    with pytest.raises(InvalidSettings, match=f"cluster_secret_file {path}.*{reason}") as caught:
        ClusterSecret(path)
    assert not text.strip() or text not in str(caught.value)
    path.write_text(OLD)
    secret = ClusterSecret(path, now)
    path.write_text(text)
    now.s += LOOK_EVERY_S
    assert list(secret.shown()) == [OLD]  # the previous secret stays in use
    assert reason.split(",", maxsplit=1)[0] in secret.problem
    path.write_text(NEW)
    now.s += LOOK_EVERY_S
    assert (list(secret.shown()), secret.problem, secret.look().state) == ([NEW], "", State.OK)


def test_a_missing_file_is_reported(tmp_path: Path, now: Now) -> None:
    path = tmp_path / "secret"
    with pytest.raises(InvalidSettings, match="cannot be read: No such file or directory"):
        ClusterSecret(path)
    path.write_text(OLD)
    secret = ClusterSecret(path, now)
    path.unlink()
    now.s += LOOK_EVERY_S
    assert "cannot be read" in secret.problem
    assert OLD not in repr(secret)


async def test_a_client_does_not_retry_a_wrong_password() -> None:
    asked = []

    async def ask(request: messages.AuthenticateRequest) -> messages.AuthenticateResponse:
        asked.append(request)
        raise AuthenticationFailed("no")

    with pytest.raises(AuthenticationFailed):
        await introduce(Credentials(user="alice", password=lambda: "some password"), ask, each_call=True)
    assert len(asked) == 1
