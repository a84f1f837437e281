"""Lines that gRPC writes to standard error: which are logged, and what happens to the others."""

import os
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from kera.core.rpc.grpc_words import MARKED_MAX, Words

FAILED = (
    "I1127 23:26:45.654694     926 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL:"
    " error:100000c0:SSL routines:OPENSSL_internal:"
)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{FAILED}PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate", "it shows no certificate"),
        (
            f"{FAILED}CERTIFICATE_VERIFY_FAILED: certificate has expired",
            "its certificate is not accepted: certificate has expired",
        ),
        (f"{FAILED}HTTP_REQUEST: OK", "it does not speak TLS"),
        (f"{FAILED}WRONG_CURVE", "TLS failed: WRONG_CURVE"),
        (
            "E1127 23:26:46.550198     926 ssl_transport_security.cc:3238] No match found for server name: vm",
            "it calls this host by a name for which there is no certificate here",
        ),
    ],
)
def test_a_refused_connection_is_logged_with_its_reason(line: str, reason: str) -> None:
    with capture_logs() as lines:
        assert Words("grpc").take(f"{line}\n".encode())
    assert [(each["event"], each["interface"], each["reason"]) for each in lines] == [
        ("connection refused", "grpc", reason)
    ]


def test_a_flood_is_logged_in_few_lines() -> None:
    words = Words("grpc")
    with capture_logs() as lines:
        for number in range(5000):
            assert words.take(f"{FAILED}CERTIFICATE_VERIFY_FAILED: certificate has expired\n".encode())
            assert words.take(f"E1127 23:26:46.550198 {number} tcp.cc:1] defect {number}\n".encode())
    assert len([each for each in lines if each["event"] == "connection refused"]) == 1
    assert len([each for each in lines if each["event"] == "gRPC says"]) == 10


def test_information_of_grpc_is_dropped_and_lines_of_others_stay() -> None:
    with capture_logs() as lines:
        assert Words("grpc").take(b"I1127 23:26:46.550198     926 ev_epoll1.cc:1] grpc epoll fd: 7\n")
        for line in (b"malloc(): corrupted top size\n", b'{"event": "ready"}\n', b"\n", b"E1127 half a li"):
            assert not Words("grpc").take(line)
    assert lines == []


FORGED = '{"event": "all is well", "level": "info"}'
FORGING = """
import os, sys
from kera.core.rpc.grpc_words import heard

begins = b"I1127 23:26:46.550198     926 transport.cc:1] Got goaway: x\\n"
with heard():
    os.write(2, begins + sys.argv[1].encode() + b"\\n\\x1b[2Jy\\n")
os.write(2, b"behind\\n")
"""


def forged(text: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", FORGING, text],
        env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},
        stderr=subprocess.PIPE,
        check=True,
    )
    return ended.stderr.decode().splitlines()


def test_text_of_a_peer_does_not_flood_the_log() -> None:
    assert forged("x\n\n" * 2 * MARKED_MAX) == [*(["| x"] * MARKED_MAX), "behind"]


def test_text_of_a_peer_cannot_forge_a_line_of_the_log() -> None:
    lines = forged(FORGED)
    assert [line for line in lines if line.startswith("{")] == []
    assert lines == [f"| {FORGED}", "| \\x1b[2Jy", "behind"]


PROGRAM = """
import os, sys, structlog
from kera.core.rpc.grpc_words import heard

with heard():
    os.write(2, b"E1127 23:26:46.550198     926 tcp.cc:1] a defect of gRPC's\\n")
    os.write(2, b"a word of another library\\n")
    print("python's own", file=sys.stderr)
os.write(2, b"behind\\n")
"""


def run(**environment: str) -> str:
    """Run the program, and return its standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**{name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}, **environment},
        stderr=subprocess.PIPE,
        check=True,
    )
    return ended.stderr.decode()


def test_only_lines_of_grpc_are_removed_from_standard_error() -> None:
    said = run()
    assert "gRPC says" in said
    assert "E1127" not in said
    for line in ("a word of another library", "python's own", "behind"):
        assert said.count(line) == 1
    assert said.endswith("behind\n")


def test_lines_of_grpc_stay_unchanged_if_the_user_asks_for_them() -> None:
    assert "E1127 23:26:46.550198     926 tcp.cc:1] a defect of gRPC's\n" in run(GRPC_VERBOSITY="DEBUG")


def test_a_process_that_aborts_leaves_its_tracebacks() -> None:
    program = "from kera.core.rpc.grpc_words import heard\nimport os\nwith heard():\n    os.abort()"
    quiet = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=False, env=quiet)
    assert b"Fatal Python error: Aborted" in ended.stderr
    assert ended.returncode < 0
