"""A daemon takes tokens of the issuer that its settings name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kera.core.base.health import State
from kera.core.base.settings import InvalidSettings
from kera.core.errors import AuthenticationFailed, Unavailable
from kera.core.rpc.method import Evidence, Peer
from kera.core.runtime import Runtime
from kera.server.access.guard import Guard
from kera.server.access.jwt_sources import FileSource, ReadIntervals
from kera.server.access.settings import DaemonAccessSettings, guard_of
from tests.token_issuer import AUDIENCE, ISSUER, claims_of, jwk, key_set, signed


def settings(**changes: Any) -> DaemonAccessSettings:
    return DaemonAccessSettings(security=True, **{"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, **changes})


def state(guard: Guard) -> State:
    return guard.looks["jwt_keys"]().state


async def test_a_daemon_reads_keys_while_it_runs_and_its_health_shows_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSource, "pace", ReadIntervals(refresh_s=0.05, unknown_s=0.05, failed_s=0.05))
    path, runtime = tmp_path / "keys.json", Runtime()
    guard = guard_of(settings(jwt_keys=str(path)), runtime)
    assert isinstance(guard, Guard)
    peer, ended = Peer("grpc", "10.0.0.9:1"), asyncio.Event()
    peer.end = ended.set
    token = signed(claims_of("alice", runtime.clock.now_us() / 1e6, roles=["etl"]))
    with guard:
        assert state(guard) is State.PROBLEM
        with pytest.raises(Unavailable):
            guard.admit(peer, Evidence(token=token))
        path.write_bytes(key_set(jwk("one", "ES256")))
        while state(guard) is State.PROBLEM:
            await asyncio.sleep(0.01)
        guard.admit(peer, Evidence(token=token))
        assert peer.identity is not None
        assert (peer.identity.principal, peer.identity.roles) == ("user:alice", frozenset({"etl"}))
        path.unlink()
        while state(guard) is State.OK:
            await asyncio.sleep(0.01)
        assert state(guard) is State.WARNING
        guard.admit(Peer("grpc", "10.0.0.9:2"), Evidence(token=token))
        assert not ended.is_set()
        soon = signed(claims_of("alice", runtime.clock.now_us() / 1e6, exp=runtime.clock.now_us() / 1e6 - 59))
        guard.admit(peer, Evidence(token=soon))
        await ended.wait()  # a minute after the token has expired, as clocks may be off by that
        with pytest.raises(AuthenticationFailed, match="the token expired 6"):
            guard.admit(peer, Evidence(token=soon))


def test_a_daemon_without_an_issuer_refuses_tokens_of_others() -> None:
    guard = guard_of(DaemonAccessSettings(security=True), Runtime())
    assert isinstance(guard, Guard)
    assert not guard.looks
    with pytest.raises(AuthenticationFailed, match="jwt_keys sets no other issuer"):
        guard.admit(Peer("grpc", "10.0.0.9:1"), Evidence(token=signed(claims_of("alice", 0))))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"jwt_keys": "keys.json", "jwt_issuer": ""}, "jwt_keys needs jwt_issuer and jwt_audience"),
        ({"jwt_keys": "keys.json", "jwt_audience": ""}, "jwt_keys needs jwt_issuer and jwt_audience"),
        ({"jwt_keys": ""}, "belong to jwt_keys"),
        ({"jwt_keys": "http://issuer.example/keys"}, "jwt_keys: .* could replace the keys"),
        ({"jwt_keys": "~nobody-here/keys"}, "jwt_keys: .* no user nobody-here"),
    ],
)
def test_incomplete_or_unsafe_settings_are_refused_at_the_start(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSettings, match=why):
        guard_of(settings(**changes), Runtime())


@pytest.mark.parametrize(
    "changes", [{"jwt_user_claim": ""}, {"jwt_roles_claim": ""}, {"jwt_leeway_ms": -1}, {"jwt_leeway_ms": 600_001}]
)
def test_a_setting_out_of_its_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        settings(jwt_keys="keys.json", **changes)
