"""The command that lists the benchmarks and runs one of them."""

import os
import re
import sys
from pathlib import Path

import pytest

from bench import __main__ as command

ROOT = Path(__file__).parents[1]
STARTED_BY_OTHERS = {"due", "latency_path", "latency_reader", "soak_worker"}


class Became(Exception):
    """Raised in place of becoming a benchmark, with its arguments and its environment."""


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def execve(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        assert program == arguments[0] == sys.executable
        raise Became(arguments[1:], environment)

    monkeypatch.setattr(os, "execve", execve)


def scripts(monkeypatch: pytest.MonkeyPatch, *, missing: str = "", java: str | None = "a java") -> None:
    """All scripts succeed, except the one with `missing` in its path; Java is `java`."""
    monkeypatch.setattr(command, "_ran", lambda *words, **_: not (missing and missing in words[1]))
    monkeypatch.setattr(command, "_output", lambda *_words: java)


def test_every_program_has_a_name() -> None:
    programs = [*ROOT.glob("*.py"), *ROOT.glob("*/__main__.py")]
    named = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in programs
        if '__name__ == "__main__"' in path.read_text() and path != ROOT / "__main__.py"
    }
    assert named - STARTED_BY_OTHERS == {command.module_of(name).removeprefix("bench.") for name in command.BENCHMARKS}


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_list_shows_each_benchmark_with_its_duration(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 0

    lines = re.findall(r"^  (\S+) +(\S.*?)  (\S.*)$", capsys.readouterr().out, re.MULTILINE)
    assert lines == [(name, each.takes, each.text) for name, each in command.BENCHMARKS.items()]


def test_a_benchmark_replaces_the_command_and_gets_the_other_arguments() -> None:
    with pytest.raises(Became) as became:
        command.main(["small-requests", "--rounds", "1"])

    assert became.value.args == (["-m", "bench.small_requests", "--rounds", "1"], dict(os.environ))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("fairness_dep", "did you mean fairness-deep?"), ("comparison", "did you mean compare?"), ("x", "lists them")],
)
def test_the_error_for_an_unknown_name_suggests_the_closest_one(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([name]) == 2

    assert re.fullmatch(rf"bench: there is no benchmark {name}: .*{re.escape(hint)}\n", capsys.readouterr().err)


def test_spark_benchmarks_use_the_found_java_and_ignore_spark_home(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts(monkeypatch)
    monkeypatch.setenv("SPARK_HOME", "another spark")

    with pytest.raises(Became) as became:
        command.main(["spark-engines"])

    environment = became.value.args[1]
    assert (environment["JAVA_HOME"], environment["PYSPARK_PYTHON"]) == ("a java", sys.executable)
    assert "SPARK_HOME" not in environment


def test_a_missing_jar_is_reported_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts(monkeypatch, missing="build.py")

    assert command.main(["spark-engines"]) == 1

    assert capsys.readouterr().err.endswith("run make jar\n")


@pytest.mark.parametrize(("missing", "java"), [("kafka.sh", "a java"), ("", None)])
def test_a_missing_dependency_ends_the_command(monkeypatch: pytest.MonkeyPatch, missing: str, java: str | None) -> None:
    scripts(monkeypatch, missing=missing, java=java)

    assert command.main(["connect"]) == 1


def test_the_comparison_runs_without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts(monkeypatch, java=None)
    monkeypatch.setenv("JAVA_HOME", "a java that is too old")

    with pytest.raises(Became) as became:
        command.main(["compare"])

    assert "JAVA_HOME" not in became.value.args[1]


def test_the_help_of_a_benchmark_needs_no_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts(monkeypatch, missing="build.py", java=None)

    with pytest.raises(Became):
        command.main(["spark-engines", "--help"])
