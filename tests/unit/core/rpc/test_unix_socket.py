"""Unix sockets that daemons listen on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kera.core.rpc.unix_socket import ANY_USER, OWN_USER, bind_unix


@pytest.mark.parametrize(
    ("directory_mode", "mode", "warned"), [(0o700, ANY_USER, True), (0o711, ANY_USER, False), (0o700, OWN_USER, False)]
)
def test_a_socket_for_others_that_they_cannot_get_to_is_told(directory_mode: int, mode: int, warned: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="kera-", dir="/tmp") as name, capture_logs() as lines:
        directory = Path(name)
        directory.chmod(directory_mode)
        bind_unix(directory / "push.sock", mode).close()

    assert [line["directories"] for line in lines] == ([[name]] if warned else [])
