"""The classes that are models, their fields, and the text of pydantic's errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pydantic


def is_model(kind: Any) -> bool:
    """Return whether `kind` is a dataclass or a pydantic model: the class, and not an instance."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, pydantic.BaseModel))


def field_names(model: Any) -> list[str]:
    """Return the field names of a model, as in its class."""
    if issubclass(model, pydantic.BaseModel):
        return list(model.model_fields)
    return [field.name for field in dataclasses.fields(model)]


def what_is_wrong(error: pydantic.ValidationError) -> str:
    """Return the first errors of pydantic, each with its field, but without the values, which may be long."""
    if error.error_count() > _LISTED_MAX:
        return f"{error.error_count()} values in it are not as {error.title} has them"
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(_said(each) for each in found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


_LISTED_MAX = 100
"""Maximum number of errors to list: the list takes far more memory than the bytes with the errors."""


def _said(found: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in found["loc"])
    return f"{where}: {found['msg']}" if where else str(found["msg"])
