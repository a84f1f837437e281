"""Settings: typed, with a unit in each name and a reason in each description.

A part derives one class from `KeraSettings` and names its TOML section. Values come, strongest first, from flags (or
keyword arguments), the environment (``KERA_<SECTION>_<FIELD>``), the section of a TOML file, and the defaults.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from kera.core.base.spelling import closest, hint
from kera.core.errors import InvalidArgument, StartError

CONFIG_FILE_VARIABLE = "KERA_CONFIG"
"""Environment variable that names the TOML file when no flag does."""

SECTIONS = (
    "backup",
    "bench_consume",
    "bench_e2e",
    "bench_produce",
    "broker",
    "client",
    "consumer",
    "coordinator",
    "group_consumer",
    "producer",
)
"""Tables that a settings file may have. A part reads only its own, and must tell those of others from misspelt ones."""

FORMER_SECTIONS = {"group_consumer": "group"}
"""Former names of sections: a table or variable with one of these is refused; the error names the present section."""

HIDDEN_VALUE = "hidden_value"
"""Type of a `PydanticCustomError` about a value that must not be shown, as it may contain a secret."""

_config_file: contextvars.ContextVar[Path | None] = contextvars.ContextVar("kera_config_file", default=None)


class InvalidSettings(StartError):
    """A setting has a wrong value, is unknown, or the file cannot be read."""

    code = "invalid_settings"


@contextlib.contextmanager
def setting(name: str) -> Iterator[None]:
    """Report an invalid argument within this block as an error of the setting `name` that prevents the start."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidSettings(f"{name}: {error.message}", **error.attributes) from error


class _TomlSection(PydanticBaseSettingsSource):
    """The section of the TOML file that belongs to the settings class."""

    def get_field_value(self, _field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self._values())

    def _values(self) -> Mapping[str, Any]:
        path = _config_file.get()
        if path is None:
            return {}
        try:
            with path.open("rb") as file:
                document = tomllib.load(file)
        except (OSError, ValueError) as error:  # it cannot be read, is not TOML, or not even text
            raise InvalidSettings(f"cannot read settings file {path}: {error}", path=str(path)) from error
        section = getattr(self.settings_cls, "section", "")
        known = {*SECTIONS, section}
        for name, value in document.items():
            if not isinstance(value, dict) and name not in known:
                raise InvalidSettings(
                    f"{name} is outside of any table in {path}, as [{section}] is one", path=str(path)
                )
            if name not in known:
                renamed = [now for now, before in FORMER_SECTIONS.items() if before == name]
                meant = f", it is [{renamed[0]}] now" if renamed else hint(name, known)
                raise InvalidSettings(f"[{name}] is not a settings table{meant} ({path})", path=str(path))
        values = document.get(section, {})
        if not isinstance(values, dict):
            raise InvalidSettings(f"[{section}] in {path} must be a table", path=str(path))
        return values


class KeraSettings(BaseSettings):
    """Base of all settings classes. Instances are frozen; unknown names are errors, never ignored."""

    section: ClassVar[str] = ""
    """Table of the TOML file, and the middle of the environment variables' names."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        section = cls.__dict__.get("section")
        if section:
            cls.model_config["env_prefix"] = f"KERA_{section.upper()}_"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources of settings, strongest first."""
        del dotenv_settings, file_secret_settings  # more places to set things are more places to forget
        return init_settings, env_settings, _TomlSection(settings_cls)

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """Return its own fields, then inherited ones, those of the nearest base class first, for people to read."""
        names = [name for each in cls.__mro__ for name in inspect.get_annotations(each)]
        return {name: cls.model_fields[name] for name in names if name in cls.model_fields}

    @classmethod
    def load(cls, config_file: Path | None = None, **flags: Any) -> Self:
        """Return the settings from all sources; `flags` that are None count as not given.

        Raises `InvalidSettings`, which lists each wrong setting.
        """
        variable = os.environ.get(CONFIG_FILE_VARIABLE)
        token = _config_file.set(config_file or (Path(variable) if variable else None))
        try:
            variables = [f"{cls.model_config.get('env_prefix', '')}{name}".upper() for name in cls.model_fields]
            problems = [_unknown(name, variables) for name in cls._unknown_variables()]
            try:
                settings = cls(**{name: value for name, value in flags.items() if value is not None})
            except ValidationError as error:
                given = [name for name, value in flags.items() if value is not None]
                problems += [cls._problem(item, given) for item in error.errors()]
                raise cls._invalid(problems) from error
            except SettingsError as error:  # a variable that should be JSON and is not
                raise cls._invalid([*problems, str(error)]) from error
        finally:
            _config_file.reset(token)
        if problems:
            raise cls._invalid(problems)
        return settings

    @classmethod
    def _unknown_variables(cls) -> list[str]:
        """Return environment variables of this section that match no field; pydantic does not report them."""
        prefix = f"KERA_{FORMER_SECTIONS.get(cls.section, cls.section)}_".upper()
        known = {f"KERA_{cls.section}_{name}".upper() for name in cls.model_fields}
        return sorted(
            name for name in os.environ if cls.section and name.upper().startswith(prefix) and name.upper() not in known
        )

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number belongs: Python would take True for 1, which is never meant."""
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and not _takes_flags(field.annotation):
            raise PydanticCustomError("no_number", "true and false are not allowed")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_empty_path(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse an empty path: Python would take it for the current directory, which is never meant."""
        field = cls.model_fields.get(info.field_name or "")
        is_empty = "" in (value if isinstance(value, list | tuple) else [value])
        if is_empty and field is not None and _takes_paths(field.annotation):
            raise PydanticCustomError("empty_path", "it takes a path; the current directory is .")
        return value

    @classmethod
    def _problem(cls, item: ErrorDetails, given: Collection[str] = ()) -> str:
        location = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            return _unknown(location, cls.model_fields)
        if not location or not item["loc"]:
            return item["msg"]
        name = str(item["loc"][0])
        source = "" if name in given else cls._source(name)
        if item["type"] == HIDDEN_VALUE:
            return f"{location}{source}: {item['msg']}"
        return f"{location} is {item['input']!r}{source}: {item['msg']}{_FORMS.get(item['type'], '')}"

    @classmethod
    def _source(cls, name: str) -> str:
        """Return where the wrong value of a field that is not a flag comes from, so that it can be found."""
        variable = f"{cls.model_config.get('env_prefix', '')}{name}".upper()
        if any(each.upper() == variable for each in os.environ):
            return f" in {variable}"
        path = _config_file.get()
        return f" in [{cls.section}] of {path}" if path is not None else ""

    @classmethod
    def _invalid(cls, problems: list[str]) -> InvalidSettings:
        return InvalidSettings(f"invalid [{cls.section}] settings: {'; '.join(problems)}")


_FORMS = dict.fromkeys(
    ("byte_size", "byte_size_unit"),
    "; a size is a number of bytes, alone or with a unit: 1048576, 512KiB, 256MiB, 2GiB, 1GB",
)
"""Accepted forms, by kind of error, where pydantic does not explain them."""


def _takes_flags(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_flags, get_args(annotation)))


def _takes_paths(annotation: Any) -> bool:
    return annotation is Path or any(map(_takes_paths, get_args(annotation)))


def _unknown(name: str, known: Iterable[str]) -> str:
    meant = closest(name, known)
    return f"{name}: there is no such setting" + (f"; did you mean {meant!r}?" if meant else "")


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
