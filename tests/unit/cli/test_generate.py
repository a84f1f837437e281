"""`kera generate`: it prints or writes the files of deploy/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kera.cli import generate
from kera.cli._run import run_app
from kera.cli.app import app
from kera.cli.generate import KINDS

DEPLOY = Path(__file__).parents[3] / "deploy"
NAMES = {"prometheus": KINDS[0], "grafana": KINDS[1], "systemd": KINDS[2], "compose": KINDS[3]}
EACH = [(word, name) for word, kind in NAMES.items() for name in kind.files]


def kera(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> tuple[int, bytes, str]:
    code = run_app(app, ["generate", *arguments])
    out, err = capfdbinary.readouterr()
    return code, out, err.decode()


def of_tree(word: str, name: str) -> bytes:
    return (DEPLOY / NAMES[word].folder / name).read_bytes()


@pytest.mark.parametrize(("word", "name"), EACH)
def test_a_file_is_printed_byte_by_byte(capfdbinary: pytest.CaptureFixture[bytes], word: str, name: str) -> None:
    assert kera(capfdbinary, word, name) == (0, of_tree(word, name), "")


@pytest.mark.parametrize(
    ("word", "name"), [("prometheus", "kera.rules.yml"), ("grafana", "kera.json"), ("compose", "docker/compose.yaml")]
)
def test_without_a_name_the_main_file_is_printed(
    capfdbinary: pytest.CaptureFixture[bytes], word: str, name: str
) -> None:
    assert kera(capfdbinary, word) == (0, of_tree(word, name), "")


def test_units_are_printed_under_their_names(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    code, out, _ = kera(capfdbinary, "systemd")
    assert code == 0
    for name in ("kera-coordinator.service", "kera-broker.service", "kera-backup.service"):
        assert f"# {name}\n".encode() + of_tree("systemd", name) in out


def test_the_commands_have_every_file_of_deploy() -> None:
    for word in ("prometheus", "grafana", "systemd"):
        there = {path.name for path in (DEPLOY / word).iterdir()} - {"README.md", "dashboards.py", "__pycache__"}
        assert there == set(NAMES[word].files)


def test_compose_includes_the_files_that_it_mounts() -> None:
    services = yaml.safe_load(of_tree("compose", "docker/compose.yaml"))["services"]
    mounted = {
        os.path.normpath(Path("docker", volume.split(":")[0]))
        for service in services.values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    }
    assert mounted
    assert mounted <= set(NAMES["compose"].files)


def test_the_encoding_of_standard_output_does_not_change_a_file() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "kera.cli", "generate", "systemd", "kera-broker.service"]
    ran = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert ran.stdout == of_tree("systemd", "kera-broker.service")


def test_out_writes_all_files_into_a_new_directory(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    code, out, _ = kera(capfdbinary, "compose", "--out", str(tmp_path / "new"))
    assert code == 0
    names = NAMES["compose"].files
    assert out.decode().split() == [str(tmp_path / "new" / name) for name in names]
    assert {name: (tmp_path / "new" / name).read_bytes() for name in names} == {
        name: of_tree("compose", name) for name in names
    }


def test_a_changed_file_is_replaced_only_with_force(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "kera.toml").write_text("mine")
    code, out, err = kera(capfdbinary, "systemd", "--out", str(tmp_path))
    assert (code, out) == (2, b"")
    assert f"{tmp_path / 'kera.toml'}: there already, with something else in it" in err
    assert [each.name for each in tmp_path.iterdir()] == ["kera.toml"]
    assert kera(capfdbinary, "systemd", "kera.sysusers", "--out", str(tmp_path))[0] == 0
    assert (tmp_path / "kera.toml").read_text() == "mine"
    assert kera(capfdbinary, "systemd", "--out", str(tmp_path), "--force")[0] == 0
    assert (tmp_path / "kera.toml").read_bytes() == of_tree("systemd", "kera.toml")
    assert kera(capfdbinary, "systemd", "--out", str(tmp_path))[0] == 0, "again, with nothing to change"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["systemd", "kera-brokr.service"], "did you mean 'kera-broker.service'?"),
        (["systemd", "../README.md"], "there is no file '../README.md' here"),
        (["systemd", "--list", "--out", "x"], "--list is given alone"),
        (["systemd", "--force"], "--force belongs to --out"),
        (["systemd", "--out", ""], "--out is empty"),
        (["systemd", "--out", "/dev/null"], "cannot write /dev/null"),
        (["completion"], "Missing argument 'SHELL'"),
        (["completion", "csh"], "there is no completion for 'csh'"),
        (["completion", "Bash"], "did you mean 'bash'?"),
    ],
)
def test_invalid_arguments_are_refused(
    capfdbinary: pytest.CaptureFixture[bytes], arguments: list[str], message: str
) -> None:
    code, out, err = kera(capfdbinary, *arguments)
    assert (code, out) == (2, b"")
    assert message in err
    assert err.count("\n") == 1


def test_the_missing_directory_of_a_dangling_link_is_not_created(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "kera.json").symlink_to(tmp_path / "nowhere" / "x")
    code, out, err = kera(capfdbinary, "grafana", "--out", str(tmp_path))
    assert (code, out) == (2, b"")
    assert f"cannot write {tmp_path / 'nowhere' / 'x'}: No such file or directory" in err
    assert not (tmp_path / "nowhere").exists()


def test_files_are_listed(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert kera(capfdbinary, "prometheus", "--list")[1].decode().split() == list(NAMES["prometheus"].files)


def test_an_installation_without_the_files_is_an_error(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "generate.py"))
    code, _, err = kera(capfdbinary, "grafana")
    assert code == 1
    assert "this installation of kera has no kera.json: reinstall its wheel" in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_has_valid_syntax(
    capfdbinary: pytest.CaptureFixture[bytes], shell: str
) -> None:
    code, out, _ = kera(capfdbinary, "completion", shell)
    assert code == 0
    assert b"_KERA_COMPLETE" in out
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=out, check=True)


def test_bash_completes_commands_and_names_of_contexts(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    bash: Any = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert run_app(app, ["context", "set", "production", "-b", "h:1"]) == 0
    capfdbinary.readouterr()
    script = kera(capfdbinary, "completion", "bash")[1].decode()

    def completed(*words: str) -> list[str]:
        ask = f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _kera_completion kera\n"
        ran = subprocess.run([bash, "-c", ask + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
        return ran.stdout.split()

    assert completed("kera", "strea") == ["stream"]
    assert completed("kera", "stream", "list", "--context", "pro") == ["production"]
