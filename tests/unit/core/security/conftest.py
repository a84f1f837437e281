"""Certificates for the tests of this folder."""

from pathlib import Path

import pytest

from kera.core.security.issuing import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """With nothing issued yet."""
    return Authority.open_or_make(tmp_path / "certificates")[0]
