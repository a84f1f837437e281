"""`kera context`: named connections, their file, and the precedence of flags, environment and contexts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kera.cli._client import connecting_by
from kera.cli._run import run_app
from kera.cli.app import app
from kera.cli.dev import _elsewhere
from kera.client import ClientSettings

Run = Any


class Asked(NamedTuple):
    """The settings that a command connected with."""

    bootstrap: str | None
    user: str
    password_file: str
    token_file: str


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [each for each in os.environ if each.startswith(("KERA_CLIENT_", "KERA_BOOTSTRAP", "KERA_CONTEXT"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    for name in ("alice.pw", "bob.pw", "a.token", "ca.pem", "me.pem", "me-key.pem"):
        (tmp_path / name).write_text("geheimnis\n")
        (tmp_path / name).chmod(0o600)
    return tmp_path


@pytest.fixture
def kera(home: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    del home

    def run(*arguments: str) -> tuple[int, str, str]:
        code = run_app(app, list(arguments))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def asked() -> Iterator[list[Asked]]:
    """The settings that commands have connected with, to a cluster without streams."""
    made: list[Asked] = []

    async def no_streams() -> list[Any]:
        return []

    @contextlib.asynccontextmanager
    async def connected(bootstrap: str, **_: Any) -> AsyncIterator[Any]:
        found = ClientSettings.load()
        paths = [str(each) if each else "" for each in (found.password_file, found.token_file)]
        made.append(Asked(bootstrap, found.user, *paths))
        yield SimpleNamespace(admin=SimpleNamespace(list_streams=no_streams))

    with connecting_by(connected):
        yield made


def file_of(home: Path) -> Path:
    return home / "config" / "kera" / "contexts.json"


def set_prod(kera: Run) -> None:
    assert kera("context", "set", "prod", "-b", "h:7400", "--user", "alice", "--password-file", "alice.pw")[0] == 0


def test_the_file_of_contexts_is_private_and_has_no_passwords(home: Path, kera: Run) -> None:
    code, out, err = kera(
        "context", "set", "prod", "--bootstrap", "h:7400, i:7400", "--user", "alice", "--password-file", "alice.pw",
        "--tls-ca", "ca.pem", "--tls-cert", "me.pem", "--tls-key", "me-key.pem",
    )  # fmt: skip
    assert (code, out) == (0, "context prod: h:7400,i:7400 as alice, TLS and a certificate\n")
    assert err == "to make it the default: kera context use prod\n"
    assert file_of(home).stat().st_mode & 0o777 == 0o600
    assert file_of(home).parent.stat().st_mode & 0o777 == 0o700
    text = file_of(home).read_text()
    assert "geheimnis" not in text
    assert json.loads(text)["contexts"]["prod"]["password_file"] == str(home / "alice.pw")
    assert [each.name for each in file_of(home).parent.iterdir()] == ["contexts.json"]


def test_contexts_are_listed_shown_used_and_deleted(home: Path, kera: Run) -> None:
    assert kera("context", "list") == (0, "", "no contexts\n")
    assert json.loads(kera("context", "list", "--json")[1]) == []
    assert kera("context", "show")[0] == 2
    set_prod(kera)
    kera("context", "set", "dev", "-b", "127.0.0.1:7400")
    assert kera("context", "use", "prod") == (0, "using prod: h:7400 as alice\n", "")
    assert [each.split() for each in kera("context", "list")[1].splitlines()] == [
        ["CURRENT", "NAME", "BOOTSTRAP", "USER", "TLS"],
        ["dev", "127.0.0.1:7400", "-", "no"],
        ["*", "prod", "h:7400", "alice", "no"],
    ]
    shown = json.loads(kera("context", "show", "-o", "json")[1])
    assert (shown["name"], shown["current"], shown["token_file"]) == ("prod", True, None)
    assert str(home / "alice.pw") in kera("context", "show")[1]
    assert kera("context", "use", "--none")[0] == 0
    assert kera("context", "show")[0] == 2
    kera("context", "use", "prod")
    assert "now there is none" in kera("context", "delete", "prod")[1]
    assert [each["name"] for each in json.loads(kera("context", "list", "--json")[1])] == ["dev"]
    assert (home / "alice.pw").exists()


@pytest.mark.parametrize(
    ("variable", "warning"),
    [("", ""), ("prod", ""), ("dev", "kera: warning: KERA_CONTEXT=dev is set, and overrides it\n")],
)
def test_context_use_warns_of_a_variable_that_overrides_it(
    kera: Run, monkeypatch: pytest.MonkeyPatch, variable: str, warning: str
) -> None:
    set_prod(kera)
    monkeypatch.setenv("KERA_CONTEXT", variable)
    assert kera("context", "use", "prod") == (0, "using prod: h:7400 as alice\n", warning)


def test_the_current_context_sets_the_cluster_and_the_user(home: Path, kera: Run, asked: list[Asked]) -> None:
    set_prod(kera)
    kera("stream", "list")
    kera("context", "use", "prod")
    kera("stream", "list")
    kera("stream", "list", "--bootstrap", "other:1")  # alice's password is not sent to another cluster
    alice = Asked("h:7400", "alice", str(home / "alice.pw"), "")
    assert asked == [Asked("127.0.0.1:7400", "", "", ""), alice, Asked("other:1", "", "", "")]
    assert "KERA_CLIENT_USER" not in os.environ


def test_a_flag_or_a_variable_selects_a_context(
    home: Path, kera: Run, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_prod(kera)
    kera("context", "set", "dev", "-b", "d:1")
    kera("context", "use", "dev")
    kera("stream", "list", "--context", "prod")
    monkeypatch.setenv("KERA_CONTEXT", "prod")
    kera("stream", "list")
    kera("stream", "list", "--context", "dev")
    kera("stream", "list", "-b", "other:1")
    kera("stream", "list", "-b", "i:7400", "--context", "prod")  # another coordinator of prod
    alice = Asked("h:7400", "alice", str(home / "alice.pw"), "")
    nobody = Asked("d:1", "", "", "")
    assert asked == [alice, alice, nobody, nobody._replace(bootstrap="other:1"), alice._replace(bootstrap="i:7400")]


def test_credentials_in_the_environment_replace_all_those_of_the_context(
    home: Path, kera: Run, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_prod(kera)
    kera("context", "use", "prod")
    monkeypatch.setenv("KERA_CLIENT_TOKEN_FILE", str(home / "a.token"))
    assert kera("stream", "list") == (0, "", "no streams\n")
    _, _, err = kera("stream", "list", "--context", "prod")
    assert "warning: KERA_CLIENT_TOKEN_FILE is set, which overrides context prod" in err
    assert json.loads(kera("context", "show", "--json")[1])["overridden_by"] == ["KERA_CLIENT_TOKEN_FILE"]
    assert asked == [Asked("h:7400", "", "", str(home / "a.token"))] * 2


def test_a_cluster_from_the_environment_gets_no_password_of_another_cluster(
    kera: Run, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_prod(kera)
    monkeypatch.setenv("KERA_BOOTSTRAP", "other:1")
    monkeypatch.setenv("KERA_CONTEXT", "prod")
    _, _, err = kera("stream", "list")
    assert "KERA_BOOTSTRAP is set and overrides context prod, which is ignored" in err
    assert asked == [Asked("other:1", "", "", "")]
    monkeypatch.setenv("KERA_BOOTSTRAP", "h:7400")
    assert "warning" not in kera("stream", "list")[2]
    assert asked[1].user == "alice"


def test_the_context_option_overrides_a_cluster_from_the_environment(
    kera: Run, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_prod(kera)
    monkeypatch.setenv("KERA_BOOTSTRAP", "other:1")
    assert kera("stream", "list", "--context", "prod")[0] == 0
    assert (asked[0].bootstrap, asked[0].user) == ("h:7400", "alice")


@pytest.mark.parametrize(
    ("arguments", "variable", "message"),
    [
        (["stream", "list", "--context", "prd"], "", "there is no context 'prd' (--context); did you mean 'prod'?"),
        (["stream", "list"], "prd", "there is no context 'prd' (KERA_CONTEXT); did you mean 'prod'?"),
        (["stream", "list", "--context", ""], "", "--context is empty"),
        (["context", "show", "xyz"], "", "there is no context 'xyz'; there are 'prod'"),
        (["context", "use", "Prod"], "", "did you mean 'prod'?"),
        (["context", "use"], "", "give either a NAME or --none"),
        (["context", "delete", "prd"], "", "did you mean 'prod'?"),
        (["context", "set", "new"], "", "--bootstrap HOST:PORT is missing: there is no context 'new' yet"),
        (["context", "set", "prod"], "", "give an option to change"),
        (["context", "set", "a b", "-b", "h:1"], "", "a context cannot be called 'a b'"),
        (["context", "set", "--", "-x"], "", "a context cannot be called '-x'"),
        (["context", "set", "new", "-b", "h"], "", "--bootstrap: "),
        (["context", "set", "new", "-b", "none"], "", "needs the address of its cluster"),
        (["context", "set", "prod", "--user", "a b"], "", "--user: "),
        (["context", "set", "prod", "--user", ""], "", "--user is empty; none takes away"),
        (["context", "set", "prod", "--user", "none"], "", "--user and --password-file belong together"),
        (["context", "set", "prod", "--token-file", "a.token"], "", "a token names its user"),
        (["context", "set", "prod", "--tls-ca", "nope.pem"], "", "--tls-ca: there is no file nope.pem"),
        (["context", "set", "prod", "--tls-ca", "."], "", "--tls-ca: there is no file ."),
        (["context", "set", "prod", "--tls-cert", "me.pem"], "", "--tls-cert and --tls-key belong together"),
    ],
)
def test_invalid_arguments_are_refused_and_change_nothing(
    home: Path, kera: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str, message: str
) -> None:
    set_prod(kera)
    before = file_of(home).read_text()
    monkeypatch.setenv("KERA_CONTEXT", variable)
    code, out, err = kera(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert file_of(home).read_text() == before


def test_a_password_given_as_a_file_name_is_neither_kept_nor_repeated(home: Path, kera: Run) -> None:
    code, out, err = kera("context", "set", "p", "-b", "h:1", "--user", "alice", "--password-file", "hunter22")
    assert (code, out) == (2, "")
    assert "never the password itself" in err
    assert "hunter22" not in err
    assert not file_of(home).exists()


def test_a_password_file_that_others_can_read_gets_a_warning(home: Path, kera: Run) -> None:
    (home / "alice.pw").chmod(0o644)
    _, _, err = kera("context", "set", "p", "-b", "h:1", "--user", "alice", "--password-file", "alice.pw")
    assert f"kera: warning: others can read {home / 'alice.pw'}" in err


def test_context_set_keeps_unnamed_options_and_none_removes_an_option(home: Path, kera: Run) -> None:
    set_prod(kera)
    assert kera("context", "set", "prod", "--tls-ca", "system")[1] == "context prod: h:7400 as alice, TLS\n"
    nobody = ("--user", "none", "--password-file", "none", "--token-file", "a.token")
    assert kera("context", "set", "prod", *nobody)[1] == "context prod: h:7400 with a token, TLS\n"
    assert set(json.loads(file_of(home).read_text())["contexts"]["prod"]) == {"bootstrap", "token_file", "tls_ca"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b'{"contexts": []}',
        b'{"contexts": {"a": 1}}',
        b'{"contexts": {"a": {}}}',
        b'{"contexts": {"a": {"bootstrap": 1}}}',
        b'{"contexts": {"a": {"bootstrap": "h:1", "usr": "x"}}}',
        b'{"contexts": {"a": {"bootstrap": "h:1", "password": "hunter22"}}}',
        b'{"contexts": {}, "current": 1}',
        b"[" * 100_000,
    ],
)
def test_a_broken_file_is_named_with_a_remedy_and_not_changed(
    home: Path, kera: Run, asked: list[Asked], text: bytes
) -> None:
    file_of(home).parent.mkdir(parents=True)
    file_of(home).write_bytes(text)
    file_of(home).chmod(0o600)
    for arguments in (["stream", "list"], ["context", "list"], ["context", "set", "b", "-b", "h:1"]):
        code, out, err = kera(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert str(file_of(home)) in err
        assert "repair the file, or remove it" in err
        assert "hunter22" not in err
    assert file_of(home).read_bytes() == text
    assert kera("stream", "list", "--bootstrap", "h:1")[0] == 0
    assert [each.bootstrap for each in asked] == ["h:1"]


def test_a_file_that_others_can_write_is_refused(home: Path, kera: Run) -> None:
    set_prod(kera)
    file_of(home).chmod(0o620)
    code, _, err = kera("stream", "list")
    assert code == 2
    assert f"chmod 600 {file_of(home)}" in err


def test_a_missing_current_context_is_an_error(home: Path, kera: Run) -> None:
    set_prod(kera)
    file_of(home).write_text(file_of(home).read_text().replace('"current": ""', '"current": "prof"'))
    code, _, err = kera("stream", "list")
    assert code == 2
    assert f"there is no context 'prof' (the current one of {file_of(home)}); did you mean 'prod'?" in err


def test_commands_without_a_usable_home_directory_run_without_contexts(
    kera: Run, asked: list[Asked], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # the specification says to ignore relative paths
    monkeypatch.setenv("HOME", str(home / "nowhere"))
    assert kera("stream", "list")[0] == 0
    (home / "file").write_text("")
    monkeypatch.setenv("HOME", str(home / "file"))
    assert kera("stream", "list")[0] == 0
    assert [each.bootstrap for each in asked] == ["127.0.0.1:7400"] * 2
    code, _, err = kera("context", "set", "a", "-b", "h:1")
    assert code == 2
    assert "cannot keep contexts in" in err


def test_a_link_to_the_file_stays_a_link(home: Path, kera: Run) -> None:
    set_prod(kera)
    kept = home / "kept.json"
    file_of(home).rename(kept)
    file_of(home).symlink_to(kept)
    kera("context", "use", "prod")
    assert file_of(home).is_symlink()
    assert json.loads(kept.read_text())["current"] == "prod"


def test_processes_that_write_concurrently_lose_no_context(home: Path, kera: Run) -> None:
    program = (
        "import sys; from kera.cli.__main__ import main;"
        "[main(['context', 'set', f'{sys.argv[1]}{n}', '-b', 'h:1']) for n in range(20)]"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, letter], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for letter in "abc"
    ]
    while any(each.poll() is None for each in running):
        assert kera("context", "list", "--json")[0] == 0  # a reader never sees a partial file
    assert [each.returncode for each in running] == [0, 0, 0]
    assert len(json.loads(file_of(home).read_text())["contexts"]) == 60


def test_a_benchmark_uses_only_a_cluster_named_for_it(home: Path, kera: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from kera.cli.bench import _rounds

    asked: list[Asked] = []

    def run(_: str, settings: Any) -> int:
        found = ClientSettings.load()
        asked.append(Asked(settings.bootstrap, found.user, str(found.password_file or ""), ""))
        return 0

    monkeypatch.setattr(_rounds, "run", run)
    set_prod(kera)
    kera("context", "use", "prod")
    assert kera("bench", "produce") == (0, "", "")
    monkeypatch.setenv("KERA_CONTEXT", "prod")
    assert kera("bench", "produce") == (0, "", "")
    assert kera("bench", "produce", "--context", "prod") == (0, "", "")
    monkeypatch.setenv("KERA_BENCH_PRODUCE_BOOTSTRAP", "other:1")
    assert kera("bench", "produce")[0] == 0
    assert kera("bench", "produce", "--context", "prod") == (0, "", "")
    nobody, alice = Asked(None, "", "", ""), Asked("h:7400", "alice", str(home / "alice.pw"), "")
    assert asked == [nobody, nobody, alice, nobody._replace(bootstrap="other:1"), alice]


def test_doctor_without_a_cluster_option_does_not_connect(kera: Run, asked: list[Asked]) -> None:
    set_prod(kera)
    kera("context", "use", "prod")
    code, out, _ = kera("doctor", "--json", "--data-dir", "/nonexistent")
    assert code in {0, 1, 2}
    assert json.loads(out)["findings"]
    assert asked == []


def test_kera_dev_detects_that_commands_would_use_another_cluster(kera: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _elsewhere()
    set_prod(kera)
    monkeypatch.setenv("KERA_CONTEXT", "")
    assert not _elsewhere()
    kera("context", "use", "prod")
    assert _elsewhere()
    kera("context", "use", "--none")
    monkeypatch.setenv("KERA_CONTEXT", "prod")
    assert _elsewhere()
