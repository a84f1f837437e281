"""The command line of a cluster with security on: authentication, rights, and the first user."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from kera.local.cluster import LocalCluster
from tests.integration.command_line import run_kera
from tests.integration.secured_cluster import PASSWORD, Secured
from tests.integration.zookeeper import ZooKeeper

pytestmark = pytest.mark.timeout(180)


class CommandLine:
    """Commands against a cluster with security on, with or without credentials."""

    def __init__(self, secured: Secured, directory: Path) -> None:
        self.secured = secured
        self.directory = directory
        self.password = directory / "password"
        self.password.write_text(PASSWORD)
        self.password.chmod(0o600)

    def run(self, *arguments: str, stdin: bytes = b"", **shown: Any) -> CompletedProcess[bytes]:
        """`shown`: the client settings that authenticate the user."""
        said = {f"KERA_CLIENT_{name.upper()}": str(value) for name, value in shown.items()}
        environment = {
            "KERA_BOOTSTRAP": self.secured.cluster.bootstrap,
            "KERA_CLIENT_TLS_CA": str(self.secured.ca),
            **said,
        }
        return run_kera(*arguments, stdin=stdin, env=environment)

    def as_user(self, name: str, *arguments: str, stdin: bytes = b"") -> str:
        """The output of a command for a user of the cluster."""
        return output(self.run(*arguments, stdin=stdin, user=name, password_file=self.password))

    def refused(self, name: str, *arguments: str, stdin: bytes = b"", code: int = 1) -> str:
        """The error of a command that the user may not run."""
        done = self.run(*arguments, stdin=stdin, user=name, password_file=self.password)
        assert done.returncode == code, done
        last = done.stderr.decode().splitlines()[-1]
        assert last.startswith("kera: error: ")
        return last

    def as_daemon(self, *arguments: str) -> CompletedProcess[bytes]:
        return self.run(*arguments, "--cluster-secret-file", str(self.secured.secret))


def output(done: CompletedProcess[bytes]) -> str:
    assert done.returncode == 0, done
    return done.stdout.decode()


@pytest.fixture(scope="module")
def kera(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    directory = tmp_path_factory.mktemp("access-commands")
    with contextlib.ExitStack() as stack:
        made = CommandLine(Secured(directory, stack), directory)
        done = made.as_daemon("user", "create", "admin", "--password-file", str(made.password))
        assert output(done) == "created user admin with a password\n"
        yield made


_numbers = itertools.count(1)


def new_name(what: str) -> str:
    return f"{what}-{next(_numbers)}"


@pytest.fixture
def user(kera: CommandLine) -> str:
    """A user without rights."""
    name = new_name("user")
    kera.as_user("admin", "user", "create", name, "--password-file", str(kera.password))
    return name


@pytest.fixture
def stream(kera: CommandLine) -> str:
    name = new_name("stream")
    kera.as_user("admin", "stream", "create", name)
    return name


# -- the first user ------------------------------------------------------------------------------------------------


def test_only_the_cluster_secret_allows_creating_the_first_user(kera: CommandLine) -> None:
    command = ("user", "create", new_name("user"), "--password-file", str(kera.password))
    refused = kera.run(*command)
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"kera: error: nobody has authenticated over this connection" in refused.stderr
    wrong = kera.directory / "wrong-secret"
    wrong.write_text("another secret of sixteen and more")
    refused = kera.run(*command, "--cluster-secret-file", str(wrong))
    assert refused.stderr == b"kera: error: the user name or the password is not right\n"
    assert kera.as_daemon(*command).returncode == 0


def test_the_cluster_secret_allows_replacing_a_lost_password(kera: CommandLine, user: str) -> None:
    other = kera.directory / f"{user}-password"
    other.write_text("what nobody had before")
    other.chmod(0o600)
    assert output(kera.as_daemon("user", "passwd", user, "--password-file", str(other)))
    assert b"is not right" in kera.run("token", "list", user=user, password_file=kera.password).stderr
    assert kera.run("token", "list", user=user, password_file=other).returncode == 0


def test_a_missing_cluster_secret_file_is_reported(kera: CommandLine, tmp_path: Path) -> None:
    done = kera.run("user", "list", "--cluster-secret-file", f"{tmp_path}/secret")
    assert done.returncode == 2
    assert f"cluster_secret_file {tmp_path}/secret cannot be read: No such file or directory" in done.stderr.decode()


# -- every command, with each way to authenticate
# ---------------------------------------------------------------------------------


@pytest.fixture(
    params=[
        "password",
        pytest.param("token", marks=pytest.mark.slow),
        pytest.param("password of the environment", marks=pytest.mark.slow),
        pytest.param("settings file", marks=pytest.mark.slow),
    ]
)
def shown(request: pytest.FixtureRequest, kera: CommandLine, tmp_path: Path) -> dict[str, Any]:
    """Settings with which clients authenticate as the admin, one for each way."""
    if request.param == "password":
        return {"user": "admin", "password_file": kera.password}
    if request.param == "password of the environment":
        return {"user": "admin", "password": PASSWORD}
    if request.param == "token":
        kera.as_user("admin", "token", "issue", "--out", str(tmp_path / "token"))
        return {"token_file": tmp_path / "token"}
    settings = tmp_path / "kera.toml"
    settings.write_text(f'[client]\nuser = "admin"\npassword_file = "{kera.password}"\ntls_ca = "{kera.secured.ca}"\n')
    return {"config": settings}


def test_every_command_works_with_each_way_to_authenticate(
    kera: CommandLine, shown: dict[str, Any], tmp_path: Path
) -> None:
    config = shown.pop("config", None)
    environment = {} if config is None else {"KERA_CONFIG": str(config)}
    stream, group = new_name("stream"), new_name("group")

    def run(*arguments: str, stdin: bytes = b"") -> str:
        if not environment:
            return output(kera.run(*arguments, stdin=stdin, **shown))
        return output(
            run_kera(*arguments, stdin=stdin, env={"KERA_BOOTSTRAP": kera.secured.cluster.bootstrap, **environment})
        )

    run("stream", "create", stream, "--streamlets", "2")
    run("produce", stream, stdin=b"one\ntwo\n")
    assert sorted(run("consume", stream, "--until-end").split()) == ["one", "two"]
    run("group", "reset", group, stream, "--to", "earliest", "--create", "--yes")
    assert sorted(run("consume", stream, "--group", group, "--count", "2").split()) == ["one", "two"]
    assert group in run("group", "list")
    while not run("group", "describe", group).startswith(f"{group}: 0 consumers"):
        pass  # on a busy machine, only the member's silence shows the coordinator that it has left
    run("group", "delete", group, "--yes")
    run("stream", "alter", stream, "--retention-ms", "3600000")
    assert stream in run("stream", "list")
    assert stream in run("stream", "describe", stream)
    run("stream", "truncate", stream, "--all", "--yes")
    run("stream", "delete", stream, "--yes")
    assert ", security on\n" in run("cluster", "describe")
    assert "nothing to move" in run("cluster", "rebalance", "--dry-run")
    run("cluster", "recoveries")
    run("cluster", "backup", str(tmp_path / "metadata"))
    said = run("cluster", "health")
    assert "everybody has to authenticate, and may do what rules allow" in said
    assert "does not answer" not in said
    assert "security" in run("doctor", "--bootstrap", kera.secured.cluster.bootstrap)
    assert json.loads(run("user", "list", "--json"))
    run("acl", "list")
    run("token", "list")


@pytest.mark.slow
def test_check_and_bench_work_for_an_authenticated_user(kera: CommandLine) -> None:
    said = json.loads(kera.as_user("admin", "check", "--json", "--seconds", "1", "--rate", "100"))
    assert said["verdict"] == "kept"
    measured = kera.as_user(
        "admin", "bench", "produce", "--records", "1000", "--bootstrap", kera.secured.cluster.bootstrap
    )
    assert "records" in measured.lower()


def test_commands_without_credentials_say_how_to_authenticate(kera: CommandLine, stream: str) -> None:
    for command in (
        ("stream", "list"),
        ("stream", "create", "new"),
        ("produce", stream),
        ("consume", stream, "--until-end"),
        ("group", "list"),
        ("cluster", "describe"),
        ("user", "list"),
        ("acl", "list"),
        ("token", "list"),
    ):
        done = kera.run(*command, retry_timeout_ms=100)
        assert done.returncode == 1, command
        assert done.stderr.startswith(b"kera: error: nobody has authenticated over this connection: show a certificate")
    for command in (("cluster", "health"), ("doctor", "--bootstrap", kera.secured.cluster.bootstrap)):
        done = kera.run(*command)
        assert done.returncode == 2
        assert b"problem  access  nobody has authenticated" in done.stdout
        assert b"say who you are: KERA_CLIENT_USER" in done.stdout


def test_a_refusal_names_the_command_that_grants_the_missing_right(kera: CommandLine, user: str, stream: str) -> None:
    kera.as_user("admin", "acl", "grant", f"user:{user}", "describe", f"stream:{stream}")
    error = kera.refused(user, "stream", "delete", stream, "--yes")
    grant = re.search(r"kera (acl grant user:\S+ delete stream:\S+)", error)
    assert grant is not None, error
    kera.as_user("admin", *grant[1].split())
    kera.as_user(user, "stream", "delete", stream, "--yes")


# -- users, rules and tokens ---------------------------------------------------------------------------------------


def test_granted_rights_work_until_they_are_revoked(kera: CommandLine, user: str, stream: str) -> None:
    rule = f"user:{user}", "read,write", f"stream:{stream}"
    assert kera.run("acl", "check", "write", rule[2], user=user, password_file=kera.password).returncode == 1
    granted = kera.as_user("admin", "acl", "grant", *rule)
    assert re.fullmatch(rf"rule \d+: {rule[0]} may read, write {rule[2]}\n", granted)
    asked = kera.as_user("admin", "acl", "check", "--principal", rule[0], "write", rule[2])
    assert re.fullmatch(rf"may {rule[0]} write {rule[2]}\? yes: rule \d+\n", asked)
    kera.as_user(user, "produce", stream, stdin=b"one\n")
    assert kera.as_user(user, "consume", stream, "--until-end") == "one\n"
    kera.as_user("admin", "acl", "revoke", rule[0], "write", rule[2])
    assert "may not write" in kera.refused(user, "produce", stream, stdin=b"two\n")
    assert rule[2] in kera.as_user(user, "acl", "list")
    kera.as_user("admin", "acl", "revoke", rule[0], "all", rule[2])
    assert kera.run("acl", "list", user=user, password_file=kera.password).stderr == b"no rules\n"
    assert "has no such rule" in kera.refused("admin", "acl", "revoke", *rule)


@pytest.mark.slow
def test_a_user_has_the_rights_of_its_role(kera: CommandLine, user: str, stream: str) -> None:
    role = new_name("role")
    kera.as_user("admin", "acl", "grant", f"role:{role}", "describe", f"stream:{stream}")
    kera.as_user("admin", "user", "roles", user, "--role", role)
    assert kera.as_user(user, "acl", "check", "describe", f"stream:{stream}").startswith(f"may user:{user} describe")
    kera.as_user("admin", "user", "roles", user, "--no-roles")
    assert stream not in kera.as_user(user, "stream", "list")


def test_a_token_replaces_the_password_for_the_stream_it_is_narrowed_to(
    kera: CommandLine, user: str, stream: str, tmp_path: Path
) -> None:
    kera.as_user("admin", "acl", "grant", f"user:{user}", "read,write", f"stream:{stream}")
    kera.as_user("admin", "acl", "grant", f"user:{user}", "create", "stream:*")
    file = tmp_path / "token"
    issued = kera.as_user(user, "token", "issue", "--stream", stream, "--lifetime", "8h", "--out", str(file))
    token_id = issued.split()[1].rstrip(",")
    assert "valid for 8 h, and as long again" in issued
    output(kera.run("produce", stream, stdin=b"one\n", token_file=file))
    assert output(kera.run("consume", stream, "--until-end", token_file=file)) == "one\n"
    assert b"may not create" in kera.run("stream", "create", new_name("stream"), token_file=file).stderr
    assert token_id in kera.as_user(user, "token", "list")
    assert kera.as_user(user, "token", "renew", token_id) == f"token {token_id} is valid for 8 h\n"
    kera.as_user(user, "token", "revoke", token_id)
    assert b"the token is not known" in kera.run("stream", "list", token_file=file).stderr


@pytest.mark.slow
def test_a_user_that_deletes_itself_is_refused_at_once(kera: CommandLine) -> None:
    name = new_name("user")
    kera.as_user("admin", "user", "create", name, "--role", "boss", "--password-file", str(kera.password))
    assert kera.as_user(name, "user", "delete", name, "--yes") == f"deleted user {name}\n"
    assert "is not right" in kera.refused(name, "user", "list")


# -- outages --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_change_warns_about_a_broker_that_cannot_be_notified(kera: CommandLine, user: str) -> None:
    kera.secured.cluster.kill("broker-2")
    try:
        done = kera.run("user", "delete", user, "--yes", user="admin", password_file=kera.password)
    finally:
        kera.secured.cluster.restart("broker-2")
    assert (done.returncode, done.stdout.decode()) == (0, f"deleted user {user}\n")
    assert re.fullmatch(
        rf"kera: warning: broker \d+ could not be notified \(.*\): until it is back, {user} may go on there\n",
        done.stderr.decode(),
    )


@pytest.mark.slow
def test_a_change_fails_with_a_clear_error_while_the_coordinator_is_down(kera: CommandLine) -> None:
    name = new_name("user")
    create = "user", "create", name, "--password-file", str(kera.password)
    kera.secured.cluster.kill("coordinator")
    try:
        assert "no coordinator can be reached" in kera.refused("admin", *create)
        assert "no coordinator can be reached" in kera.refused("admin", "acl", "check", "read", "stream:a", code=2)
    finally:
        kera.secured.cluster.restart("coordinator")
    kera.as_user("admin", *create)


@pytest.mark.slow
def test_a_change_fails_with_an_error_while_the_metadata_store_is_down(zookeeper: ZooKeeper, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        secured = Secured(
            tmp_path, stack, brokers=1, backups=0, replication=0, zookeeper=f"{zookeeper.address}/access-commands"
        )
        kera = CommandLine(secured, tmp_path)
        create = "user", "create", "alice", "--password-file", str(kera.password)
        output(kera.as_daemon(*create))
        zookeeper.stop()
        try:
            done = kera.as_daemon("user", "roles", "alice", "--role", "etl")
        finally:
            zookeeper.start()
        assert done.returncode == 1
        assert re.fullmatch(rb"kera: error: .*\n", done.stderr), done
        while (done := kera.as_daemon("user", "roles", "alice", "--role", "etl")).returncode:
            assert b"coordinator" in done.stderr
        (alice,) = json.loads(output(kera.as_daemon("user", "list", "--json")))
        assert alice["roles"] == ["etl"]


@pytest.mark.slow
def test_creating_a_user_warns_while_security_is_off() -> None:
    with LocalCluster.running(arena_bytes=64 << 20, segment_bytes=1 << 20) as cluster:
        bootstrap = {"KERA_BOOTSTRAP": cluster.bootstrap}
        done = run_kera("user", "create", "alice", "--no-password", env=bootstrap)
        assert (done.returncode, done.stdout) == (0, b"created user alice without a password\n")
        assert done.stderr.startswith(b"kera: warning: security is off in this cluster: this takes effect once")
        assert b", security off\n" in run_kera("cluster", "describe", env=bootstrap).stdout
        issued = run_kera("token", "issue", env=bootstrap)
        assert (issued.returncode, b"tokens are for users" in issued.stderr) == (1, True)


# --- contexts ------------------------------------------------------------------------------------------------


def test_a_context_provides_all_the_settings_that_commands_need(kera: CommandLine, tmp_path: Path) -> None:
    said = {"XDG_CONFIG_HOME": str(tmp_path)}
    where = ("--bootstrap", kera.secured.cluster.bootstrap, "--tls-ca", str(kera.secured.ca))
    who = ("--user", "admin", "--password-file", str(kera.password))
    stream = new_name("stream")

    output(run_kera("context", "set", "prod", *where, *who, env=said))
    output(run_kera("context", "set", "nobody", *where, env=said))
    output(run_kera("context", "use", "prod", env=said))

    assert output(run_kera("stream", "create", stream, env=said)).startswith(f"created {stream}")
    assert output(run_kera("produce", stream, stdin=b"a\n", env=said)) == ""
    assert output(run_kera("consume", stream, "--until-end", env=said)) == "a\n"
    listed = json.loads(output(run_kera("user", "list", "-o", "json", env=said)))
    assert PASSWORD not in str(listed)
    assert "admin" in [each["name"] for each in listed]
    health = json.loads(run_kera("cluster", "health", "-o", "json", env=said).stdout)
    assert not [each for each in health["findings"] if "authenticated" in each["text"]]
    refused = run_kera("stream", "list", "--context", "nobody", env=said)
    assert refused.returncode == 1
    assert b"authenticated" in refused.stderr
    output(run_kera("stream", "delete", stream, "--yes", env={**said, "KERA_CONTEXT": "prod"}))


@pytest.mark.slow
def test_a_copy_needs_the_right_to_write_to_the_stream_and_to_its_journal(kera: CommandLine, tmp_path: Path) -> None:
    user, stream = new_name("copier"), new_name("copied")
    kera.as_user("admin", "user", "create", user, "--password-file", str(kera.password))
    kera.as_user("admin", "stream", "create", stream, "--column", "id:int64")
    (tmp_path / "ids.csv").write_text("id\n1\n2\n")
    copy = ("connect", "copy", f"{tmp_path}/ids.csv", f"kera:{stream}", "--name", stream)

    assert stream in kera.refused(user, *copy)
    kera.as_user("admin", "acl", "grant", f"user:{user}", "write", f"stream:{stream}")
    assert f"_connect.{stream}" in kera.refused(user, *copy)
    kera.as_user("admin", "acl", "grant", f"user:{user}", "create,read,write", f"stream:_connect.{stream}")
    kera.as_user(user, *copy)
    kera.as_user(user, *copy)

    assert stream in kera.as_user(user, "connect", "list")
    assert "may" in kera.refused(user, "connect", "copy", f"kera:{stream}", f"{tmp_path}/out.csv")
    assert not (tmp_path / "out.csv").exists()
