"""``kera tls``: created certificates, and refused arguments."""

import json
import ssl
from pathlib import Path

import pytest

from tests.integration.command_line import run_kera


def init(*arguments: str) -> tuple[int, str, str]:
    ended = run_kera("tls", "init", *arguments)
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


def test_tls_init_creates_and_lists_valid_certificates(tmp_path: Path) -> None:
    code, output, errors = init(str(tmp_path / "c"), "10.0.0.1", "--client", "alice", "--days", "3")
    assert (code, errors) == (0, "")
    authority, _, *rows = output.splitlines()
    assert authority == f"authority: {tmp_path / 'c' / 'ca.pem'}"
    assert [row.split()[0] for row in rows] == ["10.0.0.1", "alice"]
    for row in rows:
        _, cert, key, _ = row.split()
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)


def test_a_second_run_keeps_the_authority_and_issues_new_certificates(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        code, output, _ = init(str(tmp_path), "--json")
        made = json.loads(output)
        found.append((code, made["ca_made"], Path(made["certificates"][0]["cert"]).read_bytes()))
    (first_code, first_made, first_cert), (code, made, cert) = found
    assert (first_code, code, first_made, made) == (0, 0, True, False)
    assert first_cert != cert


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["10.0.0.1", "10.0.0.2:7400"], "'10.0.0.2:7400' is not a host or client name: give it without a port"),
        (["10.0.0.1", "--client", "ca-key"], "'ca-key' is not a host or client name: ca-key.pem would be taken"),
        (["alice", "--client", "alice"], "'alice' is given as a host and as a client: give the client another name"),
        (["10.0.0.1", "--days", "0"], "a certificate is valid for 1 to 3650 days, not 0"),
    ],
)
def test_an_invalid_request_creates_nothing(tmp_path: Path, arguments: list[str], text: str) -> None:
    code, output, errors = init(str(tmp_path / "c"), *arguments)
    assert (code, output) == (1, "")
    assert text in errors
    assert not (tmp_path / "c").exists()


def test_a_host_named_twice_gets_one_certificate(tmp_path: Path) -> None:
    _, output, _ = init(str(tmp_path / "c"), "10.0.0.1", "10.0.0.1", "--json")
    assert len(json.loads(output)["certificates"]) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{}/c", "../evil"], "'../evil' is not a host or client name"),
        (["{}/c", "--days", "0"], "a certificate is valid for 1 to 3650 days, not 0"),
        (["{}/c", "--days", "1e9"], "Invalid value for '--days'"),
        (["{}/file/c"], "cannot make {}/file/c: Not a directory"),
        (["{}/broken"], "ca-key.pem are not a certificate and its key in PEM"),
        ([""], "DIR"),
        ([], "Missing argument 'DIR'"),
    ],
)
def test_invalid_arguments_are_refused_without_a_traceback(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ca.pem").write_text("")
    code, output, errors = init(*(each.format(tmp_path) for each in arguments))
    assert code in {1, 2}
    assert output == ""
    assert text.format(tmp_path) in errors
    assert "Traceback" not in errors
