"""`kera verify`: what is printed, and the exit code. What is found is in tests/unit/broker/test_verify.py."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kera.broker.registration import DataDirectory
from kera.cli import verify as verify_module
from kera.cli._run import run_app
from kera.cli.app import app

SAMPLE = Path(__file__).parents[2] / "data" / "broker-format-2"
FIRST_FILE = "log/segments/000000/000000000001.segment"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "broker"))


def damage(data_dir: Path) -> Path:
    path = data_dir / FIRST_FILE
    with path.open("r+b") as file:
        file.seek(1216 + 140)
        file.write(b"?")
    return path


def test_a_whole_directory_is_one_line_and_no_error(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["verify", str(data_dir)]) == 0
    assert capsys.readouterr() == ("4 segments, 24 chunks, 768 records, 53 KiB: all is well\n", "")


def test_damage_is_a_line_with_its_place_and_an_error(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(data_dir)
    (data_dir / "log/segments/left").touch()

    assert run_app(app, ["verify", str(data_dir)]) == 1
    lines = capsys.readouterr().out.splitlines()
    reason = "chunk payload at offset 1216 does not match its checksum (stream 1, streamlet 0, sequence 1)"
    assert lines == [
        f"damage: {path} at 1216, 1536 bytes: {reason}",
        f"warning: {data_dir}/log/segments/left: no record of the index names it",
        "4 segments, 23 chunks, 754 records, 53 KiB: 1 damage, 1 warning",
    ]


def test_warnings_alone_are_no_error(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data_dir / "broker.copy.json").unlink()

    assert run_app(app, ["verify", str(data_dir)]) == 0
    assert capsys.readouterr().out.endswith("53 KiB: 0 damages, 1 warning\n")


def test_json_has_all_of_it(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(data_dir)

    assert run_app(app, ["verify", str(data_dir), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (finding,) = document.pop("findings")
    assert document == {"segments": 4, "chunks": 23, "records": 754, "bytes": 54272}
    assert finding.pop("text").startswith("chunk payload at offset 1216")
    assert finding == {"severity": "damage", "path": str(path), "offset": 1216, "length_bytes": 1536}


def test_a_directory_that_cannot_be_checked_is_an_error_of_usage(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["verify", str(tmp_path / "none")]) == 2
    assert run_app(app, ["verify", str(tmp_path)]) == 2
    directory = DataDirectory(data_dir)
    assert run_app(app, ["verify", str(data_dir)]) == 2
    directory.close()

    missing, other, used = capsys.readouterr().err.splitlines()
    assert "does not exist" in missing
    assert "is no data directory of a broker" in other
    assert "a broker uses data directory" in used


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_ctrl_c_ends_it_with_130(data_dir: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    assert run_app(app, [command, str(data_dir)]) == 130


def test_without_the_server_extra_it_says_what_to_install(data_dir: Path) -> None:
    for command in ("verify", "inspect"):
        program = (
            "import sys\nsys.modules['lmdb'] = None\nfrom kera.cli.__main__ import main\nsys.exit(main(sys.argv[1:]))"
        )
        argv = [sys.executable, "-c", program, command, str(data_dir)]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        assert ended.stderr == "kera: error: lmdb is missing; install it with: pip install 'kera[server]'\n"


def test_a_long_check_shows_on_a_terminal_how_far_it_is(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_module, "QUIET_S", 0.0)
    monkeypatch.setattr(verify_module, "PROGRESS_INTERVAL_S", 0.0)
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert run_app(app, ["verify", str(data_dir)]) == 0
        terminal.flush()
        shown = os.read(reader, 1 << 16).decode()
    os.close(reader)

    assert "\r4 of 4 segments, 53 KiB\x1b[K" in shown
    assert shown.endswith("\r\x1b[K"), "it is gone in the end"
    assert capsys.readouterr().out.count("\n") == 1
