"""Certificates for the tests of this folder."""

from pathlib import Path

import pytest

from kera.core.security.issuing import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """A new authority without issued certificates."""
    return Authority.open_or_make(tmp_path / "certificates")[0]
