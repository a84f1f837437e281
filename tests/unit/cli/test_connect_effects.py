"""`kera.cli.connect`: each option of a copy has an effect on its source or target, or is refused with the reason."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

from kera.cli._run import UsageError, run_app
from kera.cli.app import app
from kera.cli.connect import _copy
from kera.cli.connect._effects import RULES, UNGIVEN
from kera.cli.connect._options import CopyOptions, ValueFormat
from kera.connect.endpoints import FilesEnd, StreamEnd, TableEnd
from kera.connect.postgres.sink import TableSink
from kera.core.errors import InvalidArgument, UnknownStream

ADDRESSES = {
    "stream": "kera:a",
    "stream elsewhere": "kera://far:7400/b",
    "topic": "kafka://host/t",
    "table": "postgresql://db/x?table=t",
    "file": "a.csv",
    "directory": "d/",
}
COPIES = [
    *((source, "stream elsewhere") for source in ("stream", "topic", "table", "file")),
    *(("stream", target) for target in ("topic", "table", "file", "directory")),
    ("file", "stream"),
]
KEPT = {"stream elsewhere", "stream", "topic", "table"}
STREAMS = {"stream elsewhere", "stream"}

Has = Callable[[str, str], bool]
OPTIONS: dict[str, tuple[Any, dict[str, Any], Has]] = {
    "name": ("mine", {}, lambda _, target: target in KEPT),
    "create": (True, {}, lambda _, target: target in KEPT),
    "streamlets": (3, {"create": True}, lambda _, target: target in STREAMS | {"topic"}),
    "key": ("k", {"create": True}, lambda _, target: target in STREAMS),
    "time": ("t", {"value": ValueFormat.JSON}, lambda _, target: target in STREAMS),
    "partitioner": ("murmur2_random", {}, lambda _, target: target in STREAMS),
    "value": (ValueFormat.AVRO, {}, lambda _, target: target in STREAMS),
    "subject": ("orders", {"value": ValueFormat.AVRO}, lambda _, target: target in STREAMS),
    "follow": (True, {}, lambda _, target: target != "file"),
    "from_latest": (True, {}, lambda source, _: source != "file"),
    "file_format": ("jsonl", {}, lambda source, target: bool({source, target} & {"file", "directory"})),
    "file_bytes": (1 << 20, {}, lambda _, target: target == "directory"),
    "kafka_config": ("kafka.properties", {}, lambda source, target: "topic" in {source, target}),
    "skip_lost": (True, {}, lambda source, _: source in STREAMS | {"topic"}),
    "bootstrap_given": (True, {}, lambda source, target: "stream" in {source, target}),
}
"""By field of `CopyOptions`: a value, the options that it needs to have an effect, and the copies that it affects."""


def test_the_table_has_every_option_of_the_command() -> None:
    commands: Any = typer.main.get_command(app)
    of_command = {option.name for option in commands.commands["connect"].commands["copy"].params}
    fields = {"begin": "from_latest", "file_size": "file_bytes", "bootstrap": "bootstrap_given"}
    everywhere = {"source", "target", "as_json", "context"}

    assert {fields.get(name, name) for name in of_command - everywhere} == OPTIONS.keys() == RULES.keys()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns the parts of a copy with given options: the arguments of its source and target, and more."""
    for module in ("confluent_kafka", "adbc_driver_manager", "adbc_driver_postgresql"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for name in (
        *("streams.source.StreamSource", "kafka.source.TopicSource", "files.source.FilesSource"),
        *("postgres.source.TableSource", "values.source.EncodedSource", "streams.sink.StreamSink"),
        *("kafka.sink.TopicSink", "files.sink.FilesSink", "postgres.sink.TableSink"),
    ):
        monkeypatch.setattr(f"kera.connect.{name}", lambda *given, name=name, **named: (name, given, named))

    async def describe(name: str) -> None:
        raise UnknownStream("none", stream=name)

    async def copy(options: CopyOptions) -> Any:
        source, target = _copy.ends(options)
        bootstrap = "near:7400" if options.bootstrap_given else "default:7400"
        options = replace(options, bootstrap=bootstrap)
        ends = [end for end in (source, target) if isinstance(end, StreamEnd)]
        clients: Any = {
            end.bootstrap or bootstrap: SimpleNamespace(describe=describe, schemas="registry") for end in ends
        }
        name = options.name or "default"
        sink = _copy.make_sink(target, name, options, clients)
        parts = (await _copy.make_source(source, target, name, options, clients), sink)
        return parts, sorted(clients)

    return copy


@pytest.mark.parametrize("field", OPTIONS)
async def test_an_option_has_an_effect_or_is_refused(
    field: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kafka.properties").write_text("security.protocol=SSL\n")
    value, companions, has_effect = OPTIONS[field]
    given: dict[str, Any] = {field: Path(value) if field == "kafka_config" else value}
    for source, target in COPIES:
        plain = replace(UNGIVEN, source=ADDRESSES[source], target=ADDRESSES[target])
        if target == "directory":
            plain = replace(plain, file_format="csv")  # the name of a directory does not show the format

        if has_effect(source, target):
            plain = replace(plain, **companions)
            assert repr(await made(replace(plain, **given))) != repr(await made(plain)), (source, target)
            continue
        with pytest.raises(UsageError, match=f"{RULES[field][0]} has no effect: ") as refused:
            await made(replace(plain, **given))
        assert "\n" not in refused.value.message, (source, target)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("streamlets", "--streamlets has no effect: it is for a stream or a topic that the copy creates: add --create"),
        ("key", "--key has no effect: it is for a stream that the copy creates: with --create, or with --value"),
        ("subject", "--subject has no effect: it names the schema of encoded values: add --value avro, or json"),
    ],
)
def test_an_option_without_its_companion_is_refused_with_a_hint(field: str, said: str) -> None:
    options = replace(UNGIVEN, source="kera:a", target="kera:b", **{field: OPTIONS[field][0]})

    with pytest.raises(UsageError) as refused:
        _copy.ends(options)
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize("parameter", ["query", "key", "settle"])
def test_a_target_table_refuses_the_parameters_of_source_tables(parameter: str) -> None:
    given: dict[str, Any] = {"table": "t", parameter: ("a",) if parameter == "key" else "1"}
    end = TableEnd("postgresql://db/x", **given)
    end = replace(end, table="") if parameter == "query" else end

    with pytest.raises(InvalidArgument, match="no query, key, settle or changes"):
        TableSink(end, "mine", create=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kafka://h/", "kera:a"], "kafka://host:9092/topic"),
        (["redis://h/x", "kera:a"], "redis"),
        (["postgresql://db/x?table=t&changes=all", "kera:a"], "changes=logical"),
        (["a.csv", "kera:a", "--name", "a b"], "not a copy's name"),
        (["a.csv", "kera:a", "--from", "latest"], "--from latest has no effect"),
        (["a.csv", "b.csv"], "one of the two has to be a stream"),
    ],
)
def test_an_invalid_command_line_ends_with_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["connect", "copy", *arguments]) == 2

    assert said in capsys.readouterr().err


async def test_a_settings_file_that_cannot_be_read_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", ModuleType("confluent_kafka"))
    monkeypatch.setattr(_copy, "connected", lambda _: contextlib.nullcontext())
    options = replace(UNGIVEN, source="kera:a", target="kafka://h/t", kafka_config=Path("none.properties"))

    with pytest.raises(UsageError, match=r"--kafka-config: none\.properties cannot be read"):
        await _copy.run(options)


def test_follow_is_refused_for_a_single_file_and_allowed_for_a_directory() -> None:
    _copy.ends(replace(UNGIVEN, source="kera:a", target="d/", file_format="csv", follow=True))
    with pytest.raises(UsageError, match="--follow has no effect: a single file appears when the copy ends"):
        _copy.ends(replace(UNGIVEN, source="kera:a", target="d", file_format="csv", follow=True))
    assert FilesEnd("d/", "csv", many=True).many
