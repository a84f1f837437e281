"""`kera doctor`: findings about the secret of a cluster and about contradictory security settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kera.cli.diagnosis.security import secret, settings
from kera.client.diagnosis.findings import Finding
from kera.core.security.issuing import Authority
from tests.integration.command_line import run_kera

SECRET = "a secret that all daemons have"


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(each.severity.word, each.text) for each in findings]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o640)
    return path


@pytest.mark.parametrize(("mode", "readers"), [(0o600, "its owner"), (0o640, "its owner and its group")])
def test_a_secret_that_only_owner_and_group_can_read_is_ok(file: Path, mode: int, readers: str) -> None:
    file.chmod(mode)
    assert told(secret(file)) == [("ok", f"{file} has one, and only {readers} can read it")]


@pytest.mark.parametrize(
    ("mode", "word", "text"),
    [
        (0o644, "problem", "can be read by everybody on this host (mode 644): whoever has it may do everything"),
        (0o602, "problem", "can be read by everybody"),
        (0o660, "warning", "can be written by its group (mode 660)"),
    ],
)
def test_a_secret_that_others_can_read_or_write_is_reported(file: Path, mode: int, word: str, text: str) -> None:
    file.chmod(mode)
    (found,) = secret(file)
    assert found.severity.word == word
    assert text in found.text
    assert "chmod" in found.advice


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is empty"),
        ("short", "has 5 characters, and a secret has 16 at least: openssl rand -base64 32 makes one"),
        (f"{SECRET}\n" * 3, "has 3 lines"),
    ],
)
def test_a_secret_that_daemons_would_refuse_is_a_problem(file: Path, text: str | None, said: str) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    (found,) = secret(file)
    assert found.severity.word == "problem"
    assert said in found.text
    assert SECRET not in found.text


def test_a_previous_secret_in_the_file_is_a_warning(file: Path) -> None:
    file.write_text(f"{SECRET}\nthe one from before it\n")
    (found,) = secret(file)
    assert (found.severity.word, "the previous secret" in found.text) == ("warning", True)


class Settings:
    """A settings file whose three tables have the same settings, but for those of a test."""

    def __init__(self, directory: Path, secret_file: Path) -> None:
        authority, _ = Authority.open_or_make(directory / "certificates")
        one = authority.issue("localhost")
        self.path = directory / "kera.toml"
        self.common = [
            "security = true",
            f'cluster_secret_file = "{secret_file}"',
            f'tls_ca = "{authority.path}"',
            f'tls_cert = "{one.cert}"',
            f'tls_key = "{one.key}"',
        ]
        self.tables: dict[str, list[str]] = {"coordinator": [], "broker": [], "backup": []}

    def without(self, *names: str) -> None:
        self.common = [each for each in self.common if each.split(" ")[0] not in names]

    def found(self) -> list[tuple[str, str]]:
        lines = []
        for name, own in self.tables.items():
            names = {each.split(" ")[0] for each in own}
            common = [] if name == "client" else [each for each in self.common if each.split(" ")[0] not in names]
            lines += [f"[{name}]", *common, *own]
        self.path.write_text("\n".join(lines))
        return told(settings(self.path))


@pytest.fixture
def given(tmp_path: Path, file: Path) -> Settings:
    return Settings(tmp_path, file)


def test_consistent_settings_are_ok(given: Settings, file: Path) -> None:
    assert given.found() == [
        ("ok", f"{file} has one, and only its owner and its group can read it"),
        ("ok", "those of coordinator, broker, backup fit together: security is on"),
    ]
    given.common = []
    assert given.found() == [("ok", "those of coordinator, broker, backup fit together: security is off")]


@pytest.mark.parametrize(
    ("table", "line", "text"),
    [
        ("backup", "security = false", "security differs: [coordinator] True; [broker] True; [backup] False"),
        ("broker", 'super_users = ["user:admin"]', "super_users differs: [coordinator] []; [broker] ['user:admin']"),
        ("broker", "certificate_users = ['CN=(?P<user>.*)']", "certificate_users differs"),
        (
            "broker",
            "certificate_users = ['CN=.*']",
            "certificate_daemons, certificate_users: 'CN=.*' has no group",
        ),
        ("broker", 'super_users = ["admin"]', "[broker] super_users: principal 'admin'"),
        ("broker", 'jwt_issuer = "https://x"', "[broker] jwt_issuer and jwt_audience belong to jwt_keys"),
        (
            "broker",
            'tls_ca = "system"\ntls_client_auth = "required"',
            "tls_ca system: everyone can get a certificate",
        ),
        ("broker", "securty = true", "securty"),
        ("client", 'user = "alice"', "[client] user and password_file (or password) belong together"),
        ("client", 'user = "alice"\ntoken_file = "x"', "[client] user: a token names its user"),
    ],
)
def test_contradictory_settings_are_a_problem(given: Settings, table: str, line: str, text: str) -> None:
    given.tables.setdefault(table, []).append(line)
    assert [said for word, said in given.found() if word == "problem" and text in said]


def test_the_same_problem_of_several_daemons_is_reported_once(given: Settings) -> None:
    given.without("cluster_secret_file")
    (found,) = given.found()
    assert found[0] == "problem"
    assert found[1].startswith("[coordinator], [broker], [backup] security needs credentials for the daemons")


def test_a_daemon_with_a_different_secret_is_a_problem(given: Settings, tmp_path: Path, file: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another secret, which is none of theirs")
    other.chmod(0o600)
    given.tables["backup"].append(f'cluster_secret_file = "{other}"')
    assert ("problem", f"{file}, {other} have different secrets") in given.found()
    other.write_text(SECRET)
    assert not [word for word, _ in given.found() if word != "ok"]


def test_settings_without_effect_while_security_is_off_are_a_warning(given: Settings) -> None:
    given.without("security")
    given.common.append('super_users = ["user:admin"]')
    ((word, text),) = given.found()
    assert word == "warning"
    assert text.startswith(
        "[coordinator], [broker], [backup] cluster_secret_file, super_users are set, and security is off"
    )


def test_security_without_certificates_on_a_network_is_a_warning(given: Settings) -> None:
    given.without("tls_ca", "tls_cert", "tls_key")
    given.common += ['host = "0.0.0.0"', "insecure = true"]
    (text,) = (text for word, text in given.found() if word == "warning")
    assert text.startswith("[coordinator], [broker], [backup] security without certificates: who reads the network")


def test_the_command_includes_the_findings_about_security(given: Settings, file: Path, tmp_path: Path) -> None:
    given.found()
    file.chmod(0o644)
    done = run_kera(
        *("doctor", "--data-dir", str(tmp_path), "--arena-bytes", "1MiB", "--json"),
        *("--config", str(given.path), "--cluster-secret-file", str(file)),
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["worst"]) == (2, "problem")
    assert [each["severity"] for each in found["findings"] if each["subject"] == "cluster secret"] == ["problem"] * 2
    done = run_kera("doctor", "--data-dir", str(tmp_path), "--config", str(tmp_path / "none"))
    assert done.returncode == 2
    assert b"cannot read settings file" in done.stdout
