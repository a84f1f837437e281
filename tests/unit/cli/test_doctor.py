"""`kera doctor`: findings about this machine."""

import json
import resource
import socket
import time
from pathlib import Path

import pytest

from kera.cli._run import run_app
from kera.cli.app import app
from kera.cli.diagnosis import host
from kera.cli.diagnosis.certificates import certificates
from kera.client.diagnosis.findings import Finding
from kera.core.base.clock import FakeClock
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from kera.server.monitoring.certificates import Certificates
from tests.certificates import Issuing
from tests.integration.command_line import run_kera

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
def test_findings_have_a_severity_and_advice(finding: Finding, word: str) -> None:
    assert finding.severity.word == word
    assert bool(finding.advice) == (word != "ok")


def test_a_port_in_use_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert host.port_free(port).severity.word == "problem"
    assert host.port_free(port).severity.word == "ok"


def test_an_arena_larger_than_shared_memory_is_a_problem(tmp_path: Path) -> None:
    assert words(host.shared_memory(tmp_path, 1)) == ["ok"]
    assert words(host.shared_memory(tmp_path, 1 << 60)) == ["problem"]
    assert words(host.shared_memory(tmp_path / "none", 1)) == ["problem"]


@pytest.mark.parametrize(("available_kib", "word"), [(8 << 20, "ok"), (1200 << 10, "warning"), (1 << 10, "problem")])
def test_the_available_memory_is_compared_with_the_arena(tmp_path: Path, available_kib: int, word: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:       16777216 kB\nMemAvailable:   {available_kib} kB\n")
    assert host.memory(meminfo, GIB).severity.word == word
    assert host.memory(tmp_path / "none", GIB).severity.word == "warning"


def test_a_data_directory_is_examined_and_not_created(tmp_path: Path) -> None:
    found = host.data_directory(tmp_path / "new" / "data")
    assert f"would be made in {tmp_path}" in found[0].text
    assert list(tmp_path.iterdir()) == []
    assert "is there" in host.data_directory(tmp_path)[0].text
    (tmp_path / "file").touch()
    assert words(host.data_directory(tmp_path / "file" / "data")) == ["problem"]


@pytest.mark.parametrize("data_dir", ["/proc/kera", "x" * 300], ids=["proc", "long"])
def test_a_data_directory_that_cannot_be_created_is_a_problem(data_dir: str) -> None:
    (found,) = host.data_directory(Path("/", data_dir))

    assert (found.severity.word, found.subject) == ("problem", f"data directory {Path('/', data_dir)}")
    assert "choose another --data-dir" in found.advice


def test_a_data_directory_of_an_unknown_user_is_a_problem() -> None:
    (found,) = host.data_directory(Path("~kera-nobody/data"))

    assert (found.severity.word, found.subject) == ("problem", "data directory ~kera-nobody/data")
    assert found.text == "~kera-nobody/data cannot be used: no user kera-nobody with a home directory is known"


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


def test_the_file_system_behind_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    mounts, disk, link = tmp_path / "mountinfo", tmp_path / "disk", tmp_path / "link"
    mounts.write_text(f"1 0 0:5 / / rw - tmpfs none rw\n2 1 8:2 / {disk.resolve()} rw - xfs /dev/sdb rw\n")
    disk.mkdir()
    link.symlink_to(disk)

    assert host.file_system_of(link, mounts) == "xfs"


def test_the_command_prints_all_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_app(app, ["doctor", "--data-dir", str(tmp_path), "--arena-bytes", "1MiB", "--json"])
    told = json.loads(capsys.readouterr().out)

    assert code == ["ok", "warning", "problem"].index(told["worst"])
    subjects = {each["subject"] for each in told["findings"]}
    assert {"python", "native core", "file descriptors", "memory", "clock", "port 7400", "java"} <= subjects
    assert all(each["advice"] for each in told["findings"] if each["severity"] != "ok")


def test_an_invalid_size_is_refused_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["doctor", "--arena-bytes", "much"]) == 2
    assert "--arena-bytes" in capsys.readouterr().err


def looked_at(tmp_path: Path, *names: str, days: int = 365, now_s: float | None = None) -> list[tuple[str, str]]:
    """The findings about a certificate for broker-1.example.com."""
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("broker-1.example.com", days=days)
    found = certificates(one.cert, one.key, authority.path, list(names), time.time() if now_s is None else now_s)
    return [(each.severity.word, each.text) for each in found]


def test_a_certificate_is_examined_for_all_names(tmp_path: Path) -> None:
    (lasting, good, bad) = looked_at(tmp_path, "broker-1.example.com", "10.0.0.1")
    assert (lasting[0], good[0], bad[0]) == ("ok", "ok", "problem")
    assert "is not accepted for 10.0.0.1: IP address mismatch" in bad[1]


@pytest.mark.parametrize(("days", "word"), [(29, "warning"), (31, "ok")])
def test_a_certificate_that_will_expire_soon_is_a_warning(tmp_path: Path, days: int, word: str) -> None:
    assert looked_at(tmp_path, days=days)[0][0] == word


def test_a_certificate_that_has_expired_is_a_problem(tmp_path: Path) -> None:
    (word, text), *_ = looked_at(tmp_path, days=1, now_s=time.time() + 2 * 86_400)
    assert word == "problem"
    assert "expired on" in text


@pytest.mark.parametrize(("age_days", "word"), [(0, "ok"), (334, "ok"), (336, "warning"), (366, "problem")])
def test_a_daemon_reports_its_certificate_as_doctor_does(tmp_path: Path, age_days: int, word: str) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("localhost", days=365)
    now_s = time.time() + age_days * 86_400
    (before, *_) = certificates(one.cert, one.key, authority.path, [], now_s)
    daemons = Certificates(Tls(TlsFiles(one.cert, one.key, authority.path)), FakeClock(round(now_s * 1e6)))

    state, text = daemons.look()
    assert (state.value, before.severity.word) == (word, word)
    assert text == before.text + ("" if word == "ok" else "; put a new one in its place")


def test_a_certificate_of_another_authority_is_a_problem(tmp_path: Path) -> None:
    one = Authority.open_or_make(tmp_path / "one")[0].issue("localhost")
    other, _ = Authority.open_or_make(tmp_path / "other")
    _, found = certificates(one.cert, one.key, other.path, ["localhost"], time.time())
    assert (found.severity.word, "unable to get local issuer" in found.text) == ("problem", True)


def test_a_certificate_that_is_not_for_clients_is_a_problem(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path / "authority")
    one = Issuing(authority, tmp_path / "issued").of_servers_only()
    _, _, found = certificates(one.cert, one.key, authority.path, ["localhost"], time.time())
    assert (found.severity.word, found.advice) == (
        "problem",
        "have one issued for clients as well: daemons call each other",
    )
    assert "is not accepted when this host calls others: unsuitable certificate purpose" in found.text


@pytest.mark.parametrize(("mode", "word"), [(0o600, "ok"), (0o640, "warning"), (0o604, "warning")])
def test_a_key_that_others_can_read_is_a_warning(tmp_path: Path, mode: int, word: str) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("localhost")
    one.key.chmod(mode)
    found = certificates(one.cert, one.key, authority.path, [], time.time())
    assert max(each.severity for each in found).word == word


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tls-cert", "{}/nothing.pem"], "belong together"),
        (["--tls-cert", "{}/nothing.pem", "--tls-key", "x", "--tls-ca", "y"], "nothing.pem cannot be read"),
        (["--tls-ca", "y"], "--tls-key, --tls-ca and --name need --tls-cert"),
        (["--name", "y"], "--tls-key, --tls-ca and --name need --tls-cert"),
    ],
)
def test_incomplete_or_unreadable_certificates_are_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    ended = run_kera("doctor", "--data-dir", str(tmp_path), *(each.format(tmp_path) for each in arguments))
    assert ended.returncode == 2
    assert text in (ended.stdout + ended.stderr).decode()
