"""`kera doctor`: what is said of this machine."""

import json
import resource
import socket
from pathlib import Path

import pytest

from kera.cli._run import run_app
from kera.cli.app import app
from kera.cli.diagnosis import host
from kera.cli.diagnosis.findings import Finding

GIB = 1 << 30


def words(findings: list[Finding]) -> list[str]:
    return [each.severity.word for each in findings]


@pytest.mark.parametrize(
    ("finding", "word"),
    [
        (host.python_version((3, 11)), "ok"),
        (host.python_version((3, 10)), "problem"),
        (host.descriptors(resource.RLIM_INFINITY), "ok"),
        (host.descriptors(65_536), "ok"),
        (host.descriptors(4096), "warning"),
        (host.descriptors(256), "problem"),
        (host.file_system("d", "xfs"), "ok"),
        (host.file_system("d", "tmpfs"), "problem"),
        (host.file_system("d", "nfs4"), "warning"),
        (host.file_system("d", "fuse.sshfs"), "warning"),
        (host.file_system("d", ""), "warning"),
        (host.clock_in(0), "ok"),
        (host.clock_in(5), "warning"),
        (host.clock_in(-1), "warning"),
        (host.java_version('openjdk version "17.0.2" 2022-01-18'), "ok"),
        (host.java_version('java version "1.8.0_301"'), "warning"),
        (host.java_version("nonsense"), "warning"),
        (host.java("/none"), "warning"),
    ],
)
def test_what_is_seen_is_judged(finding: Finding, word: str) -> None:
    assert finding.severity.word == word
    assert bool(finding.advice) == (word != "ok")


def test_a_port_that_somebody_has_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert host.port_free(port).severity.word == "problem"
    assert host.port_free(port).severity.word == "ok"


def test_the_arena_has_to_fit_into_shared_memory(tmp_path: Path) -> None:
    assert words(host.shared_memory(tmp_path, 1)) == ["ok"]
    assert words(host.shared_memory(tmp_path, 1 << 60)) == ["problem"]
    assert words(host.shared_memory(tmp_path / "none", 1)) == ["problem"]


@pytest.mark.parametrize(("available_kib", "word"), [(8 << 20, "ok"), (1200 << 10, "warning"), (1 << 10, "problem")])
def test_the_arena_has_to_fit_into_memory(tmp_path: Path, available_kib: int, word: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:       16777216 kB\nMemAvailable:   {available_kib} kB\n")
    assert host.memory(meminfo, GIB).severity.word == word
    assert host.memory(tmp_path / "none", GIB).severity.word == "warning"


def test_a_data_directory_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    found = host.data_directory(tmp_path / "new" / "data")
    assert f"would be made in {tmp_path}" in found[0].text
    assert list(tmp_path.iterdir()) == []
    assert "is there" in host.data_directory(tmp_path)[0].text
    (tmp_path / "file").touch()
    assert words(host.data_directory(tmp_path / "file" / "data")) == ["problem"]


@pytest.mark.parametrize("data_dir", ["/proc/kera", "x" * 300], ids=["proc", "long"])
def test_a_data_directory_that_cannot_be_made_is_a_problem(data_dir: str) -> None:
    (found,) = host.data_directory(Path("/", data_dir))

    assert (found.severity.word, found.subject) == ("problem", f"data directory {Path('/', data_dir)}")
    assert "choose another --data-dir" in found.advice


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 8:2 / /data\\040disk rw shared:1 - xfs /dev/sdb rw\n"
        "3 1 0:5 / /data rw - tmpfs none rw\n"
        "broken\n"
    )
    kinds = [host.file_system_of(Path(path), mounts) for path in ("/srv", "/data disk/kera", "/data/x", "/database")]
    assert kinds == ["ext4", "xfs", "tmpfs", "ext4"]
    assert not host.file_system_of(Path("/"), tmp_path / "none")


def test_the_command_says_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_app(app, ["doctor", "--data-dir", str(tmp_path), "--arena-bytes", "1MiB", "--json"])
    told = json.loads(capsys.readouterr().out)

    assert code == ["ok", "warning", "problem"].index(told["worst"])
    subjects = {each["subject"] for each in told["findings"]}
    assert {"python", "native core", "file descriptors", "memory", "clock", "port 7400", "java"} <= subjects
    assert all(each["advice"] for each in told["findings"] if each["severity"] != "ok")


def test_a_size_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["doctor", "--arena-bytes", "much"]) == 2
    assert "--arena-bytes" in capsys.readouterr().err
