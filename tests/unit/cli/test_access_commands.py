"""`kera user`, `acl` and `token`: the requests to the cluster, and the output."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kera.cli import _passwords
from kera.cli._run import run_app
from kera.cli.app import app
from kera.client.admin.access import (
    Change,
    Check,
    DeletedUser,
    Granted,
    RenewedToken,
    Revoked,
    Rule,
    Token,
    User,
)
from kera.client.admin.quotas import Quota
from kera.core.errors import Unavailable
from tests.unit.cli.fake_client import FakeClient

PASSWORD = "correct horse battery"
TOLD = Change(())
UNTOLD = Change(("broker 3: connection refused",))
SECRET = "kera_17ab_5ec4e7"


RULE = Rule(7, "user:alice", ("read", "write"), "stream:orders", created_by="user:admin")


def issued(told: Change, resources: list[str], *, lifetime_ms: int) -> Token:
    expires_in_ms = min(lifetime_ms or 1 << 60, 86_400_000)
    return Token("17ab", "", tuple(resources), expires_in_ms, SECRET, 7 * 86_400_000, told.untold)


def changed(told: Change = TOLD) -> dict[str, Any]:
    """Answers to all requests that change something."""
    return {
        "create_user": told,
        "set_password": told,
        "set_roles": told,
        "delete_user": DeletedUser(2, (), told),
        "grant": Granted(RULE, "", told),
        "revoke": Revoked((RULE,), told),
        "revoke_rules": Revoked((RULE,), told),
        "issue_token": partial(issued, told),
        "renew_token": RenewedToken(8 * 3_600_000, told),
        "revoke_token": told,
    }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    """A client of a cluster that fulfils all requests."""
    monkeypatch.delenv(_passwords.VARIABLE, raising=False)
    monkeypatch.delenv("KERA_CLIENT_USER", raising=False)
    made = FakeClient(
        describe_cluster=SimpleNamespace(security=True),
        users=[User("alice", ("etl", "ops"), True, 1, 2), User("cert")],
        tokens=[Token("17ab", "alice", ("stream:orders",), 3_600_000 * 3), Token("28bc", "alice", (), 500)],
    )
    made.answers = changed() | {
        "rules": lambda principal, _: [] if principal == "user:nobody" else [RULE],
        "check": Check(allowed=True, reason="rule 7", rule_id=7),
    }
    with made.answering():
        yield made


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """Standard input, which is not a terminal."""
    given = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given))
    return given


def kera(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_app(app, list(arguments))
    return code, *capsys.readouterr()


# -- users ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    path.chmod(0o600)
    return path


def test_user_create_takes_the_password_from_a_file(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], password_file: Path
) -> None:
    ended = kera(
        capsys, "user", "create", "alice", "--role", "ops", "--role", "etl", "--password-file", f"{password_file}"
    )
    assert ended == (0, "created user alice with a password, roles etl, ops\n", "")
    assert cluster.asked == [("create_user", "alice", PASSWORD, ["ops", "etl"])]


def test_a_password_file_that_others_can_read_is_used_with_a_warning(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], password_file: Path
) -> None:
    password_file.chmod(0o640)
    code, _, errors = kera(capsys, "user", "create", "alice", "--password-file", str(password_file))
    assert (code, len(cluster.asked)) == (0, 1)
    assert errors == f"kera: warning: others on this host may read {password_file}: chmod 600 {password_file}\n"


def test_the_password_file_dash_is_standard_input(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], stdin: io.BytesIO
) -> None:
    stdin.write(f" {PASSWORD}\n".encode())
    stdin.seek(0)
    assert kera(capsys, "user", "passwd", "alice", "--password-file", "-")[0] == 0
    assert cluster.asked == [("set_password", "alice", PASSWORD)]


@pytest.mark.usefixtures("stdin")
def test_a_password_comes_from_the_environment(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_passwords.VARIABLE, PASSWORD)
    assert kera(capsys, "user", "passwd", "alice") == (0, "changed the password of alice\n", "")
    assert cluster.asked == [("set_password", "alice", PASSWORD)]


def test_a_terminal_is_asked_for_the_password_twice_and_does_not_show_it(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    typed = iter([PASSWORD, "something else", PASSWORD, PASSWORD])
    asked: list[str] = []

    def getpass(prompt: str, *_: Any, **__: Any) -> str:
        asked.append(prompt)
        return next(typed)

    monkeypatch.setattr("getpass.getpass", getpass)
    code, output, errors = kera(capsys, "user", "create", "alice")
    assert (code, output) == (0, "created user alice with a password\n")
    assert "do not match" in errors
    assert PASSWORD not in errors
    assert cluster.asked == [("create_user", "alice", PASSWORD, [])]
    assert len(asked) == 4


@pytest.mark.usefixtures("stdin")
def test_no_password_creates_a_user_without_one_or_removes_it(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kera(capsys, "user", "create", "spark", "--no-password")[1] == "created user spark without a password\n"
    assert kera(capsys, "user", "passwd", "spark", "--no-password")[1] == "spark has no password any more\n"
    assert cluster.asked == [("create_user", "spark", None, []), ("set_password", "spark", None)]


@pytest.mark.usefixtures("stdin")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            [],
            "which password? give --password-file FILE (-: standard input) or --no-password, or set KERA_USER_PASSWORD",
        ),
        (["--password-file", "{}/none"], "--password-file {}/none cannot be read: No such file or directory"),
        (["--password-file", "{}"], "--password-file {} cannot be read: Is a directory"),
        (["--password-file", "/proc/self/mem"], "--password-file /proc/self/mem cannot be read: Input/output error"),
        (["--password-file", ""], "--password-file is empty"),
        (["--password-file", "/dev/null"], "--password-file /dev/null is empty"),
        (["--password-file", "-"], "--password-file: standard input is empty"),
        (["--password-file", "{}/short"], "--password-file: a password has 8 to 1024 characters, and this one has 5"),
        (["--password-file", "{}/binary"], "--password-file {}/binary cannot be read: it is not UTF-8 text"),
        (["--password-file", "{}/large"], "--password-file {}/large has more than 65536 bytes"),
        (["--password-file", "~nobody-here/p"], "cannot be read: ~nobody-here/p cannot be used: no user nobody-here"),
        (["--password-file", "x", "--no-password"], "--no-password and --password-file are mutually exclusive"),
    ],
)
def test_a_missing_or_invalid_password_is_refused_without_a_request(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "short").write_text("short")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff\xff" * 4)
    (tmp_path / "large").write_text("x" * 65537)
    code, _, errors = kera(capsys, "user", "create", "alice", *(each.format(tmp_path) for each in arguments))
    assert code == 2
    assert text.format(tmp_path) in errors
    assert not cluster.asked


def test_an_empty_password_in_the_environment_is_refused(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_passwords.VARIABLE, " ")
    assert kera(capsys, "user", "create", "alice") == (2, "", "kera: error: KERA_USER_PASSWORD is empty\n")
    assert not cluster.asked


def test_users_are_listed(cluster: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = kera(capsys, "user", "list")
    heading, alice, cert = (line.split() for line in output.splitlines())
    assert heading == ["USER", "PASSWORD", "ROLES", "CREATED", "CHANGED"]
    assert alice[:4] == ["alice", "yes", "etl,", "ops"]
    assert cert[:3] == ["cert", "no", "-"]
    assert json.loads(kera(capsys, "user", "list", "--json")[1])[0] == {
        "name": "alice",
        "roles": ["etl", "ops"],
        "has_password": True,
        "created_us": 1,
        "changed_us": 2,
        "quota": dataclasses.asdict(Quota()),
    }
    cluster.looks["users"] = []
    assert kera(capsys, "user", "list") == (0, "", "no users\n")


def test_user_roles_replaces_all_roles(cluster: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert kera(capsys, "user", "roles", "alice", "--role", "etl")[1] == "alice has the role etl\n"
    assert kera(capsys, "user", "roles", "alice", "--no-roles")[1] == "alice has no roles any more\n"
    assert cluster.asked == [("set_roles", "alice", ["etl"]), ("set_roles", "alice", [])]
    for wrong in ([], ["--role", "etl", "--no-roles"]):
        assert kera(capsys, "user", "roles", "alice", *wrong)[0] == 2


def test_user_passwd_without_a_name_changes_the_password_of_the_client_user(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, password_file: Path
) -> None:
    assert "whose password?" in kera(capsys, "user", "passwd", "--password-file", str(password_file))[2]
    monkeypatch.setenv("KERA_CLIENT_USER", "carol")
    assert kera(capsys, "user", "passwd", "--password-file", str(password_file))[0] == 0
    assert cluster.asked == [("set_password", "carol", PASSWORD)]


@pytest.mark.usefixtures("stdin")
def test_deleting_a_user_warns_of_the_rules_that_still_name_the_user(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kera(capsys, "user", "delete", "alice")[0] == 2
    cluster.answers["delete_user"] = DeletedUser(2, (3, 7), TOLD)
    code, output, errors = kera(capsys, "user", "delete", "alice", "--yes")
    assert (code, output) == (0, "deleted user alice and 2 tokens\n")
    assert errors == (
        "kera: warning: rules 3, 7 still name user:alice, and a later user of that name has these rights:"
        " kera acl revoke --rule 3 --rule 7\n"
    )


# -- rules ---------------------------------------------------------------------------------------------------------


def test_a_right_is_granted(cluster: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    ended = kera(capsys, "acl", "grant", "user:alice", "read,write", "stream:orders")
    assert ended == (0, "rule 7: user:alice may read, write stream:orders\n", "")
    assert cluster.asked == [("grant", "user:alice", ["read", "write"], "stream:orders", {"deny": False})]


def test_the_operation_all_means_all_operations_of_the_kind_of_resource(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    kera(capsys, "acl", "grant", "role:etl", "all", "group:etl-*", "--deny")
    kera(capsys, "acl", "revoke", "role:etl", "all", "group:etl-*", "--deny")
    assert cluster.asked == [
        ("grant", "role:etl", ["describe", "use", "alter", "delete"], "group:etl-*", {"deny": True}),
        ("revoke", "role:etl", "group:etl-*", [], {"deny": True}),
    ]


def test_a_remark_on_a_rule_is_a_warning(cluster: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.answers["grant"] = Granted(RULE, "there is no stream 'orders' now", TOLD)
    code, _, errors = kera(capsys, "acl", "grant", "user:alice", "read", "stream:orders")
    assert (code, errors) == (0, "kera: warning: there is no stream 'orders' now\n")


def test_rules_are_printed_as_json(cluster: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.answers |= changed(UNTOLD)
    _, output, _ = kera(capsys, "acl", "grant", "user:alice", "read", "stream:orders", "--json")
    told = json.loads(output)
    assert (told["rule_id"], told["operations"], told["untold"]) == (7, ["read", "write"], list(UNTOLD.untold))
    (listed,) = json.loads(kera(capsys, "acl", "list", "--json")[1])
    assert (listed["principal"], listed["created_by"]) == ("user:alice", "user:admin")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            ("etl", "read", "stream:a"),
            "principal 'etl': user:NAME, role:NAME, or user:* for everybody; did you mean 'user:etl'?",
        ),
        (("user:", "read", "stream:a"), "user ''"),
        (("user:alice", "raed", "stream:a"), "'raed' does not apply to a stream; did you mean 'read'?"),
        (("user:alice", "read,", "stream:a"), "'' does not apply to a stream; there are 'alter', 'create'"),
        (("user:alice", "write", "group:a"), "'write' does not apply to a group; there are 'alter', 'delete'"),
        (("user:alice", "read", "streams:a"), "did you mean 'stream'?"),
        (("user:alice", "read", "orders"), "did you mean 'stream:orders'?"),
        (("user:alice", "administer", "Cluster"), "did you mean 'cluster'?"),
        (("user:alice", "read", "stream:a*b"), "a name is missing, is too long, or has a * that is not its end"),
        (("user:alice", "read", "stream:"), "a name is missing"),
    ],
)
@pytest.mark.parametrize("command", ["grant", "revoke"])
def test_an_invalid_rule_is_refused_with_a_hint(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], command: str, rule: tuple[str, ...], text: str
) -> None:
    code, _, errors = kera(capsys, "acl", command, *rule)
    assert code == 2
    assert text in errors
    assert not cluster.asked


def test_acl_revoke_shows_the_revoked_rules_and_the_rest_of_reduced_ones(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    _, output, _ = kera(capsys, "acl", "revoke", "user:alice", "write", "stream:orders")
    assert output == "rule 7: user:alice may read stream:orders\n"
    _, output, _ = kera(capsys, "acl", "revoke", "user:alice", "write,read", "stream:orders")
    assert output == "revoked rule 7: user:alice may read, write stream:orders\n"
    _, output, _ = kera(capsys, "acl", "revoke", "--rule", "7")
    assert output == "revoked rule 7: user:alice may read, write stream:orders\n"
    assert cluster.asked[-1] == ("revoke_rules", [7])


@pytest.mark.parametrize(
    "arguments", [[], ["user:alice"], ["user:alice", "read"], ["user:alice", "--rule", "7"], ["--rule", "7", "--deny"]]
)
def test_an_ambiguous_revocation_is_refused(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert kera(capsys, "acl", "revoke", *arguments)[0] == 2
    assert not cluster.asked


def test_rules_are_listed(cluster: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = kera(capsys, "acl", "list", "--principal", "user:alice", "--resource", "stream:orders")
    heading, row = (line.split() for line in output.splitlines())
    assert heading == ["RULE", "PRINCIPAL", "MAY", "OPERATIONS", "RESOURCE", "CREATED", "BY"]
    assert row[:6] == ["7", "user:alice", "yes", "read,", "write", "stream:orders"]
    assert cluster.asked == [("rules", "user:alice", "stream:orders")]
    assert kera(capsys, "acl", "list", "--principal", "user:nobody") == (0, "", "no such rules\n")


def test_the_exit_code_of_acl_check_is_the_answer(cluster: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    ended = kera(capsys, "acl", "check", "--principal", "user:alice", "write", "stream:orders-eu")
    assert ended == (0, "may user:alice write stream:orders-eu? yes: rule 7\n", "")
    cluster.answers["check"] = Check(allowed=False, reason="no rule allows it", rule_id=0)
    assert kera(capsys, "acl", "check", "write", "stream:orders")[:2] == (
        1,
        "may you write stream:orders? no: no rule allows it\n",
    )
    code, output, _ = kera(capsys, "acl", "check", "write", "stream:orders", "--json")
    assert (code, json.loads(output)["allowed"]) == (1, False)
    cluster.answers["check"] = Unavailable("nobody is there")
    assert kera(capsys, "acl", "check", "write", "stream:orders") == (2, "", "kera: error: nobody is there\n")
    assert kera(capsys, "acl", "check", "write,read", "stream:orders")[0] == 2


# -- tokens --------------------------------------------------------------------------------------------------------


def test_token_issue_prints_only_the_secret_on_standard_output(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = kera(
        capsys,
        *("token", "issue", "--stream", "orders", "--group", "etl-*", "--resource", "cluster", "--lifetime", "8h"),
    )
    assert (code, output) == (0, f"{SECRET}\n")
    assert errors == (
        "token 17ab, valid for 8 h, and as long again whenever it is renewed within 7 d, for stream:orders, group:etl-*"
        ", cluster only\n"
    )
    assert cluster.asked == [
        ("issue_token", ["stream:orders", "group:etl-*", "cluster"], {"lifetime_ms": 8 * 3_600_000})
    ]


def test_a_token_file_is_readable_only_by_its_owner(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("an older one")
    file.chmod(0o644)
    code, output, errors = kera(capsys, "token", "issue", "--out", str(file), "--json")
    assert (code, errors, len(cluster.asked)) == (0, "", 1)
    assert json.loads(output) == {
        "token_id": "17ab",
        "resources": [],
        "expires_in_ms": 86_400_000,
        "renewable_for_ms": 604_800_000,
        "untold": [],
    }
    assert file.read_text() == f"{SECRET}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_no_token_is_issued_when_its_file_cannot_be_written(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for place, text in ((tmp_path / "none" / "token", "No such file or directory"), (tmp_path, "it is a directory")):
        code, _, errors = kera(capsys, "token", "issue", "--out", str(place))
        assert code == 2
        assert f"cannot write {place}: {text}" in errors
    cluster.answers["issue_token"] = Unavailable("nobody is there")
    assert kera(capsys, "token", "issue", "--out", str(tmp_path / "token"))[0] == 1
    assert not cluster.asked
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("cluster")
def test_a_failed_write_of_an_issued_token_names_the_token_to_revoke(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "token"

    code, output, errors = kera(capsys, "token", "issue", "--out", str(file))

    assert (code, output) == (2, "")
    assert errors == (
        f"kera: error: cannot write {file}: No space left on device; the token was issued, and its secret may be lost:"
        " kera token revoke 17ab ends it\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lifetime", "soon"], "--lifetime: 'soon' is not a duration"),
        (["--lifetime", "0s"], "--lifetime: the time must be above 0"),
        (["--resource", "orders"], "did you mean 'stream:orders'?"),
        (["--stream", ""], "a name is missing"),
        (["--out", ""], "--out is empty"),
    ],
)
def test_token_issue_refuses_invalid_options(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    code, _, errors = kera(capsys, "token", "issue", *arguments)
    assert (code, cluster.asked) == (2, [])
    assert text in errors


@pytest.mark.usefixtures("cluster")
def test_token_issue_warns_of_a_shorter_lifetime_than_requested(capsys: pytest.CaptureFixture[str]) -> None:
    assert "kera: warning: it is valid for 24 h only" in kera(capsys, "token", "issue", "--lifetime", "2d")[2]


@pytest.mark.usefixtures("cluster")
def test_tokens_are_listed_without_their_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = kera(capsys, "token", "list")
    assert [line.split() for line in output.splitlines()] == [
        ["TOKEN", "OWNER", "FOR", "EXPIRES"],
        ["17ab", "alice", "stream:orders", "in", "3", "h"],
        ["28bc", "alice", "all", "in", "500", "ms"],
    ]
    listed = json.loads(kera(capsys, "token", "list", "--json")[1])
    assert listed[0].keys() == {"token_id", "owner", "resources", "expires_in_ms"}


def test_token_renew_and_revoke_send_and_print_only_the_id_of_the_token(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kera(capsys, "token", "renew", "17ab") == (0, "token 17ab is valid for 8 h\n", "")
    assert kera(capsys, "token", "revoke", SECRET) == (0, "revoked token 17ab\n", "")
    assert cluster.asked == [("renew_token", "17ab"), ("revoke_token", "17ab")]


# -- warnings about all changes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "meaning"),
    [
        (["user", "create", "a", "--no-password"], "nobody can authenticate as a there"),
        (["user", "passwd", "a", "--no-password"], "the old password still works there"),
        (["user", "roles", "a", "--no-roles"], "a keeps the previous roles there"),
        (["user", "delete", "a", "--yes"], "a may go on there"),
        (["acl", "grant", "user:a", "read", "stream:s"], "what it allows may be refused there"),
        (["acl", "revoke", "user:a", "all", "stream:s"], "what it allowed may go on there"),
        (["acl", "revoke", "--rule", "7"], "what it allowed may go on there"),
        (["token", "issue"], "the token is refused there"),
        (["token", "renew", "17ab"], "it ends when it would have ended before there"),
        (["token", "revoke", "17ab"], "it may still be accepted there"),
    ],
)
def test_a_change_warns_of_brokers_that_could_not_be_notified_and_its_effect_there(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str], arguments: list[str], meaning: str
) -> None:
    cluster.answers |= changed(UNTOLD)
    code, _, errors = kera(capsys, *arguments)
    assert code == 0
    assert errors.splitlines()[-1] == (
        f"kera: warning: broker 3 could not be notified (connection refused): until it is back, {meaning}"
    )


def test_a_change_while_security_is_off_warns_that_it_has_no_effect_yet(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.looks["describe_cluster"] = SimpleNamespace(security=False)
    code, output, errors = kera(capsys, "user", "create", "a", "--no-password")
    assert (code, output) == (0, "created user a without a password\n")
    assert errors.startswith("kera: warning: security is off in this cluster: this takes effect once")


def test_the_cluster_secret_file_is_passed_to_the_client(
    cluster: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["user", "create", "a", "--no-password"], ["user", "list"], ["acl", "list"], ["token", "list"]):
        assert kera(capsys, *arguments, "--cluster-secret-file", "secret")[0] == 0
        assert cluster.options["cluster_secret_file"] == Path("secret")
        assert kera(capsys, *arguments)[0] == 0
        assert cluster.options["cluster_secret_file"] is None
