"""Settings: their sources, and the errors about wrong ones."""

import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ByteSize, Field, ValidationError, model_validator

import kera.backup
import kera.broker
import kera.cli
import kera.client
import kera.coordinator
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.core.base.settings import CONFIG_FILE_VARIABLE, FORMER_SECTIONS, SECTIONS, InvalidSettings, KeraSettings

PACKAGES = (kera.backup, kera.broker, kera.cli, kera.client, kera.coordinator)


class ExampleSettings(KeraSettings):
    section: ClassVar[str] = "example"

    linger_ms: int = Field(5, ge=0, description="For testing.")
    name: str = "default"
    hosts: list[str] = Field(default=[])


class SizedSettings(KeraSettings):
    section: ClassVar[str] = "sized"

    memory_bytes: ByteSize = Field(ByteSize(1), description="For testing.")


class PlacedSettings(KeraSettings):
    section: ClassVar[str] = "placed"

    data_dir: Path = Path("here")
    log_dirs: list[Path] = Field(default=[])
    rack: str = ""


class StrictSettings(KeraSettings):
    section: ClassVar[str] = "strict"

    low: int = 1
    high: int = 2

    @model_validator(mode="after")
    def _consistent(self) -> "StrictSettings":
        if self.low > self.high:
            raise ValueError("low must not be over high")
        return self


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KERA_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kera.toml"
    path.write_text('[example]\nlinger_ms = 10\nname = "file"\n\n[broker]\nunknown_here = 1\n')
    return path


# --- precedence --------------------------------------------------------------------------------------------


def test_defaults_apply_without_other_sources() -> None:
    assert ExampleSettings.load() == ExampleSettings()
    assert ExampleSettings.load().linger_ms == 5


def test_the_file_wins_over_the_defaults(file: Path) -> None:
    settings = ExampleSettings.load(file)

    assert (settings.linger_ms, settings.name, settings.hosts) == (10, "file", [])


def test_the_environment_wins_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_EXAMPLE_LINGER_MS", "20")

    settings = ExampleSettings.load(file)

    assert (settings.linger_ms, settings.name) == (20, "file")


def test_a_flag_wins_over_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_EXAMPLE_LINGER_MS", "20")

    assert ExampleSettings.load(file, linger_ms=30).linger_ms == 30


def test_a_flag_that_is_none_counts_as_not_given(file: Path) -> None:
    assert ExampleSettings.load(file, linger_ms=None).linger_ms == 10


def test_a_flag_that_is_false_or_empty_counts(file: Path) -> None:
    settings = ExampleSettings.load(file, linger_ms=0, name="")

    assert (settings.linger_ms, settings.name) == (0, "")


def test_the_environment_can_name_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(file))

    assert ExampleSettings.load().name == "file"


def test_a_file_named_by_flag_wins_over_one_named_by_the_environment(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.toml"
    other.write_text('[example]\nname = "other"\n')
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(file))

    assert ExampleSettings.load(other).name == "other"


def test_an_empty_variable_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, "")

    assert ExampleSettings.load() == ExampleSettings()


def test_a_file_is_forgotten_after_it_was_loaded(file: Path) -> None:
    ExampleSettings.load(file)

    assert ExampleSettings().name == "default"


def test_a_list_comes_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_EXAMPLE_HOSTS", '["a:1", "b:2"]')

    assert ExampleSettings.load().hosts == ["a:1", "b:2"]


def test_sections_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_STRICT_LOW", "2")

    assert ExampleSettings.load() == ExampleSettings()
    assert StrictSettings.load().low == 2


# --- wrong settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[exmaple]\nlinger_ms = 1", r"\[exmaple\] is not a settings table; did you mean 'example'\?"),
        ("[Example]\nlinger_ms = 1", r"\[Example\] is not a settings table; did you mean 'example'\?"),
        ("[producr]\nlinger_ms = 1", "did you mean 'producer'"),
        ("[zzz]\nx = 1", "there are .*'broker'"),
        ("linger_ms = 1", "linger_ms is outside of any table"),
        ("[example]\nlinger_sm = 1", "linger_sm: there is no such setting; did you mean 'linger_ms'"),
    ],
)
def test_a_misspelt_name_in_a_file_is_refused_with_a_suggestion(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "kera.toml"
    path.write_text(text)
    with pytest.raises(InvalidSettings, match=said):
        ExampleSettings.load(path)


@pytest.mark.parametrize("variable", ["KERA_EXAMPLE_LINGERMS", "kera_example_linger_s"])
def test_a_misspelt_variable_is_refused_with_a_suggestion(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    said = f"{variable}: there is no such setting; did you mean 'KERA_EXAMPLE_LINGER_MS'"
    with pytest.raises(InvalidSettings, match=said):
        ExampleSettings.load()


def test_a_misspelt_keyword_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidSettings, match="linger: there is no such setting; did you mean 'linger_ms'"):
        ExampleSettings.load(linger=5)


def test_a_setting_under_a_former_name_is_refused_with_the_present_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for now, before in FORMER_SECTIONS.items():
        file = tmp_path / "kera.toml"
        file.write_text(f'[{before}]\nstart = "latest"\n')
        with pytest.raises(InvalidSettings, match=rf"\[{before}\] is not a settings table, it is \[{now}\] now"):
            ExampleSettings.load(file)
    monkeypatch.setenv(f"KERA_{FORMER_SECTIONS['group_consumer']}_START".upper(), "latest")
    with pytest.raises(InvalidSettings, match="did you mean 'KERA_GROUP_CONSUMER_START'"):
        GroupConsumerSettings.load()


def test_the_list_of_sections_has_all_sections_of_the_settings() -> None:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "settings" in found.name:
                importlib.import_module(found.name)

    def below(of: type[KeraSettings]) -> Iterator[type[KeraSettings]]:
        for each in of.__subclasses__():
            yield each
            yield from below(each)

    # A class without a section is a base of others.
    used = {each.section for each in below(KeraSettings) if each.__module__.startswith("kera.") and each.section}
    assert used == set(SECTIONS)


def test_the_error_names_a_wrong_flag() -> None:
    with pytest.raises(
        InvalidSettings, match=r"invalid \[example\] settings: linger_ms is -1: .*greater than or equal to 0"
    ):
        ExampleSettings.load(linger_ms=-1)


def test_the_error_names_all_wrong_settings_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_EXAMPLE_NAMES", "typing error")

    with pytest.raises(InvalidSettings, match=r"KERA_EXAMPLE_NAMES: .*linger_ms is 'x': .*hosts is 1: "):
        ExampleSettings.load(linger_ms="x", hosts=1)


@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_or_a_fraction_is_refused_as_number_or_name(value: bool) -> None:
    for name in ("linger_ms", "name"):
        with pytest.raises(InvalidSettings, match=f"{name} is {value}: true and false are not allowed"):
            ExampleSettings.load(None, **{name: value})
    with pytest.raises(InvalidSettings, match=r"linger_ms is 1\.5: "):
        ExampleSettings.load(linger_ms=1.5)


def test_the_error_about_an_empty_path_names_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kera.toml"
    path.write_text('[placed]\nlog_dirs = ["/a", ""]\n')
    monkeypatch.setenv("KERA_PLACED_DATA_DIR", "")

    with pytest.raises(InvalidSettings) as refused:
        PlacedSettings.load(path)

    said = "it takes a path; the current directory is ."
    assert f"data_dir is '' in KERA_PLACED_DATA_DIR: {said}" in refused.value.message
    assert f"log_dirs is ['/a', ''] in [placed] of {path}: {said}" in refused.value.message
    assert PlacedSettings.load(data_dir=".", log_dirs=["/a"], rack="").data_dir == Path()


def test_the_error_about_an_invalid_size_names_its_source_and_valid_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kera.toml"
    path.write_text('[sized]\nmemory_bytes = "lots"\n')
    forms = "a size is a number of bytes, alone or with a unit: 1048576, 512KiB, 256MiB"
    with pytest.raises(InvalidSettings) as refused:
        SizedSettings.load(path)
    assert f"memory_bytes is 'lots' in [sized] of {path}: " in refused.value.message
    assert forms in refused.value.message

    monkeypatch.setenv("KERA_SIZED_MEMORY_BYTES", "5XB")
    with pytest.raises(InvalidSettings) as refused:
        SizedSettings.load(path)
    assert "memory_bytes is '5XB' in KERA_SIZED_MEMORY_BYTES: " in refused.value.message
    assert forms in refused.value.message

    with pytest.raises(InvalidSettings, match="memory_bytes is 'much': ") as refused:
        SizedSettings.load(path, memory_bytes="much")
    assert SizedSettings.load(memory_bytes="256MiB").memory_bytes == 256 << 20


def test_the_error_names_a_setting_with_invalid_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_EXAMPLE_HOSTS", "a:1,b:2")

    with pytest.raises(InvalidSettings, match=r"invalid \[example\] settings: .*hosts"):
        ExampleSettings.load()


def test_the_error_about_several_settings_starts_without_a_name() -> None:
    with pytest.raises(InvalidSettings, match=r"settings: Value error, low must not be over high$"):
        StrictSettings.load(low=3)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"[example", "Expected"),
        (b"\xff\xfe", "decode"),
        (b"example = 1", r"\[example\] in .* must be a table"),
    ],
    ids=["missing", "no toml", "no text", "no table"],
)
def test_the_error_names_an_unusable_file(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "kera.toml"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InvalidSettings, match=problem) as caught:
        ExampleSettings.load(path)

    assert str(path) in caught.value.message
    assert caught.value.attributes == {"path": str(path)}


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ExampleSettings.load().name = "other"  # type: ignore[misc]  # which says the same
