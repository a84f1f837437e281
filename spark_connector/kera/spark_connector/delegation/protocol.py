"""The protocol between planning processes and the process that keeps tokens.

    request   {"bootstrap": "h:1", "settings": {…}, "resources": ["stream:a"], "lifetime_ms": 28800000, "hold": false}
    answer    {"token": "…"}
    or        {"error": {"code": "not_allowed", "message": "…", "attributes": {…}}}

One JSON object per line each way. What is asked for with ``hold`` is held until the connection ends, all else until the
driver does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kera.client import ClientSettings


def settings_to_json(settings: ClientSettings) -> dict[str, Any]:
    """With what is secret: for a socket between processes of one user, and for nothing else."""
    values = settings.model_dump()
    for name in ("password", "token"):
        if values[name] is not None:
            values[name] = values[name].get_secret_value()
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def settings_from_json(values: dict[str, Any]) -> ClientSettings:
    """The same back, whatever the environment of this process says."""
    from kera.client import ClientSettings

    return ClientSettings(**values)
