"""`kera.cli._settings_flags` and `_lazy`: a settings class as the flags of a command."""

import enum
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import typer
from pydantic import ByteSize, Field

from kera.cli._lazy import add_lazy_command
from kera.cli._run import run_app
from kera.cli._settings_flags import command_function
from kera.core.base.settings import MIB, KeraSettings


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class ExampleSettings(KeraSettings):
    section: ClassVar[str] = "example"

    address: str = Field("127.0.0.1:1", description="Where it is.")
    arena_bytes: int = Field(256 * MIB, description="How much memory.")
    message_bytes_max: ByteSize = Field(ByteSize(1 * MIB), description="How long a message.")
    port: int | None = Field(None, le=65535, description="Which port.")
    wait_ms: float = Field(0.0, description="How long.")
    data_dir: Path = Field(Path("~/data"), description="Which directory.")
    ephemeral: bool = Field(default=False, description="Whether it goes.")
    level: Literal["low", "high"] = Field("low", description="Which level.")
    colour: Colour = Field(Colour.RED, description="Which colour.")
    sizes: tuple[ByteSize, ...] = Field((ByteSize(100),), description="Which sizes.")


@pytest.fixture
def seen() -> list[ExampleSettings]:
    """The settings of each run of the command."""
    return []


@pytest.fixture
def app(seen: list[ExampleSettings]) -> typer.Typer:
    def run(settings: ExampleSettings) -> int:
        seen.append(settings)
        return 7

    app = typer.Typer(rich_markup_mode=None)
    add_lazy_command(app, "example", "Show an example.", lambda: command_function(ExampleSettings, run))
    app.command("other")(lambda: None)
    return app


def test_flags_become_settings_and_the_result_the_exit_code(app: typer.Typer, seen: list[ExampleSettings]) -> None:
    flags = {
        "--address": "host:2",
        "--arena-bytes": "1GiB",
        "--message-bytes-max": "2_097_152",
        "--port": "7",
        "--wait-ms": "0.5",
        "--data-dir": "/x",
        "--level": "high",
        "--colour": "blue",
    }
    arguments = [word for pair in flags.items() for word in pair]

    assert run_app(app, ["example", *arguments, "--ephemeral", "--sizes", "1kB", "--sizes", "5"]) == 7

    assert seen == [
        ExampleSettings(
            address="host:2",
            arena_bytes=1 << 30,
            message_bytes_max=ByteSize(2 << 20),
            port=7,
            wait_ms=0.5,
            data_dir=Path("/x"),
            ephemeral=True,
            level="high",
            colour=Colour.BLUE,
            sizes=(ByteSize(1000), ByteSize(5)),
        )
    ]


def test_flags_override_the_environment_and_the_environment_overrides_the_file(
    app: typer.Typer, seen: list[ExampleSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "kera.toml"
    config.write_text('[example]\naddress = "file:1"\nlevel = "high"\narena_bytes = 1\nephemeral = true\n')
    monkeypatch.setenv("KERA_EXAMPLE_ADDRESS", "environment:1")
    monkeypatch.setenv("KERA_EXAMPLE_ARENA_BYTES", "2MiB")
    monkeypatch.setenv("KERA_EXAMPLE_SIZES", "[1, 2]")

    run_app(app, ["example", "--config", str(config), "--address", "flag:1", "--no-ephemeral"])

    assert seen == [
        ExampleSettings(
            address="flag:1",
            level="high",
            arena_bytes=2 * MIB,
            ephemeral=False,
            sizes=(ByteSize(1), ByteSize(2)),
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "x"], "invalid [example] settings: port is 'x': "),
        (["--port", "70000"], "port is '70000': Input should be less than or equal to 65535"),
        (["--arena-bytes", "5x"], "--arena-bytes: '5x' is not a size"),
        (["--level", "middle"], "level is 'middle': Input should be 'low' or 'high'"),
        (["--what"], "No such option: --what"),
        (["--config", "/absent.toml"], "cannot read settings file /absent.toml"),
    ],
)
def test_an_invalid_flag_is_a_usage_error_of_one_line(
    app: typer.Typer, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run_app(app, ["example", *arguments]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("kera: error: ")
    assert says in line


def test_a_list_in_the_environment_that_is_not_json_is_a_usage_error(
    app: typer.Typer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERA_EXAMPLE_SIZES", "1 2")
    assert run_app(app, ["example"]) == 2
    assert 'error parsing value for field "sizes"' in capfd.readouterr().err


def test_help_has_the_description_the_variable_and_the_default(
    app: typer.Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["example", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Show an example.",
        "--arena-bytes SIZE How much memory. [env: KERA_EXAMPLE_ARENA_BYTES, default: 256 MiB]",
        "--message-bytes-max SIZE How long a message. [env: KERA_EXAMPLE_MESSAGE_BYTES_MAX, default: 1 MiB]",
        "--port NUMBER Which port. [env: KERA_EXAMPLE_PORT]",
        "--wait-ms NUMBER How long. [env: KERA_EXAMPLE_WAIT_MS, default: 0]",
        "--data-dir PATH Which directory. [env: KERA_EXAMPLE_DATA_DIR, default: ~/data]",
        "--ephemeral / --no-ephemeral Whether it goes. [env: KERA_EXAMPLE_EPHEMERAL, default: off]",
        "--level low|high Which level. [env: KERA_EXAMPLE_LEVEL, default: low]",
        "--colour red|blue Which colour. [env: KERA_EXAMPLE_COLOUR, default: red]",
        "--config FILE TOML file whose table [example] has settings",
    ):
        assert part in text


def test_a_lazy_command_is_loaded_only_when_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> Any:
        raise AssertionError("loaded")

    app = typer.Typer(rich_markup_mode=None)
    add_lazy_command(app, "slow", "Take long to load.", load)
    app.command("other")(lambda: None)

    assert run_app(app, ["--help"]) == 0
    assert "Take long to load." in capsys.readouterr().out
    assert run_app(app, ["other"]) == 0
    with pytest.raises(AssertionError, match="loaded"):
        run_app(app, ["slow"])
