"""Paths on the command line: an empty path and the home directory of an unknown user are refused."""

from pathlib import Path

import pytest

from kera.cli._run import run_app
from kera.cli.app import app


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("backup --data-dir", "data_dir is ''"),
        ("backup --log-dirs", "log_dirs is ['']"),
        ("broker --data-dir", "data_dir is ''"),
        ("coordinator --config", "--config is empty"),
        ("coordinator --data-dir", "data_dir is ''"),
        ("cluster backup", "FILE is empty"),
        ("cluster restore", "FILE is empty"),
        ("cluster restore copy --data-dir", "--data-dir is empty"),
        ("dev --data-dir", "--data-dir is empty"),
        ("dev --log-dir", "--log-dir is empty"),
        ("doctor --data-dir", "--data-dir is empty"),
        ("node --data-dir", "--data-dir is empty"),
        ("node --data-dir data --log-dir", "--log-dir is empty"),
    ],
)
def test_an_empty_path_is_refused_and_named(
    command: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run_app(app, [*command.split(), ""]) == 2

    said = capsys.readouterr().err
    assert said.startswith("kera: error: ")
    assert named in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


NOBODYS = "~kera-nobody/data"
UNKNOWN = f"{NOBODYS} cannot be used: no user kera-nobody with a home directory is known"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("dev --data-dir", "--data-dir"),
        ("dev --log-dir", "--log-dir"),
        ("node --data-dir", "--data-dir"),
        ("node --data-dir data --log-dir", "--log-dir"),
        ("tls init", "DIR"),
    ],
)
def test_the_home_directory_of_an_unknown_user_is_refused_with_the_option(
    command: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run_app(app, [*command.split(), NOBODYS]) == 2

    assert capsys.readouterr().err == f"kera: error: {named}: {UNKNOWN}\n"
    assert list(tmp_path.iterdir()) == []
