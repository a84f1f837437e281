"""A short run of the chaos program `crowd`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.crowd import CROWD

ATTACKS = ("idle, frames", "unknown, send much over gRPC")
OTHERS = ("idle, gRPC", "known, take no answers", "wrong passwords, gRPC")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("attacks", [ATTACKS, OTHERS])
async def test_attackers_do_not_hinder_other_clients(tmp_path: Path, attacks: tuple[str, ...]) -> None:
    """The program checks it, and raises `Wrong` if a request of the others fails or has no answer."""
    run = await CROWD.short(tmp_path, seconds=1, before=0.5, connections=300, kinds=attacks, tls="on")
    assert run.seen["attacks"] == len(attacks)
