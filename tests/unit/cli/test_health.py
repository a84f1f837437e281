"""`kera cluster health` and `kera doctor --bootstrap`: findings, and their output."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kera.cli._run import run_app
from kera.cli.app import app
from kera.client import BackupDescription, BrokerDescription, ClusterDescription, RecoveryDescription
from kera.client.admin.daemons import DaemonCheck, DaemonDescription, FileSystemRoom
from kera.client.diagnosis import asking
from kera.client.diagnosis.asking import Picture
from kera.client.diagnosis.cluster import health, installed, unreachable
from kera.client.diagnosis.findings import Finding, Severity, document, lines, ok, problem, warning, worst
from kera.client.types import Assignment, Interval
from kera.core.errors import AuthenticationFailed, KeraError, NotAllowed, Unavailable
from tests.unit.cli.fake_client import FakeClient

GIB = 1 << 30


def broker(broker_id: int, **fields: Any) -> BrokerDescription:
    alive = fields.pop("alive", True)
    return BrokerDescription(broker_id, "node/boot", f"b:{broker_id}", "", "", 8 << 20, 1 << 28, alive=alive, **fields)


def backup(backup_id: int, **fields: Any) -> BackupDescription:
    made = BackupDescription(
        backup_id, "node/boot", "", f"k:{backup_id}", "", "", 8 << 20, 1 << 28, GIB, 1 << 28, GIB, alive=True
    )
    return dataclasses.replace(made, **fields)


def daemon(**fields: Any) -> DaemonDescription:
    settings: dict[str, Any] = {
        "address": "b:1",
        "role": "broker",
        "version": "1.0",
        "commit": "",
        "native": True,
        "node_id": "node/boot",
        "uptime_ms": 1000,
        "clock_ahead_ms": 1.0,
        "clock_unsure_ms": 0.5,
        "checks": (DaemonCheck("state", "ok", "it serves"),),
        "file_systems": (FileSystemRoom("/data", 100 * GIB, 60 * GIB),),
    }
    return DaemonDescription(**{**settings, **fields})


class Stream:
    """The parts of a stream's description that a diagnosis needs."""

    def __init__(self, name: str, *owners: int, replication: int = 0) -> None:
        self.name = name
        self.config = self
        self.replication = replication
        self.assignments = {number: Assignment(owner, 1, 1) for number, owner in enumerate(owners)}


def picture(**fields: Any) -> Picture:
    members = {"brokers": [broker(1), broker(2)], "backups": [backup(1)], "coordinators": ("c:1",)}
    cluster = ClusterDescription("c1", **{**members, **fields.pop("cluster", {})})
    streams: list[Any] = fields.pop("streams", [Stream("orders", 1, 2, replication=1)])
    daemons = fields.pop("daemons", {"broker 1": daemon(), "coordinator c:1": daemon(role="coordinator")})
    return Picture(cluster, fields.pop("recoveries", []), streams, daemons)


def recovery(**fields: Any) -> RecoveryDescription:
    zeros: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(RecoveryDescription)}
    said = {"broker_id": 2, "cause": "dead", "phase": "recovering", "waits_for": [], "owner_ids": [1]}
    return RecoveryDescription(**{**zeros, **said, **fields})


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(each.severity.word, each.subject) for each in findings if each.severity]


def test_a_cluster_without_problems_is_healthy() -> None:
    found = health(picture())
    assert bad(found) == []
    assert {each.subject for each in found} >= {
        "coordinator",
        "broker 2",
        "backup 1",
        "streamlets",
        "disks",
        "versions",
        "feature level",
    }


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        pytest.param((2, 2, 2, 2), "", id="all-have-it"),
        pytest.param((1, 2, 1, 2), "the cluster has 1; it rises to 2 when broker 1 has it", id="a-broker"),
        pytest.param((1, 2, 2, 1), "the cluster has 1; it rises to 2 when backup 1 has it", id="a-backup"),
        pytest.param(
            (1, 1, 1, 1), "the cluster has 1; it rises to 2 when broker 1, broker 2, backup 1 have it", id="others"
        ),
        pytest.param((1, 2, 2, 2), "the cluster has 1, and all daemons have 2", id="held"),
    ],
)
def test_the_daemons_that_hold_the_feature_level_down_are_named(
    levels: tuple[int, int, int, int], expected: str
) -> None:
    cluster, second, first, third = levels
    found = health(
        picture(
            cluster={
                "brokers": [broker(1, feature_level=first), broker(2, feature_level=second)],
                "backups": [backup(1, feature_level=third)],
                "feature_level": cluster,
            },
            daemons={"coordinator c:1": daemon(role="coordinator", feature_level=2)},
        )
    )
    assert [each.text for each in found if each.subject == "feature level" and each.severity] == [expected][
        : bool(expected)
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cluster": {"brokers": [broker(1), broker(2), broker(3, alive=False)]}}, [("warning", "broker 3")]),
        ({"cluster": {"brokers": [broker(1), broker(2, draining=True)]}}, [("warning", "broker 2")]),
        (
            {"cluster": {"brokers": [broker(1), broker(2, alive=False, restarting=True, grace_left_ms=41_000)]}},
            [("warning", "broker 2"), ("warning", "streamlets")],
        ),
        (
            {"cluster": {"brokers": [broker(1), broker(2, alive=False)]}},
            [("warning", "broker 2"), ("problem", "streamlets")],
        ),
        (
            {"cluster": {"brokers": []}, "streams": []},
            [("problem", "brokers")],
        ),
        (
            {"cluster": {"backups": [backup(1, alive=False)]}},
            [("warning", "backup 1"), ("problem", "backups")],
        ),
        ({"cluster": {"catching_up": "the metadata are older"}}, [("warning", "metadata")]),
        ({"recoveries": [recovery()]}, [("warning", "recovery of broker 2")]),
        ({"recoveries": [recovery(phase="done", records_lost=7)]}, [("warning", "recovery of broker 2")]),
        ({"recoveries": [recovery(phase="done")]}, []),
        ({"daemons": {"broker 1": daemon(), "broker 2": daemon(version="1.1")}}, [("warning", "versions")]),
        ({"daemons": {"broker 1": daemon(native=False)}}, [("warning", "native core")]),
        ({"daemons": {"broker 1": Unavailable("refused")}}, [("warning", "broker 1")]),
        (
            {"daemons": {"broker 1": daemon(checks=(DaemonCheck("disk", "problem", "it is full"),))}},
            [("warning", "broker 1")],
        ),
        (
            {"daemons": {"backup 1": daemon(checks=(DaemonCheck("disks", "warning", "1 of 2"),))}},
            [("warning", "backup 1")],
        ),
        (
            {"daemons": {"broker 1": daemon(file_systems=(FileSystemRoom("/data", 100, 9),))}},
            [("warning", "broker 1")],
        ),
        (
            {"daemons": {"broker 1": daemon(file_systems=(FileSystemRoom("/data", 100, 1),))}},
            [("problem", "broker 1")],
        ),
    ],
)
def test_each_problem_is_found_with_advice(fields: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    found = health(picture(**fields))
    assert bad(found) == expected
    assert all(each.advice for each in found if each.severity), "what is wrong says what to do"


def test_the_first_streams_without_a_broker_are_named_and_the_others_counted() -> None:
    streams = [Stream(f"stream-{number}", 9, 9) for number in range(7)]
    (found,) = (each for each in health(picture(streams=streams)) if each.subject == "streamlets")
    assert found.text == (
        "14 of 14 streamlets have no live broker: stream-0, stream-1, stream-2, stream-3, stream-4 and 2 other streams"
    )


@pytest.mark.parametrize(
    ("streams", "text"),
    [
        ([], "there are no streams"),
        ([Stream("one", 1)], "the only streamlet has a live broker"),
        ([Stream("one", 1, 2), Stream("two", 1)], "all 3 streamlets of 2 streams have a live broker"),
    ],
)
def test_streamlets_with_live_brokers_are_counted(streams: list[Stream], text: str) -> None:
    (found,) = (each for each in health(picture(streams=streams)) if each.subject == "streamlets")
    assert (found.severity, found.text) == (Severity.OK, text)


@pytest.mark.parametrize(
    ("fields", "severity", "text"),
    [
        pytest.param({}, Severity.PROBLEM, "is lost, and cannot be read", id="lost"),
        pytest.param({"restarting": True, "grace_left_ms": 41_000}, Severity.WARNING, "restarts", id="restarting"),
    ],
)
def test_older_records_at_a_missing_broker_are_reported_with_their_streams(
    fields: dict[str, Any], severity: Severity, text: str
) -> None:
    streams = [Stream("orders", 1, 2), Stream("payments", 1), Stream("other", 2)]
    for stream in streams[:2]:
        for number, now in stream.assignments.items():
            intervals = Interval(1, 3), Interval(9, now.broker_id)
            stream.assignments[number] = Assignment(now.broker_id, 1, 9, intervals)
    brokers = [broker(1), broker(2), broker(3, alive=False, **fields)]
    found = [each for each in health(picture(cluster={"brokers": brokers}, streams=streams)) if each.severity]
    assert [each.subject for each in found] == ["broker 3", "older records"]
    assert found[1].severity is severity
    assert found[1].text == f"those of 3 streamlets are at broker 3, which {text}: orders, payments"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"cluster": {"backups": [backup(1, free_disk_bytes=(8 << 20) - 1)]}}, id="by-its-heartbeat"),
        pytest.param(
            {"daemons": {"backup 1": daemon(checks=(DaemonCheck("disks", "problem", "no disk takes replicas"),))}},
            id="by-its-own-word",
        ),
    ],
)
def test_a_backup_without_room_does_not_count_as_usable(fields: dict[str, Any]) -> None:
    (found,) = (each for each in health(picture(**fields)) if each.severity is Severity.PROBLEM)
    assert found.text == "0 can be used (1: no room), and there are streams with 1 replica: their writers wait"
    assert found.advice == "make room on the disks of those that have none, or start 1 more backup"


def test_a_backup_without_room_is_no_problem_while_other_backups_suffice() -> None:
    backups = [backup(1, free_disk_bytes=0), backup(2)]
    assert worst(health(picture(cluster={"backups": backups}))) is not Severity.PROBLEM


def test_doctor_reports_a_clock_difference_beyond_its_uncertainty() -> None:
    daemons = {
        "broker 1": daemon(clock_ahead_ms=-2000.0, clock_unsure_ms=10.0),
        "broker 2": daemon(clock_ahead_ms=700.0, clock_unsure_ms=600.0),
        "broker 3": Unavailable("refused"),
    }
    found = installed(picture(daemons=daemons))
    assert bad(found) == [("warning", "broker 3"), ("warning", "broker 1")]
    assert "its clock is 2.00 s behind this machine's" in [each.text for each in found]
    assert bad(installed(picture())) == []
    assert bad(installed(picture(cluster={"brokers": [broker(1), broker(2, alive=False)]}))) == [
        ("warning", "broker 2")
    ]


def test_the_worst_finding_comes_first_with_its_advice_below() -> None:
    found = [ok("a", "fine"), warning("bb", "slow", "wait"), problem("c", "gone", "start it")]
    assert lines(found) == [
        "problem  c   gone",
        "             → start it",
        "warning  bb  slow",
        "             → wait",
        "ok       a   fine",
    ]
    assert worst(found) is Severity.PROBLEM
    assert worst([]) is Severity.OK
    assert document(found)[1] == {"severity": "warning", "subject": "bb", "text": "slow", "advice": "wait"}


@contextlib.contextmanager
def reporting(monkeypatch: pytest.MonkeyPatch, said: Picture | Unavailable) -> Iterator[None]:
    """Give commands this cluster, or have their connections fail."""
    if isinstance(said, Unavailable):
        with FakeClient().answering(said):
            yield
        return

    async def describe_all(addresses: dict[str, str], _: object = None) -> dict[str, Any]:
        assert set(addresses) >= set(said.daemons)
        return said.daemons

    monkeypatch.setattr(asking, "describe_all", describe_all)
    looks = {"describe_cluster": said.cluster, "recoveries": said.recoveries, "list_streams": said.streams}
    with FakeClient(**looks).answering():
        yield


@pytest.mark.parametrize(
    ("said", "code", "word"),
    [
        (picture(), 0, "healthy"),
        (picture(recoveries=[recovery()]), 1, "degraded"),
        (picture(streams=[Stream("orders", 9)]), 2, "broken"),
        (Unavailable("no coordinator can be reached"), 2, "broken"),
    ],
)
def test_the_exit_code_shows_the_health_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: Picture | Unavailable,
    code: int,
    word: str,
) -> None:
    with reporting(monkeypatch, said):
        assert run_app(app, ["cluster", "health"]) == code
        assert capsys.readouterr().out.splitlines()[0] == word
        assert run_app(app, ["cluster", "health", "--json"]) == code
        told = json.loads(capsys.readouterr().out)
    assert told["health"] == word
    assert told["findings"]


def test_doctor_reports_an_unreachable_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporting(monkeypatch, Unavailable("no coordinator can be reached")):
        assert run_app(app, ["doctor", "--bootstrap", "h:1"]) == 2
    assert "none that leads answers at h:1: no coordinator can be reached" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["cluster", "health"], ["doctor", "--bootstrap", "h:1"]])
def test_invalid_client_settings_are_a_usage_error_without_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setenv("KERA_CLIENT_TLS_CA", "/nowhere/ca.pem")
    assert run_app(app, command) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "tls_ca /nowhere/ca.pem cannot be read: No such file or directory" in told.err


@pytest.mark.parametrize(
    ("cluster", "at", "expected"),
    [
        (False, {"broker 1": False, "coordinator c:1": False}, []),
        (True, {"broker 1": True, "coordinator c:1": True}, []),
        (True, {"broker 1": False, "coordinator c:1": True}, ["broker 1 serves whoever connects, and others ask"]),
        (False, {"broker 1": True, "coordinator c:1": False}, ["coordinator c:1 serves whoever connects"]),
    ],
)
@pytest.mark.parametrize("judge", [health, installed])
def test_a_daemon_without_security_in_a_secured_cluster_is_a_problem(
    judge: Any, cluster: bool, at: dict[str, bool], expected: list[str]
) -> None:
    daemons = {name: daemon(security=is_on) for name, is_on in at.items()}
    found = [
        each for each in judge(picture(cluster={"security": cluster}, daemons=daemons)) if each.subject == "security"
    ]
    told = [each.text for each in found if each.severity is Severity.PROBLEM]
    assert len(told) == len(expected)
    assert all(text.startswith(start) for text, start in zip(told, expected, strict=True))
    if cluster and not expected:
        assert [each.text for each in found] == ["everybody has to authenticate, and may do what rules allow"]


@pytest.mark.parametrize("error", [AuthenticationFailed("nobody has authenticated"), NotAllowed("may not describe")])
def test_a_refused_access_advises_to_set_credentials(error: KeraError) -> None:
    (found,) = unreachable("c:1", error)
    assert (found.severity, found.subject, found.text) == (Severity.PROBLEM, "access", error.message)
    assert "KERA_CLIENT_USER" in found.advice
