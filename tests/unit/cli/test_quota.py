"""`kera quota`: the requests to the cluster, and the output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kera.cli._run import run_app
from kera.cli.app import app
from kera.client.admin.access import Change, User
from kera.client.admin.quotas import Quota
from kera.core.errors import UnknownUser
from tests.unit.cli.fake_client import FakeClient

MIB = 1 << 20


class Quotas(FakeClient):
    """A client of a cluster that fulfils all requests."""

    def __init__(self) -> None:
        self.quotas = {
            "": Quota(requests_per_s=100),
            "alice": Quota(bytes_in_per_s=MIB, streams=3),
            "bob": Quota(),
        }
        self.untold: tuple[str, ...] = ()
        super().__init__(
            describe_cluster=SimpleNamespace(security=True),
            users=lambda: [User(name, quota=quota) for name, quota in self.quotas.items() if name],
            default_quota=lambda: self.quotas[""],
            set_quota=self._set,
            set_default_quota=lambda **limits: self._set("", **limits),
        )

    def _set(self, name: str, **limits: Any) -> Change:
        if name not in self.quotas:
            raise UnknownUser(f"there is no user {name!r}: kera user create makes one")
        self.quotas[name] = Quota(**limits)
        return Change(self.untold)


@pytest.fixture
def cluster() -> Iterator[Quotas]:
    made = Quotas()
    with made.answering():
        yield made


def kera(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_app(app, ["quota", *arguments])
    return code, *capsys.readouterr()


def test_quota_set_changes_only_the_named_limits(cluster: Quotas, capsys: pytest.CaptureFixture[str]) -> None:
    assert kera(capsys, "set", "alice", "--bytes-out-per-s", "1.5MiB", "--streams", "none") == (
        0,
        "quota of alice: bytes in 1 MiB/s, bytes out 1.5 MiB/s\n",
        "",
    )
    assert cluster.quotas["alice"] == Quota(bytes_in_per_s=MIB, bytes_out_per_s=MIB * 3 // 2)
    assert kera(capsys, "set", "bob", "--connections", "0", "--stored-bytes", "1GiB")[1] == (
        "quota of bob: connections 0, stored bytes 1 GiB\n"
    )
    assert kera(capsys, "set", "--default", "--requests-per-s", "50")[1] == "default quota: requests 50/s\n"
    assert cluster.quotas[""] == Quota(requests_per_s=50)


def test_removing_the_last_limit_clears_the_quota(cluster: Quotas, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.quotas["alice"] = Quota(streams=1)
    ended = kera(capsys, "set", "alice", "--streams", "none")
    assert ended == (0, "quota of alice: cleared, so that the default one holds\n", "")


def test_quota_clear_removes_all_limits_and_warns_of_brokers_not_notified(
    cluster: Quotas, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.untold = ("broker 3: connection refused",)
    assert kera(capsys, "clear", "alice") == (
        0,
        "quota of alice: cleared, so that the default one holds\n",
        (
            "kera: warning: broker 3 could not be notified (connection refused): until it is back, the previous quota"
            " applies there\n"
        ),
    )
    assert kera(capsys, "clear", "--default")[1] == "default quota: cleared\n"
    assert not any(cluster.quotas.values())


@pytest.mark.usefixtures("cluster")
def test_quota_show_prints_the_quotas_that_apply(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = kera(capsys, "show")
    assert code == 0
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["(default)", "-", "-", "100", "-", "-", "-"],
        ["alice", "1", "MiB", "-", "-", "-", "3", "-"],
    ]
    assert "100" in kera(capsys, "show", "bob")[1].splitlines()[1]  # the default quota applies
    shown = json.loads(kera(capsys, "show", "alice", "--json")[1])
    assert (shown["user"], shown["bytes_in_per_s"], shown["connections"]) == ("alice", MIB, None)
    assert [each["user"] for each in json.loads(kera(capsys, "show", "--json")[1])] == [None, "alice"]
    assert json.loads(kera(capsys, "show", "--default", "--json")[1])["user"] is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("set", "alice"), "give a limit: --bytes-in-per-s"),
        (("set", "--streams", "1"), "give either the NAME of a user, or --default"),
        (("set", "alice", "--default", "--streams", "1"), "give either the NAME of a user, or --default"),
        (("set", "alice", "--streams", "many"), "--streams: 'many' is not a number, and not none"),
        (("set", "alice", "--streams", "9" * 5000), "--streams: '9999"),
        (("set", "alice", "--bytes-in-per-s", "fast"), "--bytes-in-per-s: 'fast' is not a size"),
        (("clear",), "give either the NAME of a user, or --default"),
    ],
)
def test_invalid_arguments_are_refused(
    cluster: Quotas, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    code, _, errors = kera(capsys, *arguments)
    assert code == 2
    assert errors.startswith(f"kera: error: {text}")
    assert cluster.quotas["alice"].streams == 3


def test_a_quota_of_an_unknown_user_is_an_error(cluster: Quotas, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = kera(capsys, "set", "carol", "--streams", "1")
    assert (code, errors) == (1, "kera: error: there is no user 'carol': kera user create makes one\n")
    assert "carol" not in cluster.quotas
