"""Makes the flags of a command from the fields of a settings class: one flag per field, nothing written twice.

``arena_bytes: int = Field(256 * MIB, description="Size of …, in bytes.")`` becomes ``--arena-bytes``, whose help has
the description, the environment variable and the default. A flag that is not given stays None, so that
`KeraSettings.load` looks at the environment, the file and the default; it alone checks values. This module parses only
sizes such as ``256MiB``.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from kera.cli._paths import path_of
from kera.cli._sizes import parse_size
from kera.core.base.settings import CONFIG_FILE_VARIABLE, KeraSettings
from kera.core.base.sizes import format_size

_METAVARS = {int: "NUMBER", float: "NUMBER", Path: "PATH"}


def command_function(settings_class: type[KeraSettings], run: Callable[[Any], int]) -> Callable[..., int]:
    """Return a function that typer makes a command of: it takes a flag per field and calls `run` with the settings."""

    def command(*, config: Path | None, **flags: Any) -> int:
        return run(settings_class.load(config, **_values(settings_class, flags)))

    parameters = [_config_parameter(settings_class)]
    parameters += [_parameter(settings_class, name, field) for name, field in settings_class.fields().items()]
    command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _values(settings_class: type[KeraSettings], flags: dict[str, Any]) -> dict[str, Any]:
    return {
        name: parse_size(value, name=_flag(name))
        if _is_size(name, _plain_type(settings_class.model_fields[name]))
        else value
        for name, value in flags.items()
        if value is not None and value != []
    }


def _config_parameter(settings_class: type[KeraSettings]) -> inspect.Parameter:
    option = typer.Option(
        None,
        "--config",
        metavar="FILE",
        parser=path_of("--config"),
        envvar=CONFIG_FILE_VARIABLE,
        show_envvar=False,
        help=f"TOML file whose table [{settings_class.section}] has settings; flags and environment win."
        f"  [env: {CONFIG_FILE_VARIABLE}]",
    )
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=Path | None)


def _parameter(settings_class: type[KeraSettings], name: str, field: FieldInfo) -> inspect.Parameter:
    plain = _plain_type(field)
    declaration, metavar = _flag(name), _metavar(name, plain)
    annotation: Any = str | None
    if plain is bool:
        declaration, annotation = f"{declaration}/--no-{declaration[2:]}", bool | None
    variable = f"{settings_class.model_config.get('env_prefix', '')}{name}".upper()
    is_list = get_origin(plain) in (list, tuple, set, frozenset)
    if is_list:
        annotation = list[str] | None
    default = _default_text(name, plain, field)
    notes = [f"env: {variable}"] + ([f"default: {default}"] if default else [])
    option = typer.Option(
        None,
        declaration,
        metavar=metavar,
        envvar=None if is_list else variable,  # pydantic reads lists in the environment, as JSON
        show_envvar=False,  # `notes` has the variable and the default: typer does not know the text of either
        help=f"{field.description or ''}  [{', '.join(notes)}]",
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain_type(field: FieldInfo) -> Any:
    """Return the field's type without ``| None``."""
    if get_origin(field.annotation) in (Union, types.UnionType):
        alternatives = [kind for kind in get_args(field.annotation) if kind is not type(None)]
        return alternatives[0] if len(alternatives) == 1 else str
    return field.annotation


def _is_size(name: str, plain: Any) -> bool:
    return isinstance(plain, type) and issubclass(plain, int) and "bytes" in name.split("_")


def _metavar(name: str, plain: Any) -> str | None:
    if plain is bool:
        return None
    if _is_size(name, plain):
        return "SIZE"
    if get_origin(plain) is Literal:
        return "|".join(str(value) for value in get_args(plain))
    if isinstance(plain, type) and issubclass(plain, enum.Enum):
        return "|".join(str(member.value) for member in plain)
    return _METAVARS.get(plain, "TEXT")


def _default_text(name: str, plain: Any, field: FieldInfo) -> str | None:
    """Return the default as text; None when there is nothing to show."""
    default = field.get_default(call_default_factory=True, validated_data={})
    text: str | None
    match default:
        case None | "":
            text = None
        case bool():
            text = "on" if default else "off"
        case enum.Enum():
            text = str(default.value)
        case float():
            text = f"{default:g}"
        case list() | tuple() | set() | frozenset():
            text = " ".join(str(item) for item in default) or None
        case _:
            text = format_size(default) if _is_size(name, plain) else str(default)
    return text
